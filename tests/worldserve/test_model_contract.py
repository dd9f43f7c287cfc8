"""What the server relies on, held against every model it ships: bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from worldserve.models.example import DiscModel
from worldserve.models.network import NetworkConfig, WorldNetwork
from worldserve.models.protocol import RolloutInput
from worldserve.models.reference import ReferenceWorldModel, Statistics
from worldserve.models.tiny import TinyWorldModel


def reference():
    """The reference model's real shape, with fewer layers and weights that no training has seen."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = NetworkConfig(operations=("open", "close"), dynamics_layers=2, window=4)
    network = WorldNetwork(config)
    with torch.no_grad():  # an untrained difference is zero: nothing would ever move
        network.dynamics.difference.weight.normal_(0, 0.05)
    statistics = Statistics(np.zeros(7, "f4"), np.ones(7, "f4"), np.ones(config.state.size, "f4"))
    return ReferenceWorldModel(network, statistics, "random")


MODELS = {"tiny": TinyWorldModel, "example": DiscModel, "reference": reference}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


class Scene:
    """Frames, controls and the model's conditioning, and its memory of all but the last frame."""

    def __init__(self, model, length, seed=0):
        draw = np.random.default_rng(seed)
        spec = model.spec
        self.frames = draw.integers(0, 256, (length, *spec.frame_px, 3), np.uint8)
        self.controls = draw.uniform(-1, 1, (length, spec.control_dim)).astype("f4")
        self.conditioning, _ = model.condition("open the drawer", "")
        self.tokens = np.concatenate([model.embed(frame[None]) for frame in self.frames])
        self.memory = model.assemble((), 0)
        self.slices = []
        for tokens, control in zip(self.tokens[:-1], self.controls[:-1], strict=True):
            out = model.absorb(self.memory, tokens[None], control[None], self.conditioning)
            self.memory = out.memory
            self.slices += out.slices

    def input(self, model, controls, memory=None):
        memory = self.memory if memory is None else memory
        return RolloutInput(memory, self.tokens[-1], controls, self.conditioning)


def plan(model, horizon, seed):
    draw = np.random.default_rng(seed)
    return draw.uniform(-1, 1, (horizon, model.spec.control_dim)).astype("f4")


def same(a, b):
    assert np.array_equal(a.tokens, b.tokens)
    assert np.array_equal(a.states, b.states)
    assert np.array_equal(a.slice, b.slice)


def test_embedding_is_indifferent_to_batching(model):
    """Frames embedded together and one by one are the same."""
    scene = Scene(model, 5)
    assert np.array_equal(model.embed(scene.frames), scene.tokens)
    assert np.array_equal(model.embed(scene.frames[1:4]), scene.tokens[1:4])


def test_streams_are_indifferent_to_cutting(model):
    """Frames absorbed in one call and one by one leave the same slices and prediction."""
    scene = Scene(model, 7)
    parts = slice(0, 6)
    memory = model.assemble((), 0)
    out = model.absorb(memory, scene.tokens[parts], scene.controls[parts], scene.conditioning)
    assert all(map(np.array_equal, out.slices, scene.slices))
    again = model.absorb(
        model.assemble(scene.slices[:5], 5),
        scene.tokens[5:6],
        scene.controls[5:6],
        scene.conditioning,
    )
    assert np.array_equal(out.predicted_tokens, again.predicted_tokens)


def test_rollouts_are_indifferent_to_batching(model):
    """A rollout alone equals the same one beside others, of its own session and of another."""
    one, other = Scene(model, 12), Scene(model, 7, seed=1)
    inputs = [one.input(model, plan(model, 4, i)) for i in range(5)]
    inputs += [other.input(model, plan(model, 4, i)) for i in range(4)]
    together = model.rollout(inputs)
    for item, out in zip(inputs, together, strict=True):
        [alone] = model.rollout([item])
        same(alone, out)


