"""An edit recomputes what depends on it, and the film is that of making everything anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from level_worker import KIB, open_levels
from tiny_world import clip, controls

from ctrlcache.errors import InvalidInput
from worldcache.editing import PlainStore
from worldserve.models.tiny import TinyWorldModel
from worldserve.storyboard import MARGIN_PX, Anchor, Director, Repaint, Segment

MODEL = TinyWorldModel()
CHUNK = MODEL.spec.max_horizon // 2


def anchor(seed=0, length=9):
    return Anchor(clip(length, seed), controls(length - 1, seed))


def chained(steps=2 * CHUNK):
    """Three phrases, one after the other."""
    return [
        Segment("push the cube", controls(steps, 1), anchor()),
        Segment("turn the dial", controls(steps, 2)),
        Segment("pull the lever", controls(steps, 3)),
    ]


def anchored(steps=2 * CHUNK):
    """Three phrases, each from frames of its own."""
    return [replace(s, anchor=anchor(i)) for i, s in enumerate(chained(steps))]


def same(film, other):
    return np.array_equal(film.frames, other.frames) and np.array_equal(film.states, other.states)


def anew(segments):
    return Director(MODEL, PlainStore()).make(segments)


@pytest.mark.parametrize(("which", "chunks"), [(0, 6), (1, 4), (2, 2)])
def test_a_changed_phrase_reaches_what_goes_on_from_it(which, chunks):
    """In a chain, the chunks of its segment and of those after it; the context is never touched."""
    director = Director(MODEL, PlainStore())
    board = chained()
    director.make(board)
    board[which] = replace(board[which], phrase="lift the lid")
    film = director.make(board)
    assert same(film, anew(board))
    assert film.report.computed["rolled"] == chunks
    assert film.report.computed["frames"] == chunks
    assert "tokens" not in film.report.computed


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_changed_phrase_with_an_anchor_reaches_its_segment_only(which):
    """Two of six chunks, whichever phrase it is."""
    director = Director(MODEL, PlainStore())
    board = anchored()
    director.make(board)
    board[which] = replace(board[which], phrase="lift the lid")
    film = director.make(board)
    assert same(film, anew(board))
    assert film.report.computed["rolled"] == 2
    assert film.report.reused["rolled"] >= 4


def test_a_changed_control_reaches_what_comes_after_it():
    """The chunk it belongs to and the later ones, not the earlier one."""
    director = Director(MODEL, PlainStore())
    board = chained()[:1]
    director.make(board)
    edited = board[0].controls.copy()
    edited[CHUNK + 1] += 0.25
    board[0] = replace(board[0], controls=edited)
    film = director.make(board)
    assert same(film, anew(board))
    assert film.report.computed["rolled"] == 1


def test_nothing_changed_nothing_computed():
    """Making the same film again only reads."""
    director = Director(MODEL, PlainStore())
    first = director.make(chained())
    again = director.make(chained())
    assert same(first, again)
    assert again.report.computed == {}
    assert again.report.seconds == 0


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), min_size=1, max_size=4))
def test_any_edits_through_tight_levels_give_the_film_of_making_it_anew(edits):
    """Also where most of what was kept has been evicted in between: what is lost is made again."""
    levels = open_levels(l1=8 * KIB, l2=16 * KIB)
    director = Director(MODEL, levels)
    board = chained(CHUNK)
    for which, phrase in edits:
        board[which] = replace(board[which], phrase=phrase)
        assert same(director.make(board), anew(board))


def test_two_tenants_share_nothing():
    """The same storyboard of another tenant is computed, and comes out the same."""
    store = PlainStore()
    mine = Director(MODEL, store, "a").make(chained())
    theirs = Director(MODEL, store, "b").make(chained())
    assert same(mine, theirs)
    assert theirs.report.computed == mine.report.computed


def repainted(exact):
    board = anchored()
    patch = np.full((6, 9, 3), 200, np.uint8)
    board[1] = replace(
        board[1], anchor=replace(board[1].anchor, repaint=Repaint(4, 11, patch, exact))
    )
    return board


def test_an_exact_repaint_is_an_edit_of_its_segment():
    """Everything of that segment is made anew, the others are found."""
    director = Director(MODEL, PlainStore())
    director.make(anchored())
    film = director.make(repainted(exact=True))
    assert film.exact
    assert same(film, anew(repainted(exact=True)))
    assert film.report.computed["rolled"] == 2
    assert film.report.computed["tokens"] == 1


def test_a_quick_repaint_moves_as_before_and_changes_the_box_alone():
    """No rollout at all; outside the box and its margin, every bit is that of before."""
    director = Director(MODEL, PlainStore())
    before = director.make(anchored())
    film = director.make(repainted(exact=False))
    assert not film.exact
    assert "rolled" not in film.report.computed
    assert film.report.computed["frames"] == 2
    assert np.array_equal(film.states, before.states)
    outside = np.ones(film.frames.shape[1:3], bool)
    outside[4 - MARGIN_PX : 10 + MARGIN_PX, 11 - MARGIN_PX : 20 + MARGIN_PX] = False
    assert np.array_equal(film.frames[:, outside], before.frames[:, outside])
    middle = slice(2 * CHUNK, 4 * CHUNK)
    box = (middle, slice(4, 10), slice(11, 20))
    drawn = anew(repainted(exact=True)).frames[box].astype(int)
    quick, untouched = (np.abs(f.frames[box].astype(int) - drawn).mean() for f in (film, before))
    assert quick < 0.4 * untouched


@pytest.mark.parametrize(
    ("board", "said"),
    [
        ([], "first one an anchor"),
        ([Segment("x", controls(3))], "first one an anchor"),
        ([Segment("x", np.zeros((3, 5), np.float32), anchor())], r"\(T, 2\), got \(3, 5\)"),
        ([Segment("x", controls(0), anchor())], "at least one control"),
        ([Segment("x", controls(3), Anchor(clip(3), controls(3)))], "need 2 controls"),
        ([Segment("x", controls(3), Anchor(clip(1, size=8), controls(0)))], "uint8 frames"),
        ([Segment("x", controls(3), anchor(), view="moon")], "moon"),
        (
            [
                Segment(
                    "x",
                    controls(3),
                    replace(anchor(), repaint=Repaint(30, 0, np.zeros((4, 4, 3), np.uint8))),
                )
            ],
            "inside 32 x 32",
        ),
    ],
)
def test_a_storyboard_that_cannot_be_made_is_refused(board, said):
    """The refusal says what came and what was expected."""
    with pytest.raises(InvalidInput, match=said):
        Director(MODEL, PlainStore()).make(board)
