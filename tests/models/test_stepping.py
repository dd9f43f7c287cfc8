"""Reuse between the steps of the reference generator: what it skips, and never touches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worldcache.content import Rung
from worldcache.policies import Schedule
from worldcache.reuse_calibration import Knob, ReuseCalibration, StepTable, make
from worldcache.weights import WeightSettings
from worldserve.models.network import NetworkConfig, WorldNetwork
from worldserve.models.protocol import Rendering, RolloutInput
from worldserve.models.reference import ReferenceWorldModel, Statistics

STEPS = 6
REUSING = ("teacache", "easycache", "control", "chunk", "content")


def calibration():
    """One that lets every policy skip something."""
    knobs = {"teacache": 0.5, "easycache": 1.0, "control": 3, "chunk": 2, "content": 10.0}
    table = StepTable(
        knobs={name: (Knob(value, 90.0, 90.0, 0.5),) for name, value in knobs.items()},
        ladder=(Rung((0, STEPS - 1), 0.0, 1.0), Rung((0, 2, STEPS - 1), 0.0, 0.5)),
        slopes={(0, 2, step): 0.1 for step in range(3, STEPS)},
    )
    change = np.random.default_rng(0).uniform(0.1, 1, (3, 8, 8)).astype("f4")
    return ReuseCalibration("random", {STEPS: table}, WeightSettings(), change)


@pytest.fixture(scope="module")
def model():
    """The reference model's shape with weights that no training has seen, and a generator that
    changes what it sees."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = NetworkConfig(operations=("open", "close"), dynamics_layers=1, window=3)
    network = WorldNetwork(config)
    with torch.no_grad():
        network.dynamics.difference.weight.normal_(0, 0.05)
        network.generator.out.weight.normal_(0, 0.2)
        for block in network.generator.blocks:
            block.modulation.weight.normal_(0, 0.1)
            block.modulation.bias.normal_(0, 0.3)
    statistics = Statistics(np.zeros(7, "f4"), np.ones(7, "f4"), np.ones(config.state.size, "f4"))
    return ReferenceWorldModel(network, statistics, "random", reuse=calibration())


def task(model, horizon, seed):
    """(frame, tokens, seed, controls) to draw."""
    draw = np.random.default_rng(seed)
    frame = draw.integers(0, 256, (64, 64, 3), np.uint8)
    tokens = draw.standard_normal((horizon, 65, 192)).astype("f4")
    held = draw.uniform(-1, 1, (1, 4)).repeat(horizon, 0).astype("f4")
    return frame, tokens, seed, held


def generate(model, tasks, renderings):
    frames, tokens, seeds, plans = zip(*tasks, strict=True)
    return model.generate(frames, tokens, seeds, None, renderings, plans)


def test_without_reuse_frames_are_the_flow_itself(model):
    """`none`, and a policy that computes every step, give the same bits as the plain flow."""
    frame, tokens, seed, plan = task(model, 3, 1)
    [plain] = generate(model, [(frame, tokens, seed, plan)], [Rendering(STEPS)])
    everything = Schedule(steps=(tuple(range(STEPS)),))
    for policy in (make("none", 0), everything):
        made, _ = model.draw(frame, tokens, seed, STEPS, policy, plan)
        assert np.array_equal(made, plain)
    [one_step] = generate(model, [(frame, tokens, seed, plan)], [Rendering(1, "content")])
    assert np.array_equal(one_step, model.generate([frame], [tokens], [seed])[0])


@pytest.mark.parametrize("name", REUSING)
def test_every_policy_skips_blocks(model, name):
    """Fewer blocks are computed, and the frames show it."""
    frame, tokens, seed, plan = task(model, 4, 2)
    events = []
    model.on_event = events.append
    [plain] = generate(model, [(frame, tokens, seed, plan)], [Rendering(STEPS)])
    assert not events
    [made] = generate(model, [(frame, tokens, seed, plan)], [Rendering(STEPS, name)])
    counted = {event.decision: event.count for event in events}
    assert counted["reused"] > 0
    assert sum(counted.values()) == 3 * 4 * STEPS
    assert not np.array_equal(made, plain)


@pytest.mark.parametrize("name", REUSING)
def test_a_batch_gives_what_its_members_give_alone(model, name):
    """Different horizons, seeds and renderings together: bit for bit those alone, in any order."""
    tasks = [task(model, 2, 3), task(model, 5, 4), task(model, 2, 3)]
    renderings = [Rendering(STEPS, name), Rendering(STEPS, name), Rendering(2)]
    alone = [generate(model, [t], [r])[0] for t, r in zip(tasks, renderings, strict=True)]
    for order in ((0, 1, 2), (2, 1, 0)):
        made = generate(model, [tasks[i] for i in order], [renderings[i] for i in order])
        for place, index in enumerate(order):
            assert np.array_equal(made[place], alone[index])


def test_without_calibration_nothing_is_reused(model):
    """Steps, or budgets, that nobody calibrated: the frames of `none`."""
    tasks = [task(model, 2, 5)]
    for name in REUSING:
        for how in (Rendering(STEPS + 1, name), Rendering(STEPS, name, quality_db=91.0)):
            [made] = generate(model, tasks, [how])
            [plain] = generate(model, tasks, [Rendering(how.steps)])
            assert np.array_equal(made, plain)


def test_memory_never_sees_what_was_drawn(model):
    """Predictions are the same whether or not frames were drawn with reuse in between."""
    conditioning, _ = model.condition("", "")
    draw = np.random.default_rng(6)
    frames = draw.integers(0, 256, (3, 64, 64, 3), np.uint8)
    controls = draw.uniform(-1, 1, (3, 4)).astype("f4")
    ends = []
    for name in ("none", "content"):
        memory, tokens = model.assemble((), 0), model.embed(frames)[0]
        for control in controls:
            plan = control[None].repeat(2, 0)
            [out] = model.rollout([RolloutInput(memory, tokens, plan, conditioning)])
            model.generate([frames[0]], [out.tokens], [0], None, [Rendering(STEPS, name)], [plan])
            after = model.absorb(memory, tokens[None], control[None], conditioning)
            memory, tokens = after.memory, after.predicted_tokens
        ends.append(tokens)
    assert np.array_equal(*ends)


def test_another_calibration_gets_another_name(model):
    before = model.spec.reuse_calibration
    model.recalibrate(ReuseCalibration("random", {}))
    assert model.spec.reuse_calibration != before
    model.recalibrate(calibration())
    assert model.spec.reuse_calibration == before
