"""Modelled users, recordings of real hands, and the client's mirror of a session."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ctrlcache.errors import InvalidInput
from worldserve.bench.hands import Recording, hand_actions, read_recording
from worldserve.bench.timeline import PREDICTED, Timeline
from worldserve.bench.workload import HABITS, HORIZON, Action, Clip, act

_HEAD = "record timestamp,client timestamp,button,state,x,y\n"


def clip(frames: int = 220, name: str = "a") -> Clip:
    draw = np.random.default_rng(0)
    return Clip(
        name=name,
        suite="kitchen",
        operation="drawer-open",
        prompt="open the drawer",
        frames=np.zeros((frames, 8, 8, 3), np.uint8),
        controls=draw.uniform(-1, 1, (frames - 1, 4)).astype(np.float32),
        physics=np.zeros((frames, 9), np.float32),
    )


@pytest.mark.parametrize("suite", sorted(HABITS))
def test_a_user_is_reproducible_and_unlike_others(suite):
    """Same seed, same actions; another user, clip or seed, others."""
    habits = HABITS[suite]
    first = act(clip(), habits, 0, 7)
    assert first == act(clip(), habits, 0, 7)
    for other in (
        act(clip(), habits, 1, 7),
        act(clip(name="b"), habits, 0, 7),
        act(clip(), habits, 0, 8),
    ):
        assert first != other
    assert sum(action.asks for action in first) == habits.asks


def test_the_first_frames_are_shown_before_anything_is_asked():
    """By modelled users and by recorded hands alike, with a rest before the first question."""
    habits = HABITS["edudemo"]
    recording = Recording("hand", np.arange(9, dtype=np.float32), np.eye(9, 4, dtype=np.float32))
    for actions in (act(clip(), habits, 0), hand_actions(clip(), habits, recording)):
        assert (actions[0].mode, actions[0].watched) == ("watch", (0, habits.lead))
        assert actions[0].pause_s > 0
        assert (actions[1].mode, actions[1].watched) == ("probe", (0, 0))


@pytest.mark.parametrize("suite", sorted(HABITS))
def test_actions_are_possible(suite):
    """Controls in reach, frames of the clip in order, seeks within what the session has seen."""
    habits = replace(HABITS[suite], asks=300)
    shown = clip(80)
    for user in range(3):
        timeline = Timeline()
        for action in act(shown, habits, user):
            assert np.abs(action.control).max() <= 0.9 + 1e-6
            assert action.watched[1] <= len(shown.frames)
            if action.mode == "seek":
                assert 0 <= action.seek < len(timeline.frames)
            timeline.follow(shown, action)
            if action.watched[0] < action.watched[1] and timeline.present > 0:
                # What is seen next is what comes next in the clip.
                count = action.watched[1] - action.watched[0]
                seen = timeline.frames[-count:]
                assert seen == list(range(*action.watched))


def test_weights_are_kept():
    """The share of episodes of a kind is what the table says."""
    habits = replace(
        HABITS["kitchen"], asks=4000, weights={"repeat": 0.25, "jump": 0.75}, preset_share=1.0
    )
    kinds = [action.kind for action in act(clip(), habits, 0) if action.kind != "open"]
    assert kinds.count("jump") / len(kinds) == pytest.approx(0.75, abs=0.03)


def test_a_clip_too_short_is_refused():
    with pytest.raises(ValueError, match="has 20 frames, need 32"):
        act(clip(20), HABITS["kitchen"], 0)


def test_timeline_knows_what_led_to_the_present():
    """Equal histories have equal digests, however they came about; others do not."""
    shown = clip()
    held = (0.1, 0.2, 0.3, 0.4)
    one, other = Timeline(), Timeline()
    one.follow(shown, Action("open", "probe", held, 0, (0, 24)))
    one.follow(shown, Action("play", "watch", held, 0, (24, 30)))
    other.follow(shown, Action("open", "probe", held, 0, (0, 30)))
    assert one.digest() == other.digest()
    one.follow(shown, Action("scrub", "seek", held, 0, seek=20))
    assert one.digest() != other.digest()
    one.follow(shown, Action("play", "watch", held, 0, (21, 30)))
    assert one.digest() == other.digest()
    one.follow(shown, Action("advance", "advance", held, 0, steps=2))
    assert one.digest() != other.digest()
    assert one.frames[-2:] == [PREDICTED, PREDICTED]
    assert one.base == 29


def test_stretches_begin_with_an_observed_frame():
    """A recomputation is given the last frames, and no predicted one without what it came from."""
    shown, timeline = clip(), Timeline()
    held = (0.1, 0.2, 0.3, 0.4)
    timeline.follow(shown, Action("open", "probe", held, 0, (0, 24)))
    timeline.follow(shown, Action("advance", "advance", held, 0, steps=3))
    timeline.follow(shown, Action("play", "watch", held, 0, (27, 29)))
    kinds = [(s.observed, len(s.clip_frames)) for s in timeline.stretches(32)]
    assert kinds == [(True, 24), (False, 3), (True, 2)]
    kinds = [(s.observed, len(s.clip_frames)) for s in timeline.stretches(4)]
    assert kinds == [(True, 1), (False, 3), (True, 2)]
    assert timeline.stretches(32)[1].controls == pytest.approx(np.tile(held, (3, 1)))


def test_a_recording_becomes_a_hand(tmp_path):
    """x and y follow the mouse over the range it uses, a drag moves z, a press closes the hand."""
    path = tmp_path / "trace.csv"
    rows = [f"{i},{i * 0.2},NoButton,Move,{100 + 10 * i},{500 - 5 * i}" for i in range(20)]
    rows += ["20,4.0,Left,Pressed,290,405", "21,4.2,Left,Drag,290,455", "22,4.4,Left,Drag,290,500"]
    rows += ["23,4.6,Left,Released,290,500", "24,9.0,NoButton,Move,200,450"]
    path.write_text(_HEAD + "\n".join(rows) + "\n")
    recording = read_recording(path)
    assert len(recording.times_s) == 25
    assert np.all(np.diff(recording.controls[:20, 0]) >= 0)
    assert recording.controls[18, 3] < 0 < recording.controls[21, 3]
    assert recording.controls[23, 2] > recording.controls[19, 2] + 0.3
    actions = hand_actions(clip(), HABITS["kitchen"], recording)
    assert actions[0].watched == (0, HABITS["kitchen"].lead)
    assert any(action.mode == "watch" for action in actions)  # it rested for four seconds
    assert HORIZON == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column 'client timestamp'"),
        (_HEAD + "0,zero,NoButton,Move,1,2\n", "line 2: time, x and y must be numbers"),
        (_HEAD, "fewer than two positions"),
    ],
)
def test_a_bad_recording_is_named(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        read_recording(path)
