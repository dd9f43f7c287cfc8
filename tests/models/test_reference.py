"""The reference model is one function: in steps, at once, batched, restored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from worldserve.models import dynamics
from worldserve.models.network import NetworkConfig, WorldNetwork
from worldserve.models.protocol import RolloutInput
from worldserve.models.reference import ReferenceWorldModel, Statistics, save_weights

FRAMES = 104  # three times the window, and a chunk border inside


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = WorldNetwork(NetworkConfig(operations=("open", "close")))
    # A fresh network predicts "nothing changes"; give every path something to say.
    torch.nn.init.normal_(network.dynamics.difference.weight, std=0.05)
    torch.nn.init.normal_(network.generator.out.weight, std=0.05)
    path = tmp_path_factory.mktemp("weights")
    ones = np.ones(256, np.float32)
    save_weights(path, network, Statistics(np.zeros(7, np.float32), ones[:7], ones))
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> ReferenceWorldModel:
    return ReferenceWorldModel.load(directory)


@pytest.fixture(scope="module")
def stream(model: ReferenceWorldModel) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (FRAMES, 8, 8, 3), dtype=np.uint8)
    frames = coarse.repeat(8, 1).repeat(8, 2)
    controls = rng.uniform(-1, 1, (FRAMES, 4)).astype(np.float32)
    return model.embed(frames), controls


@pytest.fixture(scope="module")
def stepped(
    model: ReferenceWorldModel, stream: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray], object]:
    """Predicted tokens, slices and memory of going frame by frame."""
    return _one_by_one(model, *stream)


def _one_by_one(
    model: ReferenceWorldModel, tokens: np.ndarray, controls: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray], object]:
    condition, _ = model.condition("", "")
    memory, predicted, slices = model.assemble([], 0), [], []
    for t in range(len(tokens)):
        absorbed = model.absorb(memory, tokens[t : t + 1], controls[t : t + 1], condition)
        memory = absorbed.memory
        predicted.append(absorbed.predicted_tokens)
        slices += absorbed.slices
    return np.stack(predicted), slices, memory


def _all_at_once(
    model: ReferenceWorldModel, tokens: np.ndarray, controls: np.ndarray
) -> np.ndarray:
    condition, _ = model.condition("", "")
    with torch.no_grad():
        out = model.network.dynamics(
            torch.from_numpy(tokens)[None], torch.from_numpy(controls)[None], condition[None]
        )
    return out[0][0].numpy()


def test_frame_by_frame_is_all_at_once(
    model: ReferenceWorldModel, stream: tuple, stepped: tuple
) -> None:
    """Past three windows, the incremental encoding is the full computation to 1e-4."""
    incremental, _, _ = stepped
    np.testing.assert_allclose(incremental, _all_at_once(model, *stream), atol=1e-4)


def test_the_comparison_notices_a_forgotten_frame(
    model: ReferenceWorldModel, stream: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaking the band on purpose shows: one frame less of memory is another function."""
    layer = dynamics.Memory.layer
    monkeypatch.setattr(
        dynamics.Memory, "layer", lambda self, index, newest: layer(self, index, newest - 1)
    )
    tokens, controls = stream[0][:36], stream[1][:36]
    broken, _, _ = _one_by_one(model, tokens, controls)
    assert np.abs(broken - _all_at_once(model, tokens, controls)).max() > 1e-4


def test_chunks_make_the_same_slices(
    model: ReferenceWorldModel, stream: tuple, stepped: tuple
) -> None:
    """Encoding 104 frames in one call gives, bit for bit, the slices of encoding them singly."""
    tokens, controls = stream
    condition, _ = model.condition("", "")
    absorbed = model.absorb(model.assemble([], 0), tokens, controls, condition)
    predicted, slices, _ = stepped
    assert len(absorbed.slices) == FRAMES
    np.testing.assert_array_equal(np.stack(absorbed.slices), np.stack(slices))
    np.testing.assert_array_equal(absorbed.predicted_tokens, predicted[-1])


def test_restored_memory_is_bit_equal(
    model: ReferenceWorldModel, stream: tuple, stepped: tuple
) -> None:
    """Memory assembled from stored slices predicts bit for bit what the living one does."""
    tokens, controls = stream
    _, slices, memory = stepped
    condition, _ = model.condition("", "")
    restored = model.assemble(slices[-model.spec.window + 1 :], FRAMES)
    plan = np.repeat(controls[:1], 8, 0)
    [a] = model.rollout([RolloutInput(memory, tokens[3], plan, condition)])
    [b] = model.rollout([RolloutInput(restored, tokens[3], plan, condition)])
    np.testing.assert_array_equal(a.states, b.states)
    np.testing.assert_array_equal(a.tokens, b.tokens)


