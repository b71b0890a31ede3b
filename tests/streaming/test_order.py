"""The order of rows: pure arithmetic, no Keras and no file."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from selections import selections

from kerasmem.streaming.order import Blocks, EpochOrder


def epoch_rows(order, batch):
    return np.concatenate([order.rows(at, min(at + batch, order.total)) for at in range(0, order.total, batch)])


sizes = st.integers(1, 40)
seeds = st.none() | st.integers(0, 99)


@given(selections(), sizes, sizes, sizes, seeds)
def test_every_row_comes_once_and_windows_in_turn(selection, size, window, batch, seed):
    order = EpochOrder(Blocks(selection, size), window, seed, epoch=3)
    rows = epoch_rows(order, batch)
    assert np.array_equal(rows if seed is None else np.sort(rows), np.asarray(selection))
    assert order.total == len(selection)
    stops = [*range(batch, order.total, batch), order.total]
    visited = [each.window for stop in stops for each in order.segments((stop - 1) // batch * batch, stop)]
    assert visited == sorted(visited)
    assert set(visited) == set(range(order.windows))


@given(selections(), sizes)
def test_blocks_tile_the_selection(selection, size):
    blocks = Blocks(selection, size)
    pieces = []
    for k in range(blocks.count):
        start, stop, picked = blocks.run(k)
        pieces.append(np.arange(start, stop) if picked is None else start + picked)
        assert start // size == (stop - 1) // size, "a block lies in one cell of the grid"
        assert blocks.sizes(np.array([k]))[0] == len(pieces[-1]) > 0
        assert np.array_equal(blocks.rows(np.array([k])), pieces[-1])
    assert np.array_equal(np.concatenate(pieces), np.asarray(selection))


def test_equal_seeds_give_equal_epochs_and_others_differ():
    def rows(seed, epoch):
        return epoch_rows(EpochOrder(Blocks(range(500), 10), 4, seed, epoch), 32).tolist()

    assert rows(1, 0) == rows(1, 0)
    orders = [rows(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6


def test_32_blocks_mix_a_file_sorted_by_ten_classes():
    rows = epoch_rows(EpochOrder(Blocks(range(64_000), 100), 32, seed=0, epoch=0), 32)
    uniform = np.random.default_rng(0).permutation(64_000)
    mixed, best = (entropy((order // 6400).reshape(-1, 32)) for order in (rows, uniform))
    assert mixed > 0.99 * best


def entropy(batches):
    shares = np.stack([(batches == label).mean(axis=1) for label in range(10)])
    return -(shares * np.log2(np.maximum(shares, 1e-9))).sum(axis=0).mean()


def test_a_single_window_is_shuffled_uniformly():
    first = [EpochOrder(Blocks(range(4), 2), 2, seed, 0).rows(0, 1)[0] for seed in range(400)]
    counts = np.bincount(first, minlength=4)
    assert counts.min() > 70, counts


def test_the_order_needs_memory_per_block_not_per_row():
    order = EpochOrder(Blocks(range(10**9), 10**5), 100, seed=0, epoch=0)
    held = sum(value.nbytes for value in vars(order).values() if isinstance(value, np.ndarray))
    assert held < 200_000
    assert len(order.segments(5 * 10**8, 5 * 10**8 + 64)) <= 2
