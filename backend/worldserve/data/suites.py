"""Suites: which operations a world model learns, as data.

A suite is a definition, not code: adding one means adding a `Suite` to `SUITES`, and the generator,
the training and the evaluation take it from there.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PHYSICS_NAMES", "SUITES", "Camera", "Operation", "Suite", "get_suite"]

#: Names of the physical quantities of one frame, in order; metres, and fractions for the flags.
PHYSICS_NAMES: tuple[str, ...] = (
    "gripper_x_m",
    "gripper_y_m",
    "gripper_z_m",
    "gripper_opening_m",
    "object_x_m",
    "object_y_m",
    "object_z_m",
    "grasped",
    "succeeded",
)


@dataclass(frozen=True)
class Camera:
    """A free camera: looks at `lookat_m` from `distance_m`, angles in degrees."""

    name: str
    lookat_m: tuple[float, float, float]
    distance_m: float
    azimuth_deg: float
    elevation_deg: float


@dataclass(frozen=True)
class Operation:
    """One thing a user can do, and the simulator environment that shows it."""

    name: str
    environment: str
    prompt: str


@dataclass(frozen=True)
class Suite:
    """A family of operations seen from the same cameras at the same rate."""

    name: str
    simulator: str
    operations: tuple[Operation, ...]
    cameras: tuple[Camera, ...]
    frame_px: int = 64
    frames_per_episode: int = 101
    rate_hz: float = 10.0


def _metaworld(*rows: tuple[str, str]) -> tuple[Operation, ...]:
    return tuple(Operation(name, f"{name}-v3", prompt) for name, prompt in rows)


_FRONT = Camera("front", (0.0, 0.65, 0.1), 1.1, 150.0, -30.0)

SUITES: dict[str, Suite] = {
    "kitchen": Suite(
        name="kitchen",
        simulator="metaworld",
        operations=_metaworld(
            ("drawer-open", "open the drawer"),
            ("drawer-close", "close the drawer"),
            ("faucet-open", "open the faucet"),
            ("window-open", "open the window"),
            ("door-open", "open the door"),
            ("door-close", "close the door"),
            ("coffee-button", "press the button of the coffee machine"),
            ("coffee-push", "push the mug to the coffee machine"),
            ("coffee-pull", "pull the mug from the coffee machine"),
            ("plate-slide", "slide the plate"),
            ("sweep", "sweep the block off the table"),
            ("pick-place", "pick the block up and place it"),
        ),
        cameras=(_FRONT,),
    ),
    "inspection": Suite(
        name="inspection",
        simulator="metaworld",
        operations=_metaworld(
            ("dial-turn", "turn the dial"),
            ("button-press", "press the button on the wall"),
            ("button-press-topdown", "press the button from above"),
            ("lever-pull", "pull the lever"),
            ("handle-press", "press the handle"),
            ("handle-pull", "pull the handle"),
            ("door-lock", "lock the door"),
            ("peg-unplug-side", "unplug the peg"),
        ),
        cameras=(_FRONT,),
    ),
}


def get_suite(name: str) -> Suite:
    """The suite called `name`; ValueError names the known ones."""
    try:
        return SUITES[name]
    except KeyError:
        raise ValueError(f"unknown suite {name!r}; known: {', '.join(sorted(SUITES))}") from None
