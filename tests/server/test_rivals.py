"""Each rival of the benchmark is what it says: it hits and misses where it should."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from test_reuse import STEPS, calibrate
from tiny_world import trust_the_tiny_model

from ctrlcache.errors import ConfigError
from worldserve.bench.clips import load_clips
from worldserve.bench.rivals import RIVALS, Stateful
from worldserve.bench.runner import Plan, Session, play_rival, to_play
from worldserve.bench.scoreboard import load_played
from worldserve.bench.servers import Servers, counted
from worldserve.bench.stores import DictStore, redis_missing, redis_server
from worldserve.bench.workload import HABITS, Action, Clip, act
from worldserve.runtime import Runtime, RuntimeConfig, StartFailed

PROJECT = Path(__file__).resolve().parents[2]
REPOSITORY, CLIPS = PROJECT / "model_repository", PROJECT / "benchmarks" / "clips"
WEIGHTS = REPOSITORY / "world_model" / "1"
SETTINGS = {"world_model_class": "worldserve.models.tiny:TinyWorldModel"}
HERE, BESIDE, FAR = (0.1, 0.2), (0.1, 0.21), (-0.7, 0.6)


@pytest.fixture(scope="module")
def clip():
    draw = np.random.default_rng(3)
    return Clip(
        name="random",
        suite="kitchen",
        operation="push",
        prompt="",
        frames=draw.integers(0, 256, (40, 32, 32, 3)).astype(np.uint8),
        controls=draw.uniform(-0.8, 0.8, (39, 2)).astype(np.float32),
        physics=np.zeros((40, 9), np.float32),
    )


@pytest.fixture
def client(tiny_server):
    with grpcclient.InferenceServerClient(tiny_server.endpoints.grpc) as made:
        yield made


OPEN = Action("open", "probe", HERE, 0, (0, 12))
SESSION = [
    OPEN,
    Action("repeat", "probe", HERE, 0),
    Action("correct", "probe", BESIDE, 0),
    Action("play", "watch", HERE, 0, (12, 15)),
    Action("play", "probe", HERE, 0),
    Action("advance", "advance", FAR, 0, steps=2),
    Action("repeat", "probe", HERE, 0),
    Action("scrub", "seek", HERE, 0, seek=11),
    Action("repeat", "probe", FAR, 0),
    Action("play", "watch", HERE, 0, (12, 15)),
    Action("repeat", "probe", HERE, 0),
]


def answers(play, actions=SESSION):
    found = []
    for action in actions:
        if action.asks:
            found.append(play.ask(action))
        else:
            play.watch(action)
    play.close()
    return found


def equal(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("frames", "states")
    )


@pytest.fixture
def truth(client, clip):
    """What the model says to each question."""
    return answers(RIVALS["stateful"].begin(client, clip, None, 0.0))


def test_stateful_never_hits(truth):
    assert {reply.tier for reply in truth} == {"none"}


def test_recompute_says_the_same_and_keeps_nothing(client, clip, truth):
    """All of it again each time, from frames alone, with the same answers."""
    found = answers(RIVALS["recompute"].begin(client, clip, None, 0.0))
    assert {reply.tier for reply in found} == {"none"}
    for one, other in zip(found, truth, strict=True):
        assert equal(one, other)
        assert one.stages_ms[1] > 0  # it encoded


@pytest.mark.parametrize("kind", ["dict", "redis"])
def test_a_response_cache_hits_the_same_question_only(client, clip, truth, kind):
    """The same question in the same context, whoever asks it; nothing beside it."""
    if kind == "redis" and redis_missing():
        pytest.skip(redis_missing())
    name = {"dict": "response", "redis": "redis"}[kind]
    if kind == "dict":
        store = DictStore()
        rows = [answers(RIVALS[name].begin(client, clip, store, 0.0)) for _ in range(2)]
    else:
        with redis_server(1 << 26) as store:
            rows = [answers(RIVALS[name].begin(client, clip, store, 0.0)) for _ in range(2)]
            assert store.bytes_used > 0
    for found in rows:
        for one, other in zip(found, truth, strict=True):
            assert equal(one, other)
    # Open, repeat, correct, play, advance, repeat, scrub, repeat, repeat (after playing on).
    first, second = ([reply.tier == name for reply in found] for found in rows)
    assert first == [False, True, False, False, False, False, True, False, True]
    # Another session asks the same: all but the request that brings the frames.
    assert second == [False, *[True] * 8]


def test_a_full_store_forgets_the_oldest():
    store = DictStore(most=2)
    for key in (b"a", b"b", b"a", b"c"):
        if store.get(key) is None:
            store.put(key, key)
    assert [store.get(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]


def test_the_cached_server_hits_what_was_asked(client, clip, truth):
    """Without approximation: the same hits as a response cache, and the first request's, too."""
    rows = [answers(Stateful(client, clip, max_error="0", tenant="rivals")) for _ in range(2)]
    for found in rows:
        for one, other in zip(found, truth, strict=True):
            assert one.exact
            assert equal(one, other)
    assert [reply.tier for reply in rows[1]] == ["hot"] * 9


