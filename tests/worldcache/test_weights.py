"""The weight matrix: block x region, from complexity, importance and how features change."""

from __future__ import annotations

import numpy as np
import pytest

from worldcache.analyze import Analysis
from worldcache.weights import WeightMatrix, WeightSettings, activity, colours, settled


def analysis(chunks=2, rows=3, columns=4):
    draw = np.random.default_rng(0)
    shape = (chunks, rows, columns)
    return Analysis(
        motion=draw.uniform(0, 0.02, shape).astype("f4"),
        texture=draw.uniform(0, 40, shape).astype("f4"),
        semantics=draw.uniform(0, 1, shape).astype("f4"),
        dependency=np.ones(shape, "f4"),
        first=np.arange(chunks),
    )


def test_weights_are_shares_and_survive_a_file(tmp_path):
    change = np.random.default_rng(1).uniform(0, 3, (2, 3, 4)).astype("f4")
    matrix = WeightMatrix.build(
        analysis(), change, ("first", "second"), WeightSettings(0.8, 1, 0.4)
    )
    assert matrix.values.shape == (2, 3, 4)
    assert 0 <= matrix.values.min() <= matrix.values.max() <= 1
    matrix.save(tmp_path / "weights.npz")
    back = WeightMatrix.load(tmp_path / "weights.npz")
    assert np.array_equal(back.values, matrix.values)
    assert (back.blocks, back.settings) == (matrix.blocks, matrix.settings)
    with pytest.raises(ValueError, match="change must be"):
        WeightMatrix.build(analysis(), change, ("one",))


def test_more_of_anything_is_more_weight():
    """Where a region moves more, matters more, or a block changes more, its weight is larger."""
    change = np.ones((1, 3, 4), "f4")
    change[0, 0, 0] = 2
    base = WeightMatrix.build(analysis(1), change, ("b",)).values[0]
    for name, larger in (("motion", 0.5), ("texture", 200), ("semantics", 1.0)):
        more = analysis(1)
        getattr(more, name)[0, 1, 1] = larger
        assert WeightMatrix.build(more, change, ("b",)).values[0, 1, 1] > base[1, 1]
    change[0, 1, 1] = 2
    assert WeightMatrix.build(analysis(1), change, ("b",)).values[0, 1, 1] > base[1, 1]


def test_the_settings_do_what_they_say():
    """Semantics alone; a window that carries importance on; sensitivity that counts it."""
    made = analysis(3)
    assert np.allclose(made.importance(1.0), made.semantics)
    assert np.allclose(made.importance(0.0), made.complexity)
    peaks = np.zeros((4, 1, 1), "f4")
    peaks[1] = 1
    assert settled(peaks, 2)[:, 0, 0].tolist() == [0, 1, 1, 0]
    assert settled(peaks, 9)[:, 0, 0].tolist() == [0, 1, 1, 1]
    change = np.array([[[4.0, 0.0]], [[0.0, 4.0]]])
    regions = np.array([[1.0, 0.0]])
    plain, calm = activity(change, regions, 0.0)
    assert plain == calm == pytest.approx(8**0.5)
    important, unimportant = activity(change, regions, 0.7)
    assert important > plain > unimportant > 0


@pytest.mark.parametrize("wrong", [{"sensitivity": 1.1}, {"semantics": -0.1}, {"window": 0}])
def test_impossible_settings_are_refused(wrong):
    [name] = wrong
    with pytest.raises(ValueError, match=name):
        WeightSettings(**wrong)


def test_the_picture_shows_every_block():
    matrix = WeightMatrix(np.zeros((2, 3, 4), "f4"), ("a", "b"), WeightSettings())
    matrix.values[1] = 1
    pixels = np.asarray(matrix.picture())
    dark, bright = colours(np.array([0.0, 1.0]))
    for colour in (dark, bright):
        assert (pixels == colour).all(-1).sum() > 500
