"""The smallest world model that can be served: a disc that is pushed about. docs/own-model.md."""

from pathlib import Path
from typing import Any

import numpy as np

from worldserve.models.protocol import Absorbed, ModelSpec, RolloutInput, RolloutOutput


class DiscModel:
    """Tokens are (position, velocity) as (1, 4); a slice, and the memory, is the last control."""

    spec = ModelSpec(
        name="disc", version="1", weights_digest="none", dtype="float32", control_dim=2,
        state_dim=4, frame_px=(24, 24), window=2, receptive_field=2, max_horizon=16,
        physics_names=("x_m", "y_m"), physical=(0, 2), semantic=(2, 2),
        state_scale=np.full(4, 0.5, np.float32),
    )  # fmt: skip

    @classmethod
    def load(cls, directory: Path, dtype: str = "float32", threads: int | None = None) -> Any:
        return cls()  # read weights from `directory` here

    def condition(self, prompt: str, view: str) -> tuple[Any, bytes]:
        return None, b""

    def embed(self, frames: Any) -> Any:  # the disc is the bright spot
        y, x = np.mgrid[-1:1:24j, -1:1:24j]
        bright = np.maximum(frames.astype("f4").mean(-1) - 32, 1e-3)  # (T, h, w)
        at = [(bright * axis).sum((1, 2)) / bright.sum((1, 2)) for axis in (x, y)]
        return np.stack([*at, 0 * at[0], 0 * at[0]], -1)[:, None].astype("f4")  # (T, 1, 4)

    def assemble(self, slices: Any, position: int) -> Any:
        return slices[-1] if len(slices) else np.zeros(2, "f4")

    def extend(self, memory: Any, slice: Any) -> Any:
        return slice

    def absorb(self, memory: Any, tokens: Any, controls: Any, conditioning: Any) -> Absorbed:
        slices: list[Any] = []
        after = tokens[-1]
        for frame, control in zip(tokens, controls, strict=True):
            velocity = 0.8 * memory + 0.2 * control
            after = np.concatenate([frame[0, :2] + 0.1 * velocity, velocity])[None].astype("f4")
            memory = control.astype("f4")
            slices.append(memory)
        return Absorbed(memory, tuple(slices), after)

    def rollout(self, inputs: Any, checkpoint: Any = None) -> list[RolloutOutput]:
        return [self._roll(item) for item in inputs]

    def _roll(self, item: RolloutInput) -> RolloutOutput:
        memory, frame = item.memory, item.tokens
        slices: list[Any] = []
        tokens: list[Any] = []
        for control in item.controls:
            out = self.absorb(memory, frame[None], control[None], None)
            memory, frame = out.memory, out.predicted_tokens
            slices += out.slices
            tokens.append(frame)
        return RolloutOutput(np.stack(tokens), np.stack(tokens)[:, 0], slices[0])

    def generate(self, last_frames: Any, tokens: Any, seeds: Any, checkpoint: Any = None) -> Any:
        y, x = np.mgrid[-1:1:24j, -1:1:24j]
        at = [p[:, 0, :2, None, None] for p in tokens]
        near = [np.exp(-30 * ((x - p[:, 0]) ** 2 + (y - p[:, 1]) ** 2)) for p in at]  # (H, h, w)
        return [np.repeat((255 * n).astype(np.uint8)[..., None], 3, -1) for n in near]

    def physics(self, states: Any) -> Any:
        return states[..., :2]

    def confidence(self, states: Any) -> float:
        return 1.0

    def operation(self, states: Any) -> str:
        return ""