def encoding_ms(client, clip, name):
    """What encoding took in a new question, of the second to fourth session on the same video."""
    took = []
    for number in range(4):
        play = RIVALS[name].begin(client, clip, None, 0.0)
        play.ask(dataclasses.replace(OPEN, control=(0.1 * number, -0.5)))
        play.settle()
        asked = play.ask(Action("jump", "probe", (0.1 * number, 0.5), 0))
        assert asked.tier == "none"
        assert asked.stages_ms[1] < 1  # the session's own memory is there
        found = play.ask(Action("repeat", "probe", (0.1 * number, 0.5), 0))
        assert found.tier == "hot"
        play.close()
        again = RIVALS[name].begin(client, clip, None, 0.0)
        reply = again.ask(dataclasses.replace(OPEN, control=(0.1 * number, 0.9)))
        assert reply.tier == "none"
        took.append(reply.stages_ms[1])
        again.close()
    return float(np.median(took))


def test_no_resume_encodes_again_what_trust_remembers(client, clip, start_tiny):
    """A second session on the same video: its frames are encoded again; couplets are still hit."""
    other = start_tiny(parameters=RIVALS["no-resume"].settings)
    with grpcclient.InferenceServerClient(other.endpoints.grpc) as there:
        again_ms = encoding_ms(there, clip, "no-resume")
    known_ms = encoding_ms(client, clip, "trust")
    assert again_ms > 3 * known_ms


def test_what_was_played_is_kept(clip, tmp_path):
    """A rival's sessions lie on disk afterwards, judged against the reference; a second run plays
    nothing again. Rivals that leave the server's cache alone may share a server."""
    plan = Plan(
        REPOSITORY,
        tmp_path,
        np.ones(12, np.float32),
        ("push", "pull", "turn"),
        logits=4,
        drain=True,
        settings=SETTINGS,
    )
    sessions = [Session(clip, user, "model", SESSION) for user in range(2)]
    acted, runs = [], []
    with Servers(REPOSITORY, SETTINGS, clip, share=True) as servers:
        for name in ("stateful", "response"):
            play_rival(RIVALS[name], sessions, plan, servers, acted.append)
            runs.append(servers.of(RIVALS[name]).run_id)
        assert runs[0] == runs[1]
        assert servers.of(RIVALS["no-thinking"]).run_id != runs[1]
    assert len(acted) == 2 * 2 * len(SESSION)
    played = load_played(tmp_path, "response", "kitchen", "model")
    assert played is not None
    assert len(played.answers) == 18
    assert all(answer["error"] == 0 for answer in played.answers)
    assert sum(answer["tier"] == "response" for answer in played.answers) == 11
    broken = Servers(tmp_path / "nowhere", SETTINGS, clip)
    assert not to_play(RIVALS["response"], sessions, plan)
    play_rival(RIVALS["response"], sessions, plan, broken)  # no server is needed any more
    (tmp_path / "response" / f"{sessions[1].name}.json").unlink()
    assert to_play(RIVALS["response"], sessions, plan)
    with pytest.raises(ConfigError, match="nowhere"):
        play_rival(RIVALS["response"], sessions, plan, broken)


def test_drained_runs_agree_hit_for_hit(clip, tmp_path):
    """The same seed twice, each on an empty cache: where each answer came from, whether it is
    exact, and what is said of it."""
    weights = tmp_path / "weights"
    weights.mkdir()
    trust_the_tiny_model(weights)
    settings = {**SETTINGS, "weights_dir": str(weights)}
    acting = dataclasses.replace(clip, controls=np.repeat(clip.controls, 2, axis=1))
    sessions = [
        Session(clip, user, "model", [dataclasses.replace(a, control=a.control[:2]) for a in acted])
        for user in range(2)
        for acted in [act(acting, dataclasses.replace(HABITS["kitchen"], asks=20), user)]
    ]
    found = []
    for run in ("one", "other"):
        plan = Plan(
            REPOSITORY,
            tmp_path / run,
            np.full(12, 0.3, np.float32),
            max_error=0.2,
            drain=True,
            settings=settings,
        )
        with Servers(REPOSITORY, settings, clip) as servers:
            for name in ("stateful", "trust"):
                play_rival(RIVALS[name], sessions, plan, servers)
        played = load_played(tmp_path / run, "trust", "kitchen", "model")
        found.append([[a[k] for k in ("tier", "exact", "bound", "error")] for a in played.answers])
    assert found[0] == found[1]
    assert any(tier == "hot" and not exact for tier, exact, _, _ in found[0])
    assert any(tier == "none" for tier, _, _, _ in found[0])


