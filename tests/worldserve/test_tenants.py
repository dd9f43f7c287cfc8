"""What one tenant has asked helps no other: neither an answer nor the way to one tells of it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_world import HELD, TINY, Client, Truth, clip, controls, equal, trust_the_tiny_model

from ctrlcache.errors import CtrlCacheError
from ctrlcache.metrics import Lookup
from worldserve.models.tiny import TinyWorldModel
from worldserve.service import WorldService
from worldserve.session_store import SessionNotFound

#: Fields of events that differ from run to run.
_MEASURED = {
    "seconds",
    "error",
    "created_s",
    "free_bytes",
    "size_bytes",
    "entries",
    "count",
    "at_s",
}


class WatchedModel(TinyWorldModel):
    """Writes down which of its methods is called, and with how much."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def condition(self, prompt, view):
        self.steps.append("condition")
        return super().condition(prompt, view)

    def embed(self, frames):
        self.steps.append(("embed", len(frames)))
        return super().embed(frames)

    def absorb(self, memory, tokens, controls, conditioning):
        self.steps.append(("absorb", len(tokens)))
        return super().absorb(memory, tokens, controls, conditioning)

    def rollout(self, inputs, *more):
        self.steps.append(("rollout", [one.controls.shape for one in inputs]))
        return super().rollout(inputs, *more)

    def generate(self, bases, tokens, *more):
        self.steps.append(("generate", len(tokens)))
        return super().generate(bases, tokens, *more)


class Watched:
    """A service that writes down everything a request makes it do, but for times."""

    def __init__(self, shm, tmp_path):
        self.steps: list[object] = []
        trust_the_tiny_model(tmp_path)
        self.service = WorldService(
            {
                "world_model_class": TINY,
                "shm_dir": str(shm),
                "warm_dir": str(tmp_path / "warm"),
                "hot_size_bytes": "64MiB",
                "max_sessions": "16",
                "background": "false",
            },
            tmp_path,
            on_event=self._event,
            model=WatchedModel(self.steps),
        )
        self.client = Client(self.service)
        self._watch("get_blob")
        self._watch("lookup")

    def _event(self, event):
        if isinstance(event, Lookup):
            self.steps.append((event.tier, event.result))
        elif dataclasses.is_dataclass(event) and not _MEASURED & set(vars_of(event)):
            self.steps.append(event)

    def _watch(self, name):
        inner = getattr(self.service.cache, name)

        def call(*arguments, **more):
            found = inner(*arguments, **more)
            self.steps.append((name, found is not None))
            return found

        setattr(self.service.cache, name, call)

    def steps_of(self, requests):
        """What is done for `requests`, a list of (control, options)."""
        taken = []
        for control, options in requests:
            assert self.service.drain()
            self.steps.clear()
            self.client.ask(control, **options)
            # What follows from it is done beside it: all of it is waited for, in whatever order.
            assert self.service.drain()
            taken.append(sorted(map(str, self.steps)))
        return taken


def vars_of(event):
    return [field.name for field in dataclasses.fields(event)]


@pytest.fixture
def watched(shm, tmp_path):
    made = Watched(shm, tmp_path)
    yield made
    made.service.close()


def visit(tenant, id, seed, prompt=""):
    """A session: frames and a prompt, the same question twice, one step, and back."""
    common = {"tenant": tenant, "id": id}
    begin = {**common, "frames": clip(5, seed=seed), "start": True, "prompt": prompt}
    return [
        (np.vstack([controls(4), HELD]), begin),
        (HELD, common),
        (HELD + np.float32(0.01), common),
        (-HELD, {**common, "mode": "advance"}),
        (HELD, {**common, "mode": "seek", "frame": 3}),
    ]


def test_a_probe_of_what_another_tenant_has_takes_the_steps_of_one_that_nobody_has(watched):
    """Frames, prompt, controls and horizon are those of another tenant: the look-ups, the reads and
    the calls of the model are, one by one, those for a scene that nobody has ever seen. The tenant
    itself is served from its cache, so there was something to be told."""
    watched.steps_of(visit("a", "first", seed=1, prompt="door"))
    anew = watched.steps_of(visit("a", "second", seed=1, prompt="door"))
    others = watched.steps_of(visit("b", "third", seed=1, prompt="door"))
    nobodys = watched.steps_of(visit("c", "fourth", seed=2, prompt="window"))
    assert others == nobodys
    assert anew != others
    assert not any("rollout" in str(step) for step in anew[0])
    assert any("rollout" in str(step) for step in others[0])


def test_resuming_and_forking_another_tenants_session_is_refused_as_for_one_that_is_not(watched):
    """The same words, but for the name; the same steps."""
    watched.steps_of(visit("a", "first", seed=1))
    for parameter in ("resume", "fork_of"):
        told, taken = [], []
        for wanted in ("first", "never"):
            assert watched.service.drain()
            watched.steps.clear()
            with pytest.raises(SessionNotFound) as refusal:
                watched.client.ask(HELD, "mine", start=True, tenant="b", **{parameter: wanted})
            told.append(str(refusal.value).replace(wanted, "..."))
            taken.append(list(watched.steps))
        assert told[0] == told[1]
        assert taken[0] == taken[1]


_runs = itertools.count()


@pytest.fixture
def shared(serve):
    """One service for all examples: each has tenants of its own."""
    return serve(background="false", session_displace_s="0.001")


REQUEST = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["start", "fork", "resume", "probe", "advance", "seek"]),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.01, 0.3]),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(REQUEST, min_size=4, max_size=14))
def test_tenants_that_do_the_same_things_are_computed_apart(shared, requests):
    """Sessions of the same ids over the same clips, begun, forked, resumed and moved by several
    tenants in any order: the first time a tenant asks something in a context, it is never a hit
    because of another tenant, and every answer is the model's own."""
    client, run = shared, next(_runs)
    asked: set[tuple[object, ...]] = set()
    here: dict[tuple[str, int], tuple[object, ...]] = {}
    for tenant, act, scene, shift in requests:
        control, key = HELD + np.float32(shift), (tenant, scene)
        options = {"tenant": f"{tenant}{run}", "id": f"s{scene}"}
        if act == "start":
            options |= {"frames": clip(2, seed=scene), "start": True}
            here[key] = (tenant, scene, shift)
        elif key not in here:
            with pytest.raises(CtrlCacheError):
                client.ask(control, **options)
            continue
        elif act in ("fork", "resume"):
            options |= {"start": True, "fork_of" if act == "fork" else "resume": f"s{scene}"}
            if act == "fork":
                options["id"] = f"fork of s{scene}"
        elif act == "seek":
            options |= {"mode": "seek", "frame": 0}
            here[key] = (tenant, scene, "first")
        elif act == "advance":
            options["mode"] = "advance"
        question = (*here[key], float(control[0]))
        got = client.ask(control, **options, max_error=0.0)
        if question not in asked:
            assert got["CACHE_TIER"][0] == b"none"
        asked.add(question)
        if act == "advance":
            here[key] = (*here[key], float(control[0]))
        if act == "start":
            assert equal(got, Truth(clip(2, seed=scene), [control]).predict(control))
