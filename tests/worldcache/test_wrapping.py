"""Step reuse on transformers that others built: small, random ones of diffusers."""

from __future__ import annotations

import threading

import pytest
import torch

import worldcache
from worldcache.adapters import adapter_for
from worldcache.content import Content, Rung
from worldcache.policies import EasyCache, Schedule, TeaCache
from worldcache.reuse_calibration import make

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (extra `bench`)")
STEPS = 6


def wan():
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=3,
        rope_max_seq_len=32,
    )


def cosmos():
    return diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=24,
        num_layers=3,
        text_embed_dim=16,
        adaln_lora_dim=8,
        max_size=(4, 16, 16),
        concat_padding_mask=False,
    )


@pytest.fixture(params=[wan, cosmos], ids=["wan", "cosmos"])
def model(request):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return request.param().eval()


def sample(model, seed=0, batch=1, size=(2, 8, 8), steps=STEPS, branch=None):
    """Euler steps of a flow; with `branch`, guided: two calls a step, told apart or not."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 4, *size, generator=draw)
    texts = [torch.randn(batch, 5, 16, generator=draw) for _ in range(2)]
    with torch.no_grad():
        for step in range(steps):
            time = torch.full((batch,), 1000 * (1 - step / steps))
            flows = []
            for name, text in zip(("a", "b"), texts[: 2 if branch else 1], strict=False):
                arguments = {"timestep": time, "encoder_hidden_states": text, "return_dict": False}
                if branch:
                    with branch(name):
                        flows.append(model(x, **arguments)[0])
                else:
                    flows.append(model(x, **arguments)[0])
            x = x - sum(flows) / len(flows) / steps
    return x


POLICIES = [
    make("teacache", 0.3),
    EasyCache(threshold=0.5),
    make("control", 3),
    Content(ladder=(Rung((0, 2, STEPS - 1), 0.0),)),
    Content(ladder=(Rung((0, 2, STEPS - 1), 0.0),), reuses="blocks"),
]


def test_a_wrapped_model_is_the_model(model):
    """Outside of a request, under `none`, and unwrapped: the same bits and the same weights."""
    before, names = sample(model), sorted(model.state_dict())
    wrapped = worldcache.wrap(model)
    assert torch.equal(sample(model), before)
    with wrapped.request(make("none", 0), STEPS):
        assert torch.equal(sample(model), before)
    with wrapped.request(Schedule(steps=(tuple(range(STEPS)),)), STEPS):
        assert torch.equal(sample(model), before)
    assert sorted(model.state_dict()) == names
    with pytest.raises(ValueError, match="already"):
        worldcache.wrap(model)
    wrapped.unwrap()
    assert "forward" not in vars(model)
    assert torch.equal(sample(model), before)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.reuses}")
def test_every_policy_skips_blocks_and_stays_near(model, policy):
    calls = []
    first = getattr(model, adapter_for(model).blocks)[0]
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    truth = sample(model)
    assert len(calls) == STEPS
    with worldcache.wrap(model).request(policy, STEPS) as request:
        made = sample(model)
    assert 0 < request.tally.skipped < 1
    assert len(calls) - STEPS == STEPS * (1 - request.tally.skipped)
    assert 0 < (made - truth).abs().mean() < 0.3 * truth.abs().mean()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.reuses}")
def test_rows_of_a_batch_have_scopes_of_their_own(model, policy):
    """A batch skips for each row what that row alone skips."""
    wrapped = worldcache.wrap(model)
    with wrapped.request(policy, STEPS) as request:
        sample(model, batch=3)
    decided = [scope.state.computed for scope in request.branches[""].scopes]
    assert len(decided) == 3
    assert all(steps[0] == 0 and steps[-1] == STEPS - 1 for steps in decided)


def test_interleaved_requests_are_each_as_alone(model):
    """Two threads, two sizes, two prompts, two policies, one model: bit-equal to each alone."""
    wrapped = worldcache.wrap(model)
    jobs = [
        (EasyCache(threshold=0.5), {"seed": 1, "size": (2, 8, 8)}),
        (TeaCache(threshold=0.3), {"seed": 2, "size": (1, 12, 8), "batch": 2}),
    ]

    def run(policy, options):
        with wrapped.request(policy, STEPS):
            return sample(model, **options)

    def keep(made, index, job):
        made[index] = run(*job)

    alone = [run(*job) for job in jobs]
    for _ in range(3):
        made: dict[int, torch.Tensor] = {}
        threads = [threading.Thread(target=keep, args=(made, i, job)) for i, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(made[i], alone[i]) for i in range(len(jobs)))


def test_branches_of_guidance_do_not_meet(model):
    """Each branch counts its own steps; without names, the calls are too many."""
    wrapped = worldcache.wrap(model)
    with wrapped.request(EasyCache(threshold=0.5), STEPS) as request:
        sample(model, branch=request.branch)
    assert set(request.branches) == {"a", "b"}
    with (
        pytest.raises(ValueError, match="one more"),
        wrapped.request(EasyCache(threshold=0.5), STEPS),
    ):
        sample(model, steps=STEPS + 1)


def test_what_cannot_be_wrapped_is_named():
    with pytest.raises(ValueError, match="no adapter for Linear"):
        worldcache.wrap(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must be a ModuleList"):
        worldcache.wrap(torch.nn.Linear(2, 2), worldcache.Adapter(blocks="weight"))
