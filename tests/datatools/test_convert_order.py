"""Shuffling on disk is uniform, and splits are exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
from converted import content
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasmem.data import convert
from kerasmem.datatools.converting.planning import choose_chunk_rows, share_out
from kerasmem.datatools.converting.settings import read_split

ROWS = 6000
SMALL = {"memory_budget": "512KiB"}  # some thirty buckets


@pytest.fixture
def numbered(tmp_path):
    x = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 128, axis=1)
    np.savez(
        tmp_path / "d.npz", x=x, y=np.arange(ROWS), label=np.repeat(np.arange(6), ROWS // 6), who=np.arange(ROWS) % 37
    )
    return tmp_path / "d.npz"


def order(path):
    found = content(path)
    assert np.array_equal(found["x"][:, 5], found["y"].astype("f4"))  # rows stay together
    return found["y"]


def test_every_row_once_and_the_same_for_a_seed(numbered, tmp_path):
    convert(numbered, tmp_path / "a.h5", shuffle=True, **SMALL)
    first = order(tmp_path / "a.h5")
    assert sorted(first) == list(range(ROWS))
    convert(numbered, tmp_path / "b.h5", shuffle=True, compression="gzip", **SMALL)
    assert np.array_equal(order(tmp_path / "b.h5"), first)
    convert(numbered, tmp_path / "c.h5", shuffle=True, seed=1, **SMALL)
    assert not np.array_equal(order(tmp_path / "c.h5"), first)


def chi_squared(counts, expected):
    """How many standard deviations the statistic lies from its mean."""
    freedom = counts.size - 1
    return (float((np.square(counts - expected) / expected).sum()) - freedom) / math.sqrt(2 * freedom)


def test_the_shuffle_is_uniform(numbered, tmp_path):
    """From where to where rows go, distances to former neighbours, displacement, rising pairs, over several seeds."""
    cells, where = 12, np.zeros((12, 12))
    distances, displaced, rising = [], [], []
    seeds = 10
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
    # two places drawn at random lie a third of all rows apart; the deviation is that of 10 × 6000 draws
    for found in (distances, displaced):
        assert abs(np.mean(found) / (ROWS / 3) - 1) < 4 * 0.71 / math.sqrt(seeds * ROWS)
    assert abs(np.mean(rising) - 0.5) < 4 * 0.3 / math.sqrt(seeds * ROWS)


@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_are_exact(numbered, tmp_path, shuffle):
    done = convert(numbered, tmp_path / "o.h5", split="0.8,0.15,0.05", shuffle=shuffle, **SMALL)
    parts = [order(tmp_path / f"o-{name}.h5") for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [4800, 900, 300] == list(done.parts.values())
    assert sorted(np.concatenate(parts)) == list(range(ROWS))
    assert all((np.diff(part.astype(int)) > 0).all() for part in parts) is not shuffle
    # drawn from everywhere, not cut off at the end
    counts = np.bincount(parts[1].astype(int) * 10 // ROWS, minlength=10)
    assert abs(chi_squared(counts, 90)) < 4


# ---- arithmetic


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(1, 10**6), st.lists(st.integers(1, 1000), min_size=2, max_size=5))
def test_shares_add_up(rows, weights):
    shares = [weight / sum(weights) for weight in weights]
    parts = share_out(rows, shares)
    assert sum(parts) == rows
    assert all(abs(part - rows * share) < 1 for part, share in zip(parts, shares, strict=True))


def test_names_of_parts():
    assert list(read_split("0.5,0.25,0.25")) == ["train", "val", "test"]
    assert list(read_split("0.25,0.25,0.25,0.25")) == ["part1", "part2", "part3", "part4"]
    assert read_split({"a": 0.9, "b": 0.1}) == {"a": 0.9, "b": 0.1}


@pytest.mark.parametrize("batch", [1, 32, 97, 1000])
@pytest.mark.parametrize("row", [1, 8, 3000, 12_288, 602_112, 5_000_000])
def test_chunk_rows(row, batch):
    rows = choose_chunk_rows(row, 10**6, batch)
    assert rows * row <= 2**20 or rows == 1
    assert rows % batch == 0 or batch % rows == 0 or batch == 97
    assert rows * row > 2**18 or rows % batch == 0 or 2 * rows * row > 2**19 or batch == 1000 or row == 5_000_000
