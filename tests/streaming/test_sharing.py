"""Copies, forks and threads: state of one process is not shared, and every batch is right."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from streams import shared_model
from waiting import until

from kerasmem import H5ChunkSequence, H5DataSource
from kerasmem.errors import DataError, UsageError
from kerasmem.streaming.order import Position
from kerasmem.streaming.workers import BatchesAhead


def open_files():
    return {os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")}


def wait_for_threads(most):
    until(lambda: threading.active_count() <= most)


def targets(stream, epoch=0):
    return [stream.batch(i, epoch)[1].tolist() for i in range(len(stream))]


def test_leaving_a_with_block_closes_files_and_frees_memory(numbered):
    path = str(numbered(rows=200))
    before = threading.active_count()
    with H5ChunkSequence(path, workers=3) as stream:
        assert path not in open_files(), "opened when it is read"
        stream.on_epoch_begin()
        stream[0]
        assert path in open_files()
        live = stream.open_stream()
        assert live.windows.nbytes
    assert path not in open_files()
    assert live.windows.nbytes == 0
    wait_for_threads(before)
    with pytest.raises(UsageError, match="closed"):
        live.ahead.get("one", Position(0, 1))


def rows_for_ever(path):
    source = H5DataSource(path)
    return source, ([source[row] for row in range(0, len(source), 40)] for _ in itertools.count())


def batches(path, **settings):
    stream = H5ChunkSequence(path, batch_size=4, memory_budget="20kB", **settings)
    return stream, (batch for _ in itertools.count() for batch in stream)


@pytest.mark.parametrize(
    "make", [batches, functools.partial(batches, workers=3), rows_for_ever], ids=["stream", "workers", "source"]
)
def test_closing_ends_a_reader_and_leaves_nothing_open(numbered, make):
    path, before, errors = str(numbered(rows=2000)), threading.active_count(), []

    def read(batches, begun):
        try:
            for _ in batches:
                begun.set()
        except Exception as error:
            errors.append(error)

    for number in range(20):
        (data, items), begun = make(path), threading.Event()
        reader = threading.Thread(target=read, args=(items, begun))
        reader.start()
        assert begun.wait(20)
        time.sleep(number * 1e-4)
        while reader.is_alive():
            data.close()  # a source opens its file again for the next row
        assert path not in open_files()
    assert len(errors) == 20 and {type(error) for error in errors} == {UsageError}
    wait_for_threads(before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_copies(numbered, duplicate):
    stream = H5ChunkSequence(numbered(rows=200), batch_size=9, workers=3, memory_budget="20kB")
    stream.set_epoch(4)
    stream.on_epoch_begin()
    [stream[i] for i in (3, 1)]
    twin = duplicate(stream)
    assert len(pickle.dumps(stream)) < 10_000, "no buffers travel"
    assert twin.epoch == 4
    assert targets(twin, 4) == targets(stream, 4)
    assert twin[5][1].tolist() == targets(stream, 4)[5]


def send_targets(stream, pipe):
    pipe.send((stream.epoch, targets(stream, stream.epoch)))
    pipe.close()


def targets_of_child(stream):
    """Return the epoch and the targets that another process reads."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=send_targets, args=(stream, there))
    child.start()
    try:
        assert here.poll(60), "the child hangs"
        return here.recv()
    finally:
        child.join(10)
        child.kill()


def test_forked_processes_read_for_themselves(numbered):
    stream = H5ChunkSequence(numbered(rows=300), batch_size=7, memory_budget="8kB", workers=2)
    stream.set_epoch(2)
    stream.on_epoch_begin()
    expected = targets(stream, 2)
    [stream[i] for i in range(20)]  # threads, windows and file are all in use
    for _ in range(3):
        assert targets_of_child(stream) == (2, expected)
    assert targets(stream, 2) == expected


