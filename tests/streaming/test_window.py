"""The concurrent core by itself: the filling of a window, the windows in memory, the tasks of a reader."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from kerasmem.hdf5.format.columns import Column
from kerasmem.streaming.order import Blocks, EpochOrder
from kerasmem.streaming.window import Filling, WindowStore

ROWS, BLOCK, WINDOW = 96, 4, 6  # rows, rows of a block, blocks of a window
COLUMNS = (Column("x", (2,), "<f4", "float32"), Column("y", (), "<i8", "int64"))


class Files:
    def break_off(self):
        pass


class FakeReader:
    """Fills windows with the numbers of their rows, a task a block and column; notes which windows it was asked for.

    Tasks for rows from `held` on wait for `gate`.
    """

    def __init__(self, delay=0.0):
        self.files, self.windows, self.closed, self.checked = Files(), [], 0, 0
        self.delay, self.failure, self.failed_check = delay, None, None
        self.checked_at_once = True
        self.held, self.gate = ROWS, threading.Event()

    def tasks(self, order, window, arrays, *, in_file_order, ahead=True):
        self.windows.append((order.epoch, window))
        rows = order.rows(*window_bounds(order, window))
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

    def check(self):
        self.checked += 1
        if self.failed_check is not None:
            raise self.failed_check

    def close(self):
        self.closed += 1


def window_bounds(order, window):
    start = sum(order.window_rows(before) for before in range(window))
    return start, start + order.window_rows(window)


def an_order(epoch=0, seed=1, window_blocks=WINDOW):
    return EpochOrder(Blocks(range(ROWS), BLOCK), window_blocks, seed, epoch)


def a_store(reader, count=2, rows=BLOCK * WINDOW, threads=3, batch_rows=8):
    memory = SimpleNamespace(windows=count, window_rows=rows, queued_batches=4, threads=threads)
    return WindowStore(reader, COLUMNS, memory, batch_rows)


def epoch(store, order, batch=8, own=True):
    return [store.batch(order, start, start + batch, own=own) for start in range(0, ROWS, batch)]


# ---- filling


def fill(tasks, threads=3, reader=None):
    changed = threading.Condition()
    pool = ThreadPoolExecutor(threads)
    filling = Filling(pool, threads, reader or FakeReader(), tasks if callable(tasks) else lambda: tasks, changed)
    with changed:
        assert changed.wait_for(lambda: filling.over, timeout=20)
    pool.shutdown()
    return filling


def test_the_first_error_ends_the_filling():
    done = []

    def fails(scratch):
        raise ValueError("one")

    filling = fill([fails, *[lambda scratch: done.append(1)] * 50], threads=1)
    assert str(filling.error) == "one"
    assert filling.stopped
    assert not done


def test_a_file_that_changed_explains_what_went_wrong():
    reader = FakeReader()
    reader.failed_check = ValueError("replaced")
    assert str(fill([], reader=reader).error) == "replaced"
    assert reader.checked == 1, "once, when all is read"


def test_a_stopped_filling_begins_no_further_task():
    done, changed, begun = [], threading.Condition(), threading.Event()
    pool = ThreadPoolExecutor(1)
    pool.submit(begun.wait, 20)
    filling = Filling(pool, 1, FakeReader(), lambda: [lambda scratch: done.append(1)], changed)
    filling.stop()
    begun.set()
    with changed:
        assert changed.wait_for(lambda: filling.over, timeout=20)
    pool.shutdown()
    assert not done


# ---- windows


def test_the_next_window_is_read_while_one_is_delivered():
    reader, order = FakeReader(), an_order()
    store = a_store(reader)
    store.batch(order, 0, 8, own=True)
    deadline = time.monotonic() + 20
    while len(reader.windows) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reader.windows == [(0, 0), (0, 1)]
    store.close()


def test_a_batch_waits_for_its_own_rows_alone():
    reader, order = FakeReader(), an_order()
    store, wanted = a_store(reader), order.rows(0, ROWS)
    reader.held = 8
    first = store.batch(order, 0, 8, own=True)
    assert first[1].tolist() == wanted[:8].tolist() and first[0][:, 1].tolist() == wanted[:8].tolist()
    assert reader.checked == 1, "before rows are given away"
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: [store.batch(order, start, start + 8, own=True)[1] for start in range(8, ROWS, 8)])
        time.sleep(0.05)
        assert not rest.done()
        reader.gate.set()
        assert np.concatenate(rest.result(20)).tolist() == wanted[8:].tolist()
    assert reader.windows == [(0, window) for window in range(order.windows)]
    store.close()


def test_rows_that_were_given_away_are_read_again():
    reader, order = FakeReader(), an_order()
    store = a_store(reader)
    mine = store.batch(order, 0, 8, own=True)
    mine[1][:] = -1
    assert store.batch(order, 0, 8, own=False)[1].tolist() == order.rows(0, 8).tolist()
    assert reader.windows.count((0, 0)) == 2
    store.close()


def test_a_single_window_stays_from_epoch_to_epoch():
    reader = FakeReader()
    store = a_store(reader, count=1, rows=ROWS)
    for number in range(3):
        order = an_order(number, window_blocks=ROWS)
        assert [row for _, y in epoch(store, order) for row in y.tolist()] == order.rows(0, ROWS).tolist()
    assert len(reader.windows) == 1
    store.close()


def test_rows_that_an_error_left_out_are_not_given_away():
    reader, order = FakeReader(), an_order()
    store = a_store(reader)
    reader.held = 8
    store.batch(order, 0, 8, own=True)
    reader.failure = OSError("gone")
    reader.gate.set()
    while not store._delivered.slot.filling.over:
        time.sleep(0.001)
    with pytest.raises(OSError, match="gone"):
        store.batch(order, 8, 16, own=True)
    reader.failure = None
    assert store.batch(order, 8, 16, own=True)[1].tolist() == order.rows(8, 16).tolist()
    store.close()
