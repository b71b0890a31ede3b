"""Rows of a kilobyte and more that the kernel reads straight into the window."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.hdf5.io import handle as handles
from kerasmem.hdf5.io.handle import FileHandle
from kerasmem.hdf5.rows import delivery, jobs
from kerasmem.hdf5.rows.delivery import ScatterRead
from kerasmem.hdf5.rows.sources import Source


def test_short_and_interrupted_reads_are_continued(tmp_path, monkeypatch):
    path = tmp_path / "bytes"
    stored = np.random.default_rng(0).integers(0, 255, (3000, 64), np.uint8)
    path.write_bytes(b"before" + stored.tobytes())
    real, calls = handles._preadv, itertools.count()
    monkeypatch.setattr(delivery, "MOST_VIEWS", 50)

    def reluctant(number, vectors, count, offset):
        kind = next(calls) % 3
        if kind == 0:  # as if a signal interrupts it
            ctypes.set_errno(4)
            return -1
        return real(number, vectors, max(1, count // 2) if kind == 1 else count, offset)

    monkeypatch.setattr(handles, "_preadv", reluctant)
    rows = np.sort(np.random.default_rng(1).choice(3000, 2500, replace=False))
    target = np.zeros((2600, 64), np.uint8)
    slots = 50 + np.random.default_rng(2).permutation(2500)
    plan = ScatterRead(6 + rows * 64, slots, target, rows)
    handle = FileHandle(str(path), path.stat().st_size)
    for share in plan.shares():
        plan.read(handle, share)
    assert np.array_equal(target[slots], stored[rows])
    assert not target[:50].any() and not target[2550:].any()
    assert handle.bytes_read == 2500 * 64


@pytest.mark.parametrize("available", [True, False])
def test_rows_are_the_same_without_the_system_call(numbered, monkeypatch, available):
    shares, read = [], Source.read_scattered
    monkeypatch.setattr(Source, "read_scattered", lambda *arguments: (shares.append(arguments), read(*arguments))[1])
    monkeypatch.setattr(jobs, "CAN_SCATTER", available)
    stream = H5ChunkSequence(numbered(rows=200, chunks=8, width=300), batch_size=16, memory_budget="150KiB")
    rows = [(x[:, 0], y) for x, y in stream.next_epoch()]
    assert all(np.array_equal(x, y) for x, y in rows) and bool(shares) == available
