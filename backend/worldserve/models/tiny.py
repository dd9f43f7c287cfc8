"""A world model of a few thousand numbers: another size, another structure, the same protocol.

Serves the tests, and shows that nothing in the server knows the reference model. Two controls, a
state of twelve, frames of 32 x 32, one layer of attention over the last six frames; NumPy only, one
item at a time, so that it is deterministic and indifferent to batching.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from worldserve.models.protocol import (
    Absorbed,
    Checkpoint,
    Float,
    ModelSpec,
    Pixels,
    RolloutInput,
    RolloutOutput,
)

__all__ = ["TinyWorldModel"]

_N, _D, _C, _S, _WINDOW = 16, 8, 2, 12, 6
_PX = 32
_OPERATIONS = ("push", "pull", "turn")
_CONFIG = "tiny.json"

#: Slices of the newest frames, oldest first.
Memory = tuple[Float, ...]


class TinyWorldModel:
    """Implements `worldserve.models.protocol.WorldModel`; weights are drawn from a seed.

    step_ms: each predicted step takes this much longer, as if the model were a large one.
    """

    def __init__(self, seed: int = 0, step_ms: float = 0.0) -> None:
        self._step_s = step_ms / 1e3
        draw = np.random.default_rng(seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> Float:
            made: Float = (draw.standard_normal((rows, columns)) * gain / rows**0.5).astype("f4")
            return made

        self._embed = weight(3, _D, 2.0)
        self._query, self._key, self._value = weight(_D, _D), weight(_D, _D), weight(_D, _D)
        self._control, self._out = weight(_C, _D, 1.5), weight(_D, _D, 0.6)
        self._read = weight(_D + _C, _S)
        digest = hashlib.blake2b(json.dumps({"seed": seed}).encode(), digest_size=16).hexdigest()
        self._spec = ModelSpec(
            name="tiny",
            version="1",
            weights_digest=digest,
            dtype="float32",
            control_dim=_C,
            state_dim=_S,
            frame_px=(_PX, _PX),
            window=_WINDOW,
            receptive_field=_WINDOW,
            max_horizon=12,
            physics_names=("x_m", "y_m", "angle_rad"),
            physical=(0, 3),
            semantic=(3, 6),
            state_scale=np.full(_S, 0.3, np.float32),
            operations=_OPERATIONS,
            views=("front", "top"),
        )

    @classmethod
    def load(
        cls, directory: Path, dtype: str = "float32", threads: int | None = None
    ) -> TinyWorldModel:
        """`tiny.json` in the directory may hold {"seed": 7, "step_ms": 20}."""
        if dtype != "float32":
            raise ValueError(f"dtype {dtype!r}; known: float32")
        path = Path(directory) / _CONFIG
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def condition(self, prompt: str, view: str) -> tuple[Any, bytes]:
        views = self._spec.views
        view = view or views[0]
        if view not in views:
            raise ValueError(f"view {view!r}; this model knows: {', '.join(views)}")
        named = f"{view}\0{prompt}".encode()
        seed = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little")
        bias = np.random.default_rng(seed).standard_normal(_D).astype("f4") * np.float32(0.1)
        return bias, named

    def embed(self, frames: Pixels) -> Float:
        T, cells = len(frames), 4
        side = _PX // cells
        patches = frames.reshape(T, cells, side, cells, side, 3).mean((2, 4), dtype=np.float32)
        flat = patches.reshape(T, _N, 3) / np.float32(127.5) - np.float32(1)
        return np.stack([np.tanh(frame @ self._embed) for frame in flat])  # (T, N, D)

    def assemble(self, slices: Sequence[Float], position: int) -> Memory:
        return tuple(slices)[-(_WINDOW - 1) :]

    def extend(self, memory: Memory, slice: Float) -> Memory:
        return (*memory, slice)[-(_WINDOW - 1) :]

    def absorb(self, memory: Memory, tokens: Float, controls: Float, conditioning: Any) -> Absorbed:
        slices: list[Float] = []
        predicted = tokens[-1]
        for frame, control in zip(tokens, controls, strict=True):
            predicted, made = self._step(memory, frame, control, conditioning)
            memory = self.extend(memory, made)
            slices.append(made)
        return Absorbed(memory, tuple(slices), predicted)

    def rollout(
        self, inputs: Sequence[RolloutInput], checkpoint: Checkpoint | None = None
    ) -> list[RolloutOutput]:
        return [self._roll(item, checkpoint) for item in inputs]

    def _roll(self, item: RolloutInput, checkpoint: Checkpoint | None) -> RolloutOutput:
        memory, frame = item.memory, item.tokens
        tokens, states, slices = [], [], []
        for control in item.controls:
            frame, made = self._step(memory, frame, control, item.conditioning)
            memory = self.extend(memory, made)
            tokens.append(frame)
            slices.append(made)
            seen = np.concatenate([frame.mean(0), control])
            states.append(np.tanh(seen @ self._read))
            if self._step_s:
                time.sleep(self._step_s)
            if checkpoint is not None:
                checkpoint()
        return RolloutOutput(np.stack(tokens), np.stack(states), slices[0])

    def _step(
        self, memory: Memory, frame: Float, control: Float, bias: Float
    ) -> tuple[Float, Float]:
        """frame (N, D), control (C,) -> the next frame, and this one's slice (2, N, D)."""
        made = np.stack(
            [frame @ self._key, frame @ self._value + np.tanh(control @ self._control)]
        ).astype("f4")
        seen = np.stack([*memory, made])  # (T, 2, N, D)
        match = np.einsum("nd,tnd->tn", frame @ self._query, seen[:, 0])  # (T, N)
        weight = np.exp(match - match.max(0))
        attended = np.einsum("tn,tnd->nd", weight / weight.sum(0), seen[:, 1])
        after = np.tanh(frame + attended @ self._out + bias).astype("f4")
        return after, made

    def generate(
        self,
        last_frames: Sequence[Pixels],
        tokens: Sequence[Float],
        seeds: Sequence[int],
        checkpoint: Checkpoint | None = None,
    ) -> list[Pixels]:
        """The last frame, tinted patch by patch as the tokens say, with a little seeded grain."""
        made = []
        for last, predicted, seed in zip(last_frames, tokens, seeds, strict=True):
            tint = np.stack([frame @ self._embed.T for frame in predicted])  # (H, N, 3)
            coarse = tint.reshape(-1, 4, 4, 3).repeat(_PX // 4, 1).repeat(_PX // 4, 2)
            grain = np.random.default_rng(seed).standard_normal(coarse.shape, np.float32)
            image = last.astype("f4") + 24 * coarse + grain
            made.append(image.round().clip(0, 255).astype(np.uint8))
            if checkpoint is not None:
                checkpoint()
        return made

    def physics(self, states: Float) -> Float:
        return np.asarray(states[..., :3] * np.float32(0.5), np.float32)

    def confidence(self, states: Float) -> float:
        return float(self._shares(states).max())

    def operation(self, states: Float) -> str:
        return _OPERATIONS[int(self._shares(states).argmax())]

    def _shares(self, states: Float) -> Float:
        weights = np.exp(4 * states[..., 3:6].mean(0))
        shares: Float = weights / weights.sum()
        return shares
