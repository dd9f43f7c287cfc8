"""The experiments of suite *edudemo*: each builds its bodies in a pymunk space.

Units are centimetres and seconds. The stage is 50 x 50 cm, x from -25 to 25, height from 0; the
floor is at 3. Gravity is a tenth of the Earth's, as in a slowed-down teaching video, so that ten
frames a second show what happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pymunk

__all__ = ["FLOOR", "GRAVITY", "SCENES", "STAGE", "Line", "Scene"]

STAGE = 50.0
FLOOR = 3.0
GRAVITY = 100.0
Colour = tuple[int, int, int]
_RED, _BLUE, _GREEN, _ORANGE = (205, 50, 45), (45, 90, 190), (50, 150, 80), (230, 140, 40)
_GREY, _DARK, _PURPLE = (120, 120, 125), (55, 55, 60), (125, 70, 160)


@dataclass(frozen=True)
class Line:
    """Something drawn between two bodies: a rod, a rope or a spring (drawn as a zigzag)."""

    kind: str
    a: pymunk.Body
    b: pymunk.Body
    at_a: tuple[float, float] = (0.0, 0.0)
    at_b: tuple[float, float] = (0.0, 0.0)


@dataclass
class Scene:
    """One experiment: `main` is the body it is about, `handles` what a hand can get hold of.

    goals: box (x low, x high, z low, z high) in which an experimenter lets go. succeeded: asked
    after every frame. after_step: called after every simulated step with the body that is held.
    """

    main: pymunk.Body
    handles: list[pymunk.Body]
    goals: tuple[float, float, float, float]
    succeeded: Callable[[], bool]
    lines: list[Line] = field(default_factory=list)
    pushes: bool = False
    after_step: Callable[[pymunk.Body | None], None] = lambda held: None
    configuration: tuple[float, ...] = ()


def _add(
    space: pymunk.Space,
    shape: pymunk.Shape,
    colour: Colour,
    friction: float = 0.5,
    elasticity: float = 0.2,
) -> None:
    shape.friction, shape.elasticity = friction, elasticity
    shape.colour = colour
    space.add(shape)


def _ball(
    space: pymunk.Space,
    x: float,
    z: float,
    radius: float,
    mass: float,
    colour: Colour,
    **how: float,
) -> pymunk.Body:
    body = pymunk.Body(mass, pymunk.moment_for_circle(mass, 0, radius))
    body.position = x, z
    space.add(body)
    _add(space, pymunk.Circle(body, radius), colour, **how)
    return body


def _box(
    space: pymunk.Space,
    x: float,
    z: float,
    size: tuple[float, float],
    mass: float,
    colour: Colour,
    turns: bool = True,
    **how: float,
) -> pymunk.Body:
    body = pymunk.Body(mass, pymunk.moment_for_box(mass, size) if turns else math.inf)
    body.position = x, z
    space.add(body)
    _add(space, pymunk.Poly.create_box(body, size, 0.1), colour, **how)
    return body


def _post(space: pymunk.Space, points: list[tuple[float, float]], colour: Colour) -> None:
    _add(space, pymunk.Poly(space.static_body, points), colour, 0.4)


def _pendulum(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    x, length = float(rng.uniform(-6, 6)), float(rng.uniform(18, 27))
    _post(space, [(x - 3, 43), (x + 3, 43), (x + 3, 45), (x - 3, 45)], _DARK)
    bob = _ball(space, x, 43 - length, 2.6, 1.0, _RED)
    space.add(pymunk.PinJoint(space.static_body, bob, (x, 43)))
    hook = pymunk.Body(body_type=pymunk.Body.STATIC)
    hook.position = x, 43
    return Scene(
        main=bob,
        handles=[bob],
        goals=(x - 18, x + 18, 20, 36),
        succeeded=lambda: abs(bob.position.x - x) > length * math.sin(math.radians(35)),
        lines=[Line("rod", hook, bob)],
        configuration=(x, length),
    )


def _projectile(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    x, z = float(rng.uniform(-14, -9)), float(rng.uniform(12, 18))
    fork = pymunk.Body(body_type=pymunk.Body.STATIC)
    fork.position = x, z
    pole = [(x - 0.7, FLOOR), (x + 0.7, FLOOR), (x + 0.7, z - 2.6), (x - 0.7, z - 2.6)]
    _post(space, pole, _GREY)
    goal = float(rng.uniform(8, 16))
    _post(space, [(goal - 3, FLOOR), (goal + 3, FLOOR), (goal + 3, 4), (goal - 3, 4)], _GREEN)
    ball = _ball(space, x, z, 2.0, 0.6, _ORANGE, elasticity=0.4)
    sling = pymunk.DampedSpring(fork, ball, (0, 0), (0, 0), 0.0, 60.0, 1.5)
    band = Line("rope", fork, ball)
    lines = [band]
    space.add(sling)
    drawn = [False]  # whether the band has been pulled since the ball was set on it

    def after_step(held: pymunk.Body | None) -> None:
        away = (ball.position - fork.position).length
        loaded = band in lines
        if held is ball and loaded:
            drawn[0] = drawn[0] or away > 4
        elif held is ball and away < 3:
            space.add(sling)
            lines.append(band)
            drawn[0] = False
        elif loaded and drawn[0] and held is not ball and away < 2:
            space.remove(sling)
            lines.remove(band)

    return Scene(
        main=ball,
        handles=[ball],
        goals=(x - 11, x - 4, z - 9, z + 2),
        succeeded=lambda: abs(ball.position.x - goal) < 3.5 and ball.position.y < 8,
        lines=lines,
        after_step=after_step,
        configuration=(x, z, goal),
    )


def _collision(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    left, right = float(rng.uniform(-18, -8)), float(rng.uniform(2, 12))
    masses = rng.uniform(0.6, 2.0, 2)
    made = [
        _box(space, x, FLOOR + 2.2, (7, 4), float(m), colour, False, friction=0.02, elasticity=0.9)
        for x, m, colour in zip((left, right), masses, (_BLUE, _RED), strict=True)
    ]
    first, second = made
    return Scene(
        main=second,
        handles=[first, second],
        goals=(-8, 8, FLOOR + 2, FLOOR + 5),
        succeeded=lambda: abs(second.position.x - right) > 5,
        pushes=True,
        configuration=(left, right, *map(float, masses)),
    )


def _incline(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    foot, height = float(rng.uniform(-12, -6)), float(rng.uniform(12, 19))
    _post(space, [(foot, FLOOR), (22, FLOOR), (22, height)], (200, 180, 130))
    slope = math.atan2(height - FLOOR, 22 - foot)
    along = float(rng.uniform(6, 20))
    block = _box(
        space,
        foot + along * math.cos(slope) - 2 * math.sin(slope),
        FLOOR + along * math.sin(slope) + 2 * math.cos(slope),
        (5, 3.4),
        1.0,
        _PURPLE,
        friction=float(rng.uniform(0.2, 0.6)),
    )
    block.angle = slope
    return Scene(
        main=block,
        handles=[block],
        goals=(2, 20, height - 4, height + 8),
        succeeded=lambda: bool(block.position.x > (foot + 22) / 2),
        pushes=True,
        configuration=(foot, height, along),
    )


def _spring(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    x, stiffness = float(rng.uniform(-10, 10)), float(rng.uniform(25, 60))
    _post(space, [(x - 5, 44), (x + 5, 44), (x + 5, 46), (x - 5, 46)], _DARK)
    hook = pymunk.Body(body_type=pymunk.Body.STATIC)
    hook.position = x, 44
    rest = 44 - 16 - GRAVITY / stiffness
    weight = _box(space, x, rest, (5, 5), 1.0, _GREEN, False)
    space.add(pymunk.DampedSpring(hook, weight, (0, 0), (0, 2.5), 13.5, stiffness, 0.6))
    return Scene(
        main=weight,
        handles=[weight],
        goals=(x - 6, x + 6, 8, 34),
        succeeded=lambda: abs(weight.position.y - rest) > 5,
        lines=[Line("spring", hook, weight, (0, 0), (0, 2.5))],
        configuration=(x, stiffness),
    )


def _bounce(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    x, spring = float(rng.uniform(-16, 16)), float(rng.uniform(0.7, 0.9))
    ball = _ball(space, x, float(rng.uniform(8, 30)), 2.6, 0.8, _BLUE, elasticity=spring)
    return Scene(
        main=ball,
        handles=[ball],
        goals=(-18, 18, 20, 42),
        succeeded=lambda: bool(ball.position.y > 20),
        configuration=(x, spring),
    )


def _lever(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    x, mass = float(rng.uniform(-4, 4)), float(rng.uniform(0.8, 2.0))
    _post(space, [(x - 3, FLOOR), (x + 3, FLOOR), (x, 8.6)], _GREY)
    plank = _box(space, x, 9, (32, 1.2), 1.0, (160, 110, 60), friction=0.9)
    space.add(pymunk.PivotJoint(space.static_body, plank, (x, 9)))
    side = float(rng.choice([-1.0, 1.0]))
    load = _box(space, x + side * 12, 12, (4.4, 4.4), mass, _RED, friction=0.9)
    return Scene(
        main=load,
        handles=[plank, load],
        goals=(x - side * 13 - 2, x - side * 13 + 2, 4, 9),
        succeeded=lambda: bool(load.position.y > 12),
        pushes=True,
        configuration=(x, mass, side),
    )


def _dominoes(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    count, gap = int(rng.integers(4, 7)), float(rng.uniform(3.6, 4.8))
    first = float(rng.uniform(-16, -8))
    stones = [
        _box(space, first + i * gap, FLOOR + 3.7, (1.5, 7.2), 0.3, colour, friction=0.6)
        for i, colour in enumerate((_RED, _ORANGE, _GREEN, _BLUE, _PURPLE, _RED)[:count])
    ]
    return Scene(
        main=stones[-1],
        handles=stones,
        goals=(first - 3, first + 6, FLOOR + 4, FLOOR + 8),
        succeeded=lambda: abs(stones[-1].angle) > math.radians(30),
        pushes=True,
        configuration=(first, gap, float(count)),
    )


def _pulley(space: pymunk.Space, rng: np.random.Generator) -> Scene:
    x, radius = float(rng.uniform(-8, 8)), 6.0
    axle = pymunk.Body(body_type=pymunk.Body.KINEMATIC)
    axle.position = x, 42
    wheel = pymunk.Circle(axle, radius)
    wheel.sensor = True
    space.add(axle)
    _add(space, wheel, (185, 185, 190))
    heights = (float(rng.uniform(22, 28)), float(rng.uniform(8, 14)))
    masses = (0.8, float(rng.uniform(0.9, 1.6)))
    light, heavy = (
        _box(space, x + side * radius, z, (4, size), m, colour, False)
        for side, z, m, size, colour in zip(
            (-1, 1), heights, masses, (4, 6), (_ORANGE, _DARK), strict=True
        )
    )
    for body, side in ((light, -1), (heavy, 1)):
        rail = x + side * radius
        space.add(pymunk.GrooveJoint(space.static_body, body, (rail, 4), (rail, 36), (0, 0)))
    total = sum(heights)

    def after_step(held: pymunk.Body | None) -> None:
        # The rope: what one weight sinks, the other rises.
        inverse = 1 / light.mass + 1 / heavy.mass
        impulse = -(light.velocity.y + heavy.velocity.y) / inverse
        impulse -= 8 * (light.position.y + heavy.position.y - total) / inverse
        for body in (light, heavy):
            body.velocity = body.velocity.x, 0.995 * (body.velocity.y + impulse / body.mass)
        axle.angle = light.position.y / radius

    hooks = []
    for side in (-1, 1):
        hook = pymunk.Body(body_type=pymunk.Body.STATIC)
        hook.position = x + side * radius, 42
        hooks.append(hook)
    return Scene(
        main=heavy,
        handles=[light, heavy],
        goals=(x - radius - 1, x - radius + 1, 6, 30),
        succeeded=lambda: bool(heavy.position.y > 18),
        lines=[Line("rope", hooks[0], light), Line("rope", hooks[1], heavy)],
        after_step=after_step,
        configuration=(x, *heights, masses[1]),
    )


SCENES: dict[str, Callable[[pymunk.Space, np.random.Generator], Scene]] = {
    "pendulum": _pendulum,
    "projectile": _projectile,
    "collision": _collision,
    "incline": _incline,
    "spring": _spring,
    "bounce": _bounce,
    "lever": _lever,
    "dominoes": _dominoes,
    "pulley": _pulley,
}
