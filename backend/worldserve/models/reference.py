"""The reference world model behind the `WorldModel` protocol: NumPy in, NumPy out."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctrlcache.errors import CalibrationError
from ctrlcache.metrics import BlocksDecided, Sink, ignore
from worldcache.policies import kinds
from worldcache.reuse_calibration import POLICIES, ReuseCalibration, reuse_path
from worldcache.running import Reuse
from worldcache.steps import Policy
from worldserve.models import stepping
from worldserve.models.dynamics import Group, Memory
from worldserve.models.generator import settle
from worldserve.models.network import NetworkConfig, WorldNetwork
from worldserve.models.protocol import (
    Absorbed,
    Checkpoint,
    Float,
    ModelSpec,
    Pixels,
    Rendering,
    RolloutInput,
    RolloutOutput,
)

__all__ = ["ReferenceWorldModel", "Statistics", "save_weights"]

_log = logging.getLogger(__name__)
_CHUNK = 32  # frames encoded at once
_AT_ONCE = 2  # frames embedded at once
_MAX_HORIZON = 16
_MAX_STEPS = 64
_WEIGHTS, _CONFIG = "weights.safetensors", "config.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Statistics:
    """Of the training data: physics_mean, physics_std (7,) in SI units; state_scale (S,).

    Of the trained network: still_change (1,), the level of `generator.settle`.
    """

    physics_mean: Float
    physics_std: Float
    state_scale: Float
    still_change: Float = field(default_factory=lambda: np.zeros(1, np.float32))


class ReferenceWorldModel:
    """Implements `worldserve.models.protocol.WorldModel`.

    Determinism: linear layers see rows of whole frames (66 and more); attention to a shared past,
    the control token and the read-out see blocks of a fixed number of rows. So a batch gives the
    bits of its members.
    """

    def __init__(
        self,
        network: WorldNetwork,
        statistics: Statistics,
        digest: str,
        dtype: str = "float32",
        generator_steps: int = 1,
        reuse: ReuseCalibration | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype!r}; known: {', '.join(_DTYPES)}")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._network = network.eval().to(self.device)
        self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._dtype = _DTYPES[dtype]
        #: Told of what is reused; set by whoever serves the model.
        self.on_event: Sink = ignore
        self._plain = Rendering(generator_steps)
        self._statistics = statistics
        config = network.config
        self._config = config
        self._spec = ModelSpec(
            name="reference",
            version="1",
            weights_digest=digest,
            dtype=dtype,
            control_dim=config.control_dim,
            state_dim=config.state.size,
            frame_px=(config.frame_px, config.frame_px),
            window=config.window,
            receptive_field=config.dynamics_layers * (config.window - 1) + 1,
            max_horizon=_MAX_HORIZON,
            physics_names=_PHYSICS_NAMES,
            physical=config.state.physical,
            semantic=(config.state.flags[0], config.state.operations[1]),
            state_scale=statistics.state_scale,
            operations=config.operations,
            views=config.views,
            reuse=POLICIES,
            max_steps=_MAX_STEPS,
        )
        self.recalibrate(reuse or ReuseCalibration(digest, {}))

    @classmethod
    def load(
        cls,
        directory: Path,
        dtype: str = "float32",
        threads: int | None = None,
        generator_steps: int = 1,
    ) -> ReferenceWorldModel:
        """Read `config.json` and `weights.safetensors`; threads: torch threads of this process."""
        if threads is not None:
            torch.set_num_threads(threads)
        path = Path(directory) / _WEIGHTS
        raw = json.loads((Path(directory) / _CONFIG).read_text())
        network = WorldNetwork(NetworkConfig.from_dict(raw["network"]))
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        network.load_state_dict(tensors)
        statistics = Statistics(
            **{k: np.asarray(v, np.float32) for k, v in raw["statistics"].items()}
        )
        # What is read beside the weights shapes answers, too.
        beside = json.dumps([raw["network"], raw["statistics"]], sort_keys=True).encode()
        digest = hashlib.blake2b(path.read_bytes() + beside, digest_size=16).hexdigest()
        try:
            reuse = ReuseCalibration.load(reuse_path(Path(directory)), digest)
        except CalibrationError as error:
            _log.warning("nothing is reused between the generator's steps: %s", error)
            reuse = None
        return cls(network, statistics, digest, dtype, generator_steps, reuse)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def network(self) -> WorldNetwork:
        return self._network

    def condition(self, prompt: str, view: str) -> tuple[Any, bytes]:
        if view and view not in self._config.views:
            raise ValueError(f"view {view!r}; this model knows: {', '.join(self._config.views)}")
        view = view or self._config.views[0]
        with self._inference():
            condition = self._network.condition([prompt], [self._config.views.index(view)])[0]
        return condition.float(), f"{view}\0{prompt}".encode()

    def embed(self, frames: Pixels) -> Float:
        # Always as many at once: in batches of other sizes, convolutions round otherwise.
        missing = -len(frames) % _AT_ONCE
        padded = np.concatenate((frames, frames[:1].repeat(missing, 0))) if missing else frames
        with self._inference():
            tokens = [
                self._network.embedder(self._images(padded[i : i + _AT_ONCE]))
                for i in range(0, len(padded), _AT_ONCE)
            ]
        return _array(torch.cat(tokens))[: len(frames)]

    def assemble(self, slices: Sequence[Float], position: int) -> Memory:
        dynamics = self._network.dynamics
        memory = Memory.empty(dynamics, position - len(slices))
        if not slices:
            return memory
        stacked = self._tensor(np.stack(slices))  # (T, L, 2, N, D)
        stacked = stacked.view(*stacked.shape[:-1], dynamics.heads, -1).permute(1, 2, 3, 4, 0, 5)
        return memory.append(stacked, dynamics.window)

    def absorb(self, memory: Memory, tokens: Float, controls: Float, conditioning: Any) -> Absorbed:
        slices: list[Float] = []
        with self._inference():
            e, c = self._tensor(tokens), self._tensor(controls)
            for first in range(0, len(e), _CHUNK):
                part = slice(first, first + _CHUNK)
                memory, made, after = self._network.dynamics.absorb(
                    memory, e[part], c[part], conditioning
                )
                slices += list(_to_slices(made))
        return Absorbed(memory, tuple(slices), _array(after))

    def rollout(
        self, inputs: Sequence[RolloutInput], checkpoint: Checkpoint | None = None
    ) -> list[RolloutOutput]:
        groups, members = self._group(inputs)
        with self._inference():
            tokens, control_tokens, present = self._network.dynamics.rollout(groups, checkpoint)
            R, H = tokens.shape[:2]
            states = self._network.read(tokens.flatten(0, 1), control_tokens.flatten(0, 1))
        states_np, tokens_np = _array(states.view(R, H, -1)), _array(tokens)
        slices = _array(present.flatten(-2))  # (R, L, 2, N, D)
        outputs: list[RolloutOutput | None] = [None] * len(inputs)
        for row, index in enumerate(members):
            outputs[index] = RolloutOutput(tokens_np[row], states_np[row], slices[row])
        return [out for out in outputs if out is not None]

    def carry_over(self, predicted: RolloutOutput, present: Float, last: Float, view: str) -> Float:
        head = self._network.cross_view
        if head is None or view not in self._config.views:
            raise ValueError(f"view {view!r}; this model knows: {', '.join(self._config.views)}")
        tokens = self._tensor(predicted.tokens)  # (H, N, D)
        each = (len(tokens), -1, -1)
        number = torch.full((len(tokens),), self._config.views.index(view), device=self.device)
        with self._inference():
            carried = head(
                self._tensor(last)[None].expand(each),
                tokens,
                self._tensor(present)[None].expand(each),
                self._tensor(predicted.states),
                number,
            )
        return _array(carried)

    def generate(
        self,
        last_frames: Sequence[Pixels],
        tokens: Sequence[Float],
        seeds: Sequence[int],
        checkpoint: Checkpoint | None = None,
        renderings: Sequence[Rendering] | None = None,
        plans: Sequence[Float] | None = None,
    ) -> list[Pixels]:
        made = []
        for index, (frame, predicted, seed) in enumerate(
            zip(last_frames, tokens, seeds, strict=True)
        ):
            how = self._plain if renderings is None else renderings[index]
            policy = self._reuse.policy(how.reuse, how.steps, how.quality_db)
            plan = None if plans is None else plans[index]
            frames, _ = self.draw(frame, predicted, seed, how.steps, policy, plan, checkpoint)
            made.append(frames)
        return made

    def recalibrate(self, reuse: ReuseCalibration) -> None:
        """Use another calibration of step reuse from now on."""
        self._reuse = reuse
        self._spec = replace(self._spec, reuse_calibration=reuse.digest)

    def flow(self, frame: Pixels, tokens: Float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the generator begins with: last frame (H, 3, h, w), tokens (H, N, D), noise."""
        last = self._images(frame[None]).expand(len(tokens), -1, -1, -1)
        noise = np.random.default_rng(seed).standard_normal(last.shape, np.float32)
        return last, self._tensor(tokens), self._tensor(noise)

    def draw(
        self,
        frame: Pixels,
        tokens: Float,
        seed: int,
        steps: int,
        policy: Policy,
        plan: Float | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> tuple[Pixels, Reuse]:
        """Frames (H, h, w, 3) from tokens (H, N, D), and what was reused on the way.

        All state of the reuse lives and dies here.
        """
        reuse = Reuse(policy, len(tokens), steps, () if plan is None else kinds(plan), plan)
        with self._inference():
            last, *_ = flow = self.flow(frame, tokens, seed)
            generator, calibrated = self._network.generator, self._reuse
            if policy.name == "none":
                image = generator.sample(*flow, steps, checkpoint)
            else:
                image = stepping.sample(
                    generator, *flow, reuse, calibrated.change, calibrated.settings, checkpoint
                )
                computed = reuse.tally.computed
                self.on_event(BlocksDecided("computed", computed))
                self.on_event(BlocksDecided("reused", reuse.tally.total - computed))
            still = float(self._statistics.still_change[0])
            return _to_pixels(settle(image, last, still)), reuse

    def physics(self, states: Float) -> Float:
        stop = self._config.state.physical[1]
        metric = states[..., :stop] * self._statistics.physics_std + self._statistics.physics_mean
        first, last = self._config.state.flags
        flags = 1 / (1 + np.exp(-states[..., first:last]))
        out: Float = np.concatenate((metric, flags), -1).astype(np.float32)
        return out

    def confidence(self, states: Float) -> float:
        return float(self._operation_probabilities(states).max())

    def operation(self, states: Float) -> str:
        return self._config.operations[int(self._operation_probabilities(states).argmax())]

    def _operation_probabilities(self, states: Float) -> NDArray[np.float64]:
        first = self._config.state.operations[0]
        logits = states[..., first : first + len(self._config.operations)].mean(0, dtype=np.float64)
        weights = np.exp(logits - logits.max())
        probabilities: NDArray[np.float64] = weights / weights.sum()
        return probabilities

    def extend(self, memory: Memory, slice: Float) -> Memory:
        dynamics = self._network.dynamics
        keys_values = self._tensor(slice).view(*slice.shape[:-1], dynamics.heads, 1, -1)
        return memory.append(keys_values, dynamics.window)  # (L, 2, N, h, 1, d)

    def _group(self, inputs: Sequence[RolloutInput]) -> tuple[list[Group], list[int]]:
        """Inputs that leave one present become one group; members[row] is an index into inputs."""
        by_present: dict[tuple[int, int, int], list[int]] = {}
        for index, item in enumerate(inputs):
            key = (id(item.memory), id(item.tokens), id(item.conditioning))
            by_present.setdefault(key, []).append(index)
        groups = [
            Group(
                memory=inputs[rows[0]].memory,
                tokens=self._tensor(inputs[rows[0]].tokens),
                controls=self._tensor(np.stack([inputs[i].controls for i in rows])),
                condition=inputs[rows[0]].conditioning,
            )
            for rows in by_present.values()
        ]
        return groups, [index for rows in by_present.values() for index in rows]

    def _images(self, frames: Pixels) -> Tensor:
        """(T, h, w, 3) uint8 -> (T, 3, h, w) in [-1, 1]."""
        pixels = torch.from_numpy(np.ascontiguousarray(frames)).to(self.device)
        return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1

    def _tensor(self, array: Float) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _inference(self) -> Any:
        return _Inference(self._dtype, self.device)


class _Inference:
    """torch.no_grad and, where asked for, bfloat16 autocast."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._mode = torch.no_grad()
        self._cast = torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)

    def __enter__(self) -> None:
        self._mode.__enter__()
        self._cast.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._cast.__exit__(*error)
        self._mode.__exit__(*error)


_PHYSICS_NAMES = (
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


def save_weights(
    directory: Path,
    network: WorldNetwork,
    statistics: Statistics,
    card: dict[str, Any] | None = None,
) -> None:
    """Write float16 weights and `config.json` (network, statistics, training card)."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().half().contiguous() for name, t in network.state_dict().items()}
    save_file(tensors, directory / _WEIGHTS)
    raw = {
        "network": asdict(network.config),
        "statistics": {k: v.tolist() for k, v in asdict(statistics).items()},
        "training": card or {},
    }
    (directory / _CONFIG).write_text(json.dumps(raw, indent=1) + "\n")


def _array(tensor: Tensor) -> Float:
    out: Float = tensor.float().cpu().numpy()
    return out


def _to_pixels(images: Tensor) -> Pixels:
    scaled = ((images + 1) * 127.5).round().clamp(0, 255).byte()
    return np.ascontiguousarray(scaled.permute(0, 2, 3, 1).cpu().numpy())


def _to_slices(keys_values: Tensor) -> Float:
    """(L, 2, N, h, T, d) -> (T, L, 2, N, D)."""
    moved = keys_values.permute(4, 0, 1, 2, 3, 5).flatten(-2)
    return np.ascontiguousarray(_array(moved))
