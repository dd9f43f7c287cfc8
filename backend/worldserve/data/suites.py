"""Suites: which operations a world model learns, as data.

A suite is a definition, not code: adding one means adding a `Suite` to `SUITES`, and the generator,
the training and the evaluation take it from there.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PHYSICS_NAMES", "SUITES", "VIEWS", "Camera", "Operation", "Split", "Suite", "get_suite"]

#: Names of the physical quantities of one frame, in order; metres, and fractions for the flags.
#: In *edudemo* the gripper is the hand that moves in the plane of the experiment, and the object
#: the body that the experiment is about.
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

#: Every suite is seen from these, in this order.
VIEWS: tuple[str, ...] = ("front", "side")


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
    """One thing a user can do, and the simulator environment that shows it.

    `prompt` is what the operation is called; `paraphrases` say the same in other words.
    """

    name: str
    environment: str
    prompt: str
    paraphrases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """Seeds of the splits lie far apart, and so do the initial configurations drawn from them.

    episodes: per operation.
    """

    name: str
    seed: int
    episodes: int


@dataclass(frozen=True)
class Suite:
    """A family of operations seen from the same cameras at the same rate.

    clips: how many longer test clips, of `clip_frames` frames, the benchmarks replay in all; drawn
    from seeds of their own. source_px: (height, width) of what the camera sends, where that is not
    the model's own frame size.
    """

    name: str
    simulator: str
    operations: tuple[Operation, ...]
    cameras: tuple[Camera, ...]
    splits: tuple[Split, ...]
    clips: int
    frame_px: int = 64
    source_px: tuple[int, int] | None = None
    frames_per_episode: int = 101
    clip_frames: int = 221
    rate_hz: float = 10.0

    def split(self, name: str) -> Split:
        """The split called `name`; ValueError names the known ones."""
        for split in self.splits:
            if split.name == name:
                return split
        known = ", ".join(split.name for split in self.splits)
        raise ValueError(f"suite {self.name!r} has no split {name!r}; it has {known}")


def _splits(train: int, validation: int, test: int) -> tuple[Split, ...]:
    return (
        Split("test", 30_000, test),
        Split("validation", 20_000, validation),
        Split("train", 10_000, train),
    )


def _metaworld(*rows: tuple[str, str, str, str]) -> tuple[Operation, ...]:
    return tuple(Operation(row[0], f"{row[0]}-v3", row[1], row[2:]) for row in rows)


def _edudemo(*rows: tuple[str, str, str, str]) -> tuple[Operation, ...]:
    return tuple(Operation(row[0], row[0], row[1], row[2:]) for row in rows)


_CAMERAS = (
    Camera("front", (0.0, 0.65, 0.1), 1.1, 150.0, -30.0),
    Camera("side", (0.0, 0.65, 0.15), 1.25, 205.0, -42.0),
)

_KITCHEN = Suite(
    name="kitchen",
    simulator="metaworld",
    operations=_metaworld(
        ("drawer-open", "open the drawer", "pull the drawer open", "drawer open"),
        ("drawer-close", "close the drawer", "push the drawer shut", "drawer close"),
        ("faucet-open", "open the faucet", "turn the tap on", "faucet open"),
        ("window-open", "open the window", "slide the window open", "window open"),
        ("door-open", "open the door", "pull the door open", "door open"),
        ("door-close", "close the door", "push the door shut", "door close"),
        (
            "coffee-button",
            "press the button of the coffee machine",
            "start the coffee machine",
            "coffee button",
        ),
        (
            "coffee-push",
            "push the mug to the coffee machine",
            "bring the mug to the machine",
            "mug push",
        ),
        (
            "coffee-pull",
            "pull the mug from the coffee machine",
            "take the mug away from the machine",
            "mug pull",
        ),
        ("plate-slide", "slide the plate", "push the plate over", "plate slide"),
        ("sweep", "sweep the block off the table", "wipe the block away", "block sweep"),
        (
            "pick-place",
            "pick the block up and place it",
            "lift the block and put it down",
            "block pick",
        ),
    ),
    cameras=_CAMERAS,
    splits=_splits(train=72, validation=4, test=8),
    clips=47,
)

_INSPECTION = Suite(
    name="inspection",
    simulator="metaworld",
    operations=_metaworld(
        ("dial-turn", "turn the dial", "rotate the knob", "dial turn"),
        ("button-press", "press the button on the wall", "push the red button", "button press"),
        (
            "button-press-topdown",
            "press the button from above",
            "push the button down",
            "button down",
        ),
        ("lever-pull", "pull the lever", "lift the lever up", "lever pull"),
        ("handle-press", "press the handle", "push the handle down", "handle press"),
        ("handle-pull", "pull the handle", "lift the handle up", "handle pull"),
        ("door-lock", "lock the door", "turn the lock", "lock turn"),
        ("peg-unplug-side", "unplug the peg", "pull the plug out", "peg unplug"),
    ),
    cameras=_CAMERAS,
    splits=_splits(train=40, validation=4, test=8),
    clips=31,
    source_px=(2160, 3840),
)

_EDUDEMO = Suite(
    name="edudemo",
    simulator="pymunk",
    operations=_edudemo(
        ("pendulum", "swing the pendulum", "pull the bob aside and let go", "pendulum swing"),
        ("projectile", "shoot the ball with the sling", "launch the ball", "projectile launch"),
        ("collision", "let the two carts collide", "push one cart into the other", "cart collide"),
        ("incline", "push the block up the incline", "let the block slide down", "block incline"),
        ("spring", "stretch the spring", "pull the weight on the spring", "spring stretch"),
        ("bounce", "drop the ball and let it bounce", "let the ball fall", "ball bounce"),
        ("lever", "lift the load with the lever", "press the see-saw down", "load lever"),
        ("dominoes", "topple the dominoes", "push the first domino over", "domino topple"),
        ("pulley", "lift the weight with the pulley", "pull the rope down", "weight pulley"),
    ),
    cameras=(
        Camera("front", (0.0, 0.65, 0.24), 1.0, 90.0, 0.0),
        Camera("side", (0.0, 0.65, 0.23), 1.05, 122.0, -14.0),
    ),
    splits=_splits(train=48, validation=4, test=8),
    clips=63,
)

SUITES: dict[str, Suite] = {suite.name: suite for suite in (_KITCHEN, _INSPECTION, _EDUDEMO)}


def get_suite(name: str) -> Suite:
    """The suite called `name`; ValueError names the known ones."""
    try:
        return SUITES[name]
    except KeyError:
        raise ValueError(f"unknown suite {name!r}; known: {', '.join(sorted(SUITES))}") from None