def test_tritons_own_response_cache_refuses_a_sequence_model(tmp_path):
    """Why `response` has to be built: Triton will not even load the model with its cache on."""
    repository = tmp_path / "repository"
    shutil.copytree(REPOSITORY / "world_model", repository / "world_model")
    config = repository / "world_model" / "config.pbtxt"
    config.write_text(config.read_text() + "\nresponse_cache { enable: true }\n")
    runtime = Runtime(
        RuntimeConfig.aside(
            repository,
            parameters=SETTINGS,
        )
    )
    with pytest.raises(StartFailed, match="Response Cache does not currently support model"):
        runtime.start()


@pytest.fixture(scope="module")
def seen_twice(tmp_path_factory):
    """Weights with two views, calibrated to skip something at four steps, and a clip of both."""
    directory = tmp_path_factory.mktemp("weights")
    for name in ("weights.safetensors", "config.json"):
        shutil.copy(WEIGHTS / name, directory)
    calibrate(directory)
    return directory, load_clips("inspection", 1, CLIPS)[0]


CONTROL, ELSEWHERE = (0.4, -0.2, 0.3, 0.9), (-0.3, 0.5, 0.1, -0.9)
LOOKS = [
    Action("open", "probe", CONTROL, 0, (0, 8)),
    Action("view", "probe", CONTROL, 0, view=True),
    Action("view", "probe", CONTROL, 0, view=True),
    Action("advance", "advance", CONTROL, 0, steps=1),
    Action("view", "probe", ELSEWHERE, 0, view=True),
    Action("scrub", "seek", CONTROL, 0, seek=5),
    Action("view", "probe", CONTROL, 0, view=True),
]


def looked(seen_twice, names, actions=LOOKS):
    """{rival: (replies, what WorldCache counted)}: all of one group on one server."""
    directory, clip = seen_twice
    settings = {"weights_dir": str(directory), "generator_steps": str(STEPS)}
    found = {}
    with Servers(REPOSITORY, settings, clip, share=True) as servers:
        for name in names:
            rival = RIVALS[name]
            runtime = servers.of(rival)
            store = DictStore() if rival.store else None
            with grpcclient.InferenceServerClient(runtime.endpoints.grpc) as client:
                before = counted(runtime)
                play = rival.begin(client, clip, store, 0.0)
                replies = []
                for action in actions:
                    replies.append(play.ask(action))
                    play.settle()
                play.close()
                after = counted(runtime)
                found[name] = (replies, {k: v - before.get(k, 0) for k, v in after.items()})
    return found


@pytest.mark.server
def test_worldcache_finds_and_skips_where_trust_draws_all_of_it(seen_twice):
    """Blocks are skipped between four steps, and a picture from the other camera, which no couplet
    holds, is drawn once; with WorldCache off it is drawn each time. States are the same."""
    found = looked(seen_twice, ["stateful", "trust", "worldcache"])
    [truth, _], [plain, nothing], [reusing, something] = found.values()
    assert {k: v for k, v in nothing.items() if k != "blocks computed" and v} == {}
    assert something["blocks reused"] > 0
    assert something["lookups hit"] > 0
    for one, other, third in zip(truth, plain, reusing, strict=True):
        assert equal(one, other)
        assert other.exact
        assert not third.exact
        assert third.bound == 0
        assert np.array_equal(third.states, one.states)
    first, again = reusing[1:3]
    assert np.array_equal(first.frames, again.frames)
    assert plain[2].tier == reusing[2].tier == "hot"
    assert again.stage_ms("decode") < plain[2].stage_ms("decode") / 5


@pytest.mark.server
def test_who_looks_from_elsewhere_sees_that_camera(seen_twice):
    """Every rival answers for the other camera, at the frame the session is at; a response cache
    tells the views apart, and a recomputation encodes that camera's own frames."""
    _, clip = seen_twice
    found = looked(seen_twice, ["stateful", "recompute", "response"])
    truth, again, remembered = (replies for replies, _ in found.values())
    for one, other in zip(truth, remembered, strict=True):
        assert equal(one, other)
    # The view once more, and the advance, whose prediction is what was asked for first.
    hits = [number for number, reply in enumerate(remembered) if reply.tier == "response"]
    assert hits == [2, 3]
    here, there, _, _, dreamt, _, back = truth
    assert np.array_equal(here.states, there.states)
    for replies in (truth, again):
        for reply, frame in ((replies[1], 7), (replies[4], 7), (replies[6], 5)):
            own, other = (
                np.abs(reply.frames[0].astype(float) - seen[frame]).mean()
                for seen in (clip.frames, clip.other)
            )
            assert other < own / 2
    assert not np.array_equal(dreamt.frames, back.frames)
    assert {reply.tier for reply in again} == {"none"}
    # Other cameras' own predictions are their own; those of the session's camera are the same.
    assert equal(again[0], truth[0])
    assert not equal(again[1], truth[1])


def test_one_camera_is_asked_again(client, clip):
    """Where the served weights know one view, a question about another is the same once more."""
    play = RIVALS["trust"].begin(client, clip, None, 0.0)
    replies = [play.ask(OPEN), play.ask(Action("view", "probe", HERE, 0, view=True))]
    play.close()
    assert equal(*replies)
    assert replies[1].tier == "hot"