def test_a_batch_gives_the_bits_of_its_members(model: ReferenceWorldModel, stream: tuple) -> None:
    """Branches of two sessions at different positions, batched, equal each one alone."""
    tokens, controls = stream
    condition, _ = model.condition("open it", "front")
    _, slices, _ = _one_by_one(model, tokens[:6], controls[:6])
    short, long = model.assemble(slices[:5], 5), model.assemble(slices * 5, 40)
    inputs = [
        RolloutInput(memory, tokens[at], np.repeat(controls[i : i + 1], 4, 0), condition)
        for memory, at, count in ((long, 40, 9), (short, 5, 3))
        for i in range(count)
    ]
    for together, item in zip(model.rollout(inputs), inputs, strict=True):
        [alone] = model.rollout([item])
        np.testing.assert_array_equal(together.states, alone.states)
        np.testing.assert_array_equal(together.tokens, alone.tokens)
        np.testing.assert_array_equal(together.slice, alone.slice)


def test_an_advance_makes_the_slice_of_its_rollout(
    model: ReferenceWorldModel, stream: tuple
) -> None:
    """Committing a control computes the bits that the prediction under it began with."""
    tokens, controls = stream
    condition, _ = model.condition("", "")
    memory = model.absorb(model.assemble([], 0), tokens[:9], controls[:9], condition).memory
    plan = np.repeat(controls[9:10], 8, 0)
    [out] = model.rollout([RolloutInput(memory, tokens[9], plan, condition)])
    absorbed = model.absorb(memory, tokens[9:10], controls[9:10], condition)
    np.testing.assert_array_equal(absorbed.slices[0], out.slice)
    np.testing.assert_array_equal(absorbed.predicted_tokens, out.tokens[0])


def test_branches_of_one_memory_never_meet(model: ReferenceWorldModel, stream: tuple) -> None:
    """Appending to a memory leaves every memory that shares its buffer as it was."""
    tokens, controls = stream
    condition, _ = model.condition("", "")
    root = model.absorb(model.assemble([], 0), tokens[:4], controls[:4], condition).memory
    plan = np.repeat(controls[:1], 2, 0)
    [before] = model.rollout([RolloutInput(root, tokens[4], plan, condition)])
    left = model.absorb(root, tokens[4:5], controls[4:5], condition).memory
    [left_before] = model.rollout([RolloutInput(left, tokens[5], plan, condition)])
    model.absorb(root, tokens[6:7], controls[6:7], condition)
    [after] = model.rollout([RolloutInput(root, tokens[4], plan, condition)])
    [left_after] = model.rollout([RolloutInput(left, tokens[5], plan, condition)])
    np.testing.assert_array_equal(before.states, after.states)
    np.testing.assert_array_equal(left_before.states, left_after.states)


def test_frames_depend_on_tokens_and_seed_only(model: ReferenceWorldModel, stream: tuple) -> None:
    """The generator is deterministic; another seed is another draw."""
    tokens, _ = stream
    last = np.full((64, 64, 3), 90, np.uint8)
    [a] = model.generate([last], [tokens[:3]], [7])
    [b], [c] = model.generate([last], [tokens[:3]], [7]), model.generate([last], [tokens[:3]], [8])
    np.testing.assert_array_equal(a, b)
    assert a.shape == (3, 64, 64, 3)
    assert a.dtype == np.uint8
    assert (a != c).any()


def test_prompt_and_unknown_view(model: ReferenceWorldModel) -> None:
    """A prompt changes the condition; a view the model was not trained on is refused by name."""
    plain, plain_id = model.condition("", "front")
    asked, asked_id = model.condition("open the drawer", "front")
    assert plain_id != asked_id
    assert not torch.equal(plain, asked)
    with pytest.raises(ValueError, match=r"'overhead'.*front"):
        model.condition("", "overhead")


def test_the_digest_follows_the_weights(directory: Path, model: ReferenceWorldModel) -> None:
    """Weights are named by their bytes."""
    assert model.spec.weights_digest == ReferenceWorldModel.load(directory).spec.weights_digest
    assert len(model.spec.weights_digest) == 32
