"""Errors while reading name the file and its rows; reading never hangs and never returns zeros."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from streams import shared_model, slow_double
from waiting import until

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError


def corrupt_chunk(path, name, row):
    """Overwrite the stored bytes of the chunk that holds a row."""
    with h5py.File(path) as file:
        chunk = file[name].id.get_chunk_info_by_coord((row,) + (0,) * (file[name].ndim - 1))
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(os.urandom(chunk.size))


@pytest.mark.parametrize(("options", "workers"), [({"compression": "gzip"}, 1), ({"fletcher32": True}, 3)])
def test_a_corrupt_chunk_is_named_when_its_rows_are_due(write, options, workers):
    x = np.random.default_rng(0).random((400, 50), "f4")
    path = write(x=x, y=np.arange(400), chunks=10, options={"x": options})
    corrupt_chunk(path, "x", 200)
    stream = H5ChunkSequence(path, batch_size=20, shuffle=False, memory_budget="60kB", workers=workers)
    good = 0
    with pytest.raises(DataError, match=r"rows 200 to 210 of dataset 'x' cannot be read") as caught:
        for _ in stream:
            good += 1
    assert good >= 5, "the rows before are delivered"
    assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="200"):  # and it stays an error
        stream.batch(10)
    with pytest.raises(Exception, match=r"rows 200 to 210 of dataset 'x' cannot be read"):
        shared_model(50).fit(stream, epochs=2, verbose=0)
    stream.close()
    rest = np.r_[0:200, 210:400]
    assert sum(len(y) for _, y in H5ChunkSequence(path, rows=rest)) == 390, "and the rows after, left out"


@pytest.mark.parametrize("workers", [1, 3])
def test_errors_that_were_caught_keep_no_windows_in_memory(write, workers):
    path = write(x=np.ones((200, 50), "f4"), y=np.arange(200), chunks=10, options={"x": {"compression": "gzip"}})
    corrupt_chunk(path, "x", 0)
    stream = H5ChunkSequence(path, batch_size=20, shuffle=False, memory_budget="40kB", workers=workers)
    windows, memory = stream.open_stream().windows, stream.stream_plan.memory
    gc.disable()
    try:
        for _ in range(8):
            with pytest.raises(DataError, match="cannot be read"):
                list(stream)
        until(lambda: windows.nbytes <= memory.windows * memory.window_bytes)
    finally:
        gc.enable()
    stream.close()


@pytest.mark.parametrize("chunks", [None, 50])
def test_a_file_cut_while_in_use(write, chunks):
    path = write(x=np.ones((20_000, 50), "f4"), y=np.arange(20_000), chunks=chunks)
    stream = H5ChunkSequence(path, batch_size=100, shuffle=False, memory_budget="1MB")
    assert stream[0][0].min() == 1
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(DataError, match="file was cut while in use"):
        for x, _ in stream:
            assert x.min() == 1, "no silent zeros"
    with pytest.raises(Exception, match="cut while in use"):
        shared_model(50).fit(stream, verbose=0)


def test_a_changed_or_removed_file_is_named(numbered, write):
    path = numbered(rows=100)
    stream = H5ChunkSequence(path)
    numbered(rows=150)
    with pytest.raises(DataError, match=r"'x' has changed .* was \(100, 3\) <f4 and is \(150, 3\)"):
        stream[0]
    os.unlink(path)
    with pytest.raises(DataError, match="the file does not exist"):
        stream[0]
    numbered(rows=100)
    assert len(stream[0][1]) == 32, "and it recovers with the file"


def test_overflow_warns_and_a_scale_prevents_it(write):
    path = write(x=np.full((4, 1), 1e300), y=np.zeros(4))
    with pytest.warns(RuntimeWarning, match="overflow"):
        H5ChunkSequence(path)[0]
    assert H5ChunkSequence(path, scale=1e-300, dtype="float16")[0][0].max() == 1


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_a_new_modification_time_is_a_warning(write, options):
    x = np.random.default_rng(0).random((4000, 50), "f4")
    path = write(x=x, y=np.arange(4000), chunks=50, options={"x": options})
    with H5ChunkSequence(path, batch_size=100, memory_budget="200kB", workers=2) as stream:
        batches = stream.next_epoch()
        seen = [next(batches)]
        with pytest.warns(UserWarning, match=r"data.h5'?: the modification time changed"):
            os.utime(path)  # here, since a thread that reads ahead may be the first to see it
            seen += list(batches)
        assert sorted(row for _, y in seen for row in y.tolist()) == list(range(4000))
        assert all(np.array_equal(features, x[y]) for features, y in seen)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert sum(len(y) for _, y in stream.next_epoch()) == 4000, "said once"
        os.utime(path, ns=(1, 1))
        shared_model(50).fit(stream, verbose=0)


# ---- Ctrl-C

PROCESSES = {"workers": 2, "use_multiprocessing": True}


def test_all_worker_processes_start_with_the_first_batch(numbered):
    """A pool that starts one on demand while Python exits never ends."""
    before = set(multiprocessing.active_children())
    with H5ChunkSequence(numbered(rows=40), transform=slow_double, **PROCESSES) as stream:
        assert len(stream[0][1]) == 32
        assert len(set(multiprocessing.active_children()) - before) == 2


@pytest.mark.parametrize(("settings", "handled"), [({"workers": 3}, "yes"), (PROCESSES, "no")])
def test_ctrl_c_ends_training_at_once(numbered, settings, handled):
    here = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, str(here / "interrupted.py"), str(numbered(rows=400)), json.dumps(settings), handled],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{here.parent.parent}{os.pathsep}{here.parent / 'support'}"},
    )
    try:
        assert child.stdout.readline() == "training\n", child.communicate(timeout=5)[1][-2000:]
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to the workers as well
        pressed = time.monotonic()
        output, errors = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert time.monotonic() - pressed < 20
    if handled == "yes":
        assert child.returncode == 0, errors[-2000:]
        assert json.loads(output) == {"rows": 400, "threads": [], "processes": 0}
    else:
        assert child.returncode in (-signal.SIGINT, 1, 130), errors[-2000:]
        assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):  # nobody of its session is left, once the fork server has noticed
        for _ in range(500):
            os.killpg(child.pid, 0)
            time.sleep(0.01)