def test_longer_rollouts_begin_alike(model):
    """The slice and the first predictions do not depend on the horizon."""
    scene = Scene(model, 6)
    controls = plan(model, 8, 0)
    [long] = model.rollout([scene.input(model, controls)])
    [short] = model.rollout([scene.input(model, controls[:3])])
    assert np.array_equal(long.slice, short.slice)
    assert np.array_equal(long.tokens[:3], short.tokens)
    assert np.array_equal(long.states[:3], short.states)


def test_absorbing_one_frame_is_the_first_step_of_a_rollout(model):
    """What an advance commits is the same, whoever computed it."""
    scene = Scene(model, 6)
    controls = plan(model, 4, 0)
    [out] = model.rollout([scene.input(model, controls)])
    absorbed = model.absorb(scene.memory, scene.tokens[-1:], controls[:1], scene.conditioning)
    assert np.array_equal(absorbed.slices[0], out.slice)
    assert np.array_equal(absorbed.predicted_tokens, out.tokens[0])


def test_memory_is_the_same_however_it_came_about(model):
    """Absorbed frame by frame, extended by a slice, or assembled from slices."""
    for length in (3, model.spec.window + 4):
        scene = Scene(model, length)
        controls = plan(model, 3, 0)
        [expected] = model.rollout([scene.input(model, controls)])
        kept = scene.slices[-(model.spec.window - 1) :]
        assembled = model.assemble(kept, length - 1)
        [out] = model.rollout([scene.input(model, controls, assembled)])
        same(out, expected)
        shorter = model.assemble(scene.slices[:-1][-(model.spec.window - 1) :], length - 2)
        extended = model.extend(shorter, scene.slices[-1])
        [out] = model.rollout([scene.input(model, controls, extended)])
        same(out, expected)


def test_memory_stays_what_it_was(model):
    """Branches from one memory do not see each other."""
    scene = Scene(model, 6)
    controls = plan(model, 3, 0)
    [before] = model.rollout([scene.input(model, controls)])
    draw = np.random.default_rng(5)
    for _ in range(3):
        control = draw.uniform(-1, 1, (1, model.spec.control_dim)).astype("f4")
        branch = model.absorb(scene.memory, scene.tokens[-1:], control, scene.conditioning)
        model.extend(branch.memory, branch.slices[0])
    [after] = model.rollout([scene.input(model, controls)])
    same(before, after)


def test_only_the_receptive_field_matters(model):
    """History that is older than that may be forgotten: slices computed without it are the same."""
    spec = model.spec
    scene = Scene(model, spec.receptive_field + 2 * spec.window)
    last = len(scene.frames) - 1
    start = last - (spec.window - 1) - (spec.receptive_field - 1)
    memory = model.assemble((), start)
    slices = []
    for at in range(start, last):
        out = model.absorb(
            memory, scene.tokens[at][None], scene.controls[at][None], scene.conditioning
        )
        memory = out.memory
        slices += out.slices
    for ours, theirs in zip(
        slices[-(spec.window - 1) :], scene.slices[-(spec.window - 1) :], strict=True
    ):
        assert np.array_equal(ours, theirs)


def test_shapes_are_those_of_the_spec(model):
    """States, frames, physics and the rest have the sizes that the spec announces."""
    spec = model.spec
    scene = Scene(model, 3)
    [out] = model.rollout([scene.input(model, plan(model, 4, 0))])
    assert out.states.shape == (4, spec.state_dim)
    assert out.states.dtype == out.tokens.dtype == out.slice.dtype == np.float32
    [frames] = model.generate([scene.frames[-1]], [out.tokens], [0])
    assert frames.shape == (4, *spec.frame_px, 3)
    assert frames.dtype == np.uint8
    assert model.physics(out.states).shape == (4, len(spec.physics_names))
    assert 0 <= model.confidence(out.states) <= 1
    assert model.operation(out.states) in (*spec.operations, "")
    assert spec.state_scale.shape == (spec.state_dim,)


def test_generation_follows_the_seed(model):
    """The same seed gives the same frames."""
    scene = Scene(model, 3)
    [out] = model.rollout([scene.input(model, plan(model, 2, 0))])
    first, second = model.generate([scene.frames[-1]] * 2, [out.tokens] * 2, [4, 4])
    assert np.array_equal(first, second)