def test_fork_while_threads_read(numbered):
    stream = H5ChunkSequence(numbered(rows=500), batch_size=5, memory_budget="3kB")
    expected = targets(stream)
    stop = threading.Event()

    def read():
        while not stop.is_set():
            targets(stream)

    threads = [threading.Thread(target=read) for _ in range(2)]
    [thread.start() for thread in threads]
    try:
        for _ in range(5):
            assert targets_of_child(stream) == (0, expected)
    finally:
        stop.set()
        [thread.join() for thread in threads]


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_hammering(numbered, workers):
    stream = H5ChunkSequence(numbered(rows=600), batch_size=7, memory_budget="5kB", workers=workers)
    assert stream.stream_plan.memory.windows == 2
    expected = targets(stream)
    indices = np.random.default_rng(0).permutation(np.repeat(np.arange(len(stream)), 6))
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda i: (int(i), stream[int(i)]), indices, timeout=60)
        for index, (x, y) in results:
            assert y.tolist() == expected[index]
            assert np.array_equal(x[:, 0], y)
    stream.on_epoch_begin()
    with ThreadPoolExecutor(8) as pool:  # within a pass: each place exactly once, whoever asks
        asked = pool.map(lambda i: stream[i][1].tolist(), range(len(stream)), timeout=60)
        assert sorted(row for batch in asked for row in batch) == list(range(600))
    stream.close()


def test_batches_ahead_are_gathered_in_order():
    gathered = []
    random = np.random.default_rng(0)

    def gather(position):
        time.sleep(random.random() * 0.002)
        gathered.append(position.batch)
        return (position.batch,)

    ahead = BatchesAhead(gather, lambda position, batch: batch, workers=4, depth=6, batches=60)
    assert [ahead.get("one", Position(0, place))[0] for place in range(60)] == list(range(60))
    assert gathered == list(range(60))
    assert ahead.get("one", Position(0, 30)) == (30,), "an earlier one is made again"
    assert ahead.get("two", Position(1, 0)) == (0,)
    ahead.close()


def test_delivered_batches_are_never_overwritten(numbered):
    """Batches are views of windows. Their memory is reused only once no array refers to it."""
    stream = H5ChunkSequence(numbered(rows=2000, width=40), batch_size=16, memory_budget="60kB")
    assert stream.stream_plan.memory.windows == 2
    kept = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        kept += [(x, y.copy()) for x, y in stream]
    assert all(np.array_equal(x[:, 0], y) for x, y in kept)
    kept.clear()
    stream.set_epoch(4)
    for _ in stream:
        pass
    memory = stream.stream_plan.memory
    assert stream.open_stream().windows.nbytes <= memory.windows * memory.window_bytes, "and then it is"
    stream.close()


def raise_once(x, y):
    if y[0] == 1200:
        raise ValueError("odd")
    return x, y


def leave_a_loop(stream):
    next(iter(stream))


def raise_in_a_loop(stream):
    with pytest.raises(KeyError):
        for _ in stream:
            raise KeyError


def raise_in_a_transform(stream):
    with pytest.raises(DataError, match="odd"):
        list(stream)


def fit_in_a_thread_and_close(stream):
    def train():
        try:
            shared_model().fit(stream, epochs=3, verbose=0)
        except Exception as error:
            errors.append(str(error))

    errors = []
    trainer = threading.Thread(target=train)
    trainer.start()
    while trainer.is_alive():
        stream.close()
        time.sleep(0.002)
    assert len(errors) == 1 and ("was closed" in errors[0] or "odd" in errors[0])
    stream.close()


def test_rounds_of_collection_exceptions_and_fit_leave_nothing_open(numbered):
    path, before = str(numbered(rows=2000)), threading.active_count()
    ends = [leave_a_loop, raise_in_a_loop, raise_in_a_transform, fit_in_a_thread_and_close]
    for end, workers in itertools.product(ends, [1, 3]):
        for _ in range(3):
            end(H5ChunkSequence(path, batch_size=4, shuffle=False, memory_budget="20kB", workers=workers,
                                transform=raise_once))  # fmt: skip
        deadline = time.monotonic() + 20
        while path in open_files() and time.monotonic() < deadline:
            gc.collect()
        assert path not in open_files(), end
    wait_for_threads(before + 2)  # TensorFlow keeps some
