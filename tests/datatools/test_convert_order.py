"""Shuffling on disk is uniform, and splits are exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
from converted import content

from kerasmem.data import convert

ROWS = 6000
SMALL = {"memory_budget": "512KiB"}  # some thirty buckets


@pytest.fixture
def numbered(tmp_path):
    x = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 128, axis=1)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(ROWS))
    return tmp_path / "d.npz"


def order(path):
    result = content(path)
    assert np.array_equal(result["x"][:, 5], result["y"].astype("f4"))  # rows stay together
    return result["y"]


def test_every_row_once_and_the_same_for_a_seed(numbered, tmp_path):
    convert(numbered, tmp_path / "a.h5", shuffle=True, **SMALL)
    first = order(tmp_path / "a.h5")
    assert sorted(first) == list(range(ROWS))
    convert(numbered, tmp_path / "b.h5", shuffle=True, compression="gzip", **SMALL)
    assert np.array_equal(order(tmp_path / "b.h5"), first)
    convert(numbered, tmp_path / "c.h5", shuffle=True, seed=1, **SMALL)
    assert not np.array_equal(order(tmp_path / "c.h5"), first)


def chi_squared(counts, expected):
    """Return the deviation of the statistic from its mean, in standard deviations."""
    freedom = counts.size - 1
    return (float((np.square(counts - expected) / expected).sum()) - freedom) / math.sqrt(2 * freedom)


def test_the_shuffle_is_uniform(numbered, tmp_path):
    """Over several seeds: source and target cells, distances of former neighbors, displacement, ascending pairs."""
    cells, where = 12, np.zeros((12, 12))
    distances, displaced, rising = [], [], []
    seeds = 6
    for seed in range(seeds):
        convert(numbered, tmp_path / "o.h5", shuffle=True, seed=seed, force=True, **SMALL)
        rows = order(tmp_path / "o.h5").astype(np.int64)
        np.add.at(where, (rows * cells // ROWS, np.arange(ROWS) * cells // ROWS), 1)
        place = np.empty(ROWS, np.int64)
        place[rows] = np.arange(ROWS)
        distances.append(np.abs(np.diff(place)).mean())
        displaced.append(np.abs(place - np.arange(ROWS)).mean())
        rising.append((np.diff(rows) > 0).mean())
    assert abs(chi_squared(where, ROWS * seeds / cells**2)) < 4
    # two places drawn at random lie a third of all rows apart; the deviation is that of 6 × 6000 draws
    for result in (distances, displaced):
        assert abs(np.mean(result) / (ROWS / 3) - 1) < 4 * 0.71 / math.sqrt(seeds * ROWS)
    assert abs(np.mean(rising) - 0.5) < 4 * 0.3 / math.sqrt(seeds * ROWS)


def test_split_draws_exact_shares_at_random(numbered, tmp_path):
    done = convert(numbered, tmp_path / "o.h5", split="0.8,0.15,0.05", **SMALL)
    names = [tmp_path / f"o-{name}.h5" for name in ("train", "val", "test")]
    parts = [order(name) for name in names]
    assert [len(part) for part in parts] == [4800, 900, 300] and list(done.outputs) == [str(name) for name in names]
    assert sorted(np.concatenate(parts)) == list(range(ROWS))
    # drawn from everywhere, not cut off at the end
    counts = np.bincount(parts[1].astype(int) * 10 // ROWS, minlength=10)
    assert abs(chi_squared(counts, 90)) < 4
