"""Windows in memory: loading, delivery, dropping and reading again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import until

from kerasmem.hdf5.format.columns import Column
from kerasmem.streaming.order import Blocks, EpochOrder
from kerasmem.streaming.window import WindowRing

ROWS, BLOCK, WINDOW = 96, 4, 6  # rows, rows of a block, blocks of a window
COLUMNS = (Column("x", (2,), "<f4", "float32"), Column("y", (), "<i8", "int64"))


class Files:
    def break_off(self):
        pass


class FakeReader:
    """Fills windows with row numbers, one task per block and column, and records the requested windows.

    Tasks for rows from `held` on wait for `gate`.
    """

    def __init__(self, delay=0.0):
        self.files, self.windows, self.closed, self.checked = Files(), [], 0, 0
        self.delay, self.failure, self.failed_check = delay, None, None
        self.alone = []
        self.held, self.gate = ROWS, threading.Event()

    def tasks(self, order, window, arrays, *, in_file_order, ahead=True):
        self.windows.append((order.epoch, window))
        rows = order.rows(*order.window_bounds(window))
        if in_file_order:
            rows = np.sort(rows)

        def fill(start, stop, column):
            def task(scratch):
                time.sleep(self.delay)
                if start >= self.held:
                    assert self.gate.wait(20)
                if self.failure is not None:
                    raise self.failure
                some = slice(start, stop)
                arrays[column][some] = rows[some] if column else rows[some, None]
                return some

            return task

        blocks = [(start, min(start + BLOCK, len(rows))) for start in range(0, len(rows), BLOCK)]
        return [fill(start, stop, column) for start, stop in blocks for column in (0, 1)]

    def read(self, rows, grid):
        self.alone.append(rows.tolist())
        return [np.repeat(rows[:, None].astype("f4"), 2, axis=1), rows]

    def check(self, *rows):
        self.checked += 1
        if self.failed_check is not None:
            raise self.failed_check

    def close(self):
        self.closed += 1


def an_order(epoch=0, seed=1, window_blocks=WINDOW):
    return EpochOrder(Blocks(range(ROWS), BLOCK), window_blocks, seed, epoch)


def a_store(reader, count=2, rows=BLOCK * WINDOW, threads=3, batch_rows=8):
    memory = SimpleNamespace(windows=count, window_rows=rows, queued_batches=4, threads=threads)
    return WindowRing(reader, COLUMNS, memory, batch_rows)


def epoch(store, order, batch=8, own=True):
    return [store.batch(order, start, start + batch, own=own) for start in range(0, ROWS, batch)]


def test_the_next_window_is_read_while_one_is_delivered():
    reader, order = FakeReader(), an_order()
    store = a_store(reader)
    store.batch(order, 0, 8, own=True)
    until(lambda: reader.windows == [(0, 0), (0, 1)])
    store.close()


def test_a_batch_waits_only_for_its_own_rows():
    reader, order = FakeReader(), an_order()
    store, expected = a_store(reader), order.rows(0, ROWS)
    reader.held = 8
    first = store.batch(order, 0, 8, own=True)
    assert first[1].tolist() == expected[:8].tolist() and first[0][:, 1].tolist() == expected[:8].tolist()
    assert reader.checked == 1, "before rows are given away"
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: [store.batch(order, start, start + 8, own=True)[1] for start in range(8, ROWS, 8)])
        time.sleep(0.05)
        assert not rest.done()
        reader.gate.set()
        assert np.concatenate(rest.result(20)).tolist() == expected[8:].tolist()
    assert reader.windows == [(0, window) for window in range(order.windows)]
    store.close()


def test_owned_rows_are_read_directly():
    reader, order = FakeReader(), an_order()
    store, expected = a_store(reader), order.rows(0, ROWS)
    mine = store.batch(order, 0, 8, own=True)
    mine[1][:] = -1
    for own in (False, True):
        assert store.batch(order, 0, 8, own=own)[1].tolist() == expected[:8].tolist()
    assert reader.alone == [expected[:8].tolist()] * 2
    assert store.batch(order, 8, 16, own=False)[1].tolist() == expected[8:16].tolist(), "a copy"
    assert store.batch(order, 8, 16, own=True)[1].tolist() == expected[8:16].tolist()
    assert len(reader.alone) == 2 and reader.windows.count((0, 0)) == 1
    store.close()


def test_rows_that_two_readers_request_at_once_have_one_owner():
    reader, order, both = FakeReader(), an_order(), threading.Barrier(2)
    store = a_store(reader)
    deliver = store._deliver
    store._deliver = lambda *request: both.wait(20) is not None and deliver(*request)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: store.batch(order, 0, 8, own=True)[1], range(2))
    assert not np.shares_memory(first, second)
    assert first.tolist() == second.tolist() == order.rows(0, 8).tolist()
    store.close()


def test_a_single_window_stays_from_epoch_to_epoch():
    reader = FakeReader()
    store = a_store(reader, count=1, rows=ROWS)
    for number in range(3):
        order = an_order(number, window_blocks=ROWS)
        assert [row for _, y in epoch(store, order) for row in y.tolist()] == order.rows(0, ROWS).tolist()
    assert len(reader.windows) == 1
    store.close()


@pytest.mark.parametrize("failing", ["failure", "failed_check"])
def test_missing_or_changed_rows_are_not_delivered(failing):
    reader, order = FakeReader(), an_order()
    store = a_store(reader)
    reader.held = 8
    store.batch(order, 0, 8, own=True)
    setattr(reader, failing, OSError("gone"))
    reader.gate.set()
    while not store._windows[0].over:
        time.sleep(0.001)
    with pytest.raises(OSError, match="gone"):
        store.batch(order, 8, 16, own=True)
    setattr(reader, failing, None)
    assert store.batch(order, 8, 16, own=True)[1].tolist() == order.rows(8, 16).tolist()
    store.close()
