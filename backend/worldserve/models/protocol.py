"""The protocol a world model implements to be served and cached.

Arrays at this boundary are NumPy; what happens inside (torch, CUDA, anything) is the model's own
affair. A *slice* is what the model must remember of one frame under the control that was applied at
it (for a transformer: that frame's keys and values in every layer). Slices are immutable,
content-addressed by the cache, and never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Absorbed",
    "CarriesOver",
    "Checkpoint",
    "Float",
    "ModelSpec",
    "Pixels",
    "Rendering",
    "RolloutInput",
    "RolloutOutput",
    "WorldModel",
]

Float = NDArray[np.float32]
Pixels = NDArray[np.uint8]
#: Called between small steps of a computation (a few milliseconds apart). Background work passes
#: one that waits while a request is being answered, or raises to give the computation up.
Checkpoint = Callable[[], None]


@dataclass(frozen=True)
class ModelSpec:
    """What the server and the cache need to know of a model.

    `physical` and `semantic` are ranges [start, stop) of state dimensions; `state_scale`
    (state_dim,) holds the standard deviation of each dimension over the training data, which makes
    errors of states comparable. `receptive_field` frames of history, at most, influence a
    prediction; `window` of them are attended to directly. reuse: policies that `generate` can be
    asked for in a `Rendering`, max_steps: steps, reuse_calibration: what its decisions rest on;
    a model without policies is never given a Rendering.
    """

    name: str
    version: str
    weights_digest: str
    dtype: str
    control_dim: int
    state_dim: int
    frame_px: tuple[int, int]
    window: int
    receptive_field: int
    max_horizon: int
    physics_names: tuple[str, ...]
    physical: tuple[int, int]
    semantic: tuple[int, int]
    state_scale: Float
    operations: tuple[str, ...] = ()
    views: tuple[str, ...] = ("front",)
    frame_interval_s: float = 0.1
    reuse: tuple[str, ...] = ()
    max_steps: int = 1
    reuse_calibration: str = ""


@dataclass(frozen=True)
class Absorbed:
    """memory: what `rollout` takes; slices: one per absorbed frame, oldest first."""

    memory: Any
    slices: tuple[Float, ...]
    predicted_tokens: Float  # (N, D): the model's own prediction of the frame after the last one


@dataclass(frozen=True)
class RolloutInput:
    """memory: of the frames before the present; tokens (N, D): the present; controls (H, C)."""

    memory: Any
    tokens: Float
    controls: Float
    conditioning: Any


@dataclass(frozen=True)
class RolloutOutput:
    """tokens (H, N, D) and states (H, S) of the predicted frames; slice: of the present frame."""

    tokens: Float
    states: Float
    slice: Float


@dataclass(frozen=True)
class Rendering:
    """How frames are drawn from predicted tokens: steps of the generator, policy of reuse between
    them, the PSNR in dB to frames drawn without reuse that it must keep, and the calibration that
    says how (`ModelSpec.reuse_calibration`)."""

    steps: int = 1
    reuse: str = "none"
    quality_db: float = 35.0
    calibration: str = ""

    @property
    def approximate(self) -> bool:
        """Whether frames may differ from those drawn without reuse."""
        return self.reuse != "none" and self.steps > 1

    @property
    def mark(self) -> bytes:
        """Tells apart renderings that give other frames; empty for the plain one."""
        if not self.approximate:
            return b"" if self.steps == 1 else b"%d" % self.steps
        return f"{self.steps} {self.reuse} {self.quality_db!r} {self.calibration}".encode()


class WorldModel(Protocol):
    """A causal, action-conditioned video world model.

    All methods are deterministic functions of their arguments. A batch gives bit for bit what its
    members give alone, and a stream of frames the same slices however it is cut into calls of
    `absorb`: sessions are restored, shared and compared on that promise.
    """

    @property
    def spec(self) -> ModelSpec: ...

    def condition(self, prompt: str, view: str) -> tuple[Any, bytes]:
        """Conditioning of a session and bytes that identify it; ValueError if not understood."""
        ...

    def embed(self, frames: Pixels) -> Float:
        """frames (T, h, w, 3) of `frame_px` -> tokens (T, N, D)."""
        ...

    def assemble(self, slices: Sequence[Float], position: int) -> Any:
        """Memory from the newest slices, oldest first, before frame `position`."""
        ...

    def extend(self, memory: Any, slice: Float) -> Any:
        """Memory with one more frame, whose slice is known. The old memory stays what it was."""
        ...

    def absorb(self, memory: Any, tokens: Float, controls: Float, conditioning: Any) -> Absorbed:
        """Move over T frames: tokens (T, N, D), and controls (T, C) applied at each of them.

        For one frame, the slice and the prediction are bit for bit those of a `rollout` that begins
        with the same control.
        """
        ...

    def rollout(
        self, inputs: Sequence[RolloutInput], checkpoint: Checkpoint | None = None
    ) -> list[RolloutOutput]:
        """Predict; all inputs have the same horizon H."""
        ...

    def generate(
        self,
        last_frames: Sequence[Pixels],
        tokens: Sequence[Float],
        seeds: Sequence[int],
        checkpoint: Checkpoint | None = None,
    ) -> list[Pixels]:
        """Frames (H, h, w, 3) for each of the predicted tokens (H, N, D).

        A model whose `spec.reuse` is not empty takes two further arguments, each None or one for
        each: `renderings` (Rendering), and `plans` (H, C), the controls that were predicted under.
        """
        ...

    def physics(self, states: Float) -> Float:
        """states (..., S) -> (..., P) in the units of `physics_names`."""
        ...

    def confidence(self, states: Float) -> float:
        """Task confidence in [0, 1] of a trajectory (H, S)."""
        ...

    def operation(self, states: Float) -> str:
        """The operation a trajectory (H, S) most likely belongs to; '' where there are none."""
        ...


@runtime_checkable
class CarriesOver(Protocol):
    """What a world model may offer beside: a further view of a scene without its own rollout."""

    def carry_over(self, predicted: RolloutOutput, present: Float, last: Float, view: str) -> Float:
        """What another camera will see: tokens (H, N, D) for `generate`, with its last frame.

        predicted: of the first view; present (N, D): tokens of that view's last frame; last (N, D):
        tokens of the last frame of camera `view`. ValueError for a view that is not known.
        """
        ...
