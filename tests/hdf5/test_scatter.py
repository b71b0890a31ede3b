"""Rows of a kilobyte and more that need no change, which the kernel puts where they are delivered."""

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

WIDTH = 300  # values: 1,200 bytes a row


@pytest.fixture(autouse=True)
def scattered_reads(monkeypatch):
    """Count the shares that are read this way; every test but those that say otherwise has some."""
    shares = []
    read = Source.read_scattered
    monkeypatch.setattr(Source, "read_scattered", lambda *given: (shares.append(given), read(*given))[1])
    return shares


@pytest.mark.parametrize("in_order", [False, True])
def test_rows_go_to_their_places(tmp_path, in_order):
    path = tmp_path / "bytes"
    stored = np.random.default_rng(0).integers(0, 255, (3000, 64), np.uint8)
    path.write_bytes(b"before" + stored.tobytes())
    rows = np.sort(np.random.default_rng(1).choice(3000, 2500, replace=False))
    target = np.zeros((2600, 64), np.uint8)
    places = slice(50, 2550) if in_order else 50 + np.random.default_rng(2).permutation(2500)
    plan = ScatterRead(6 + rows * 64, places, target, rows)
    handle = FileHandle(str(path), path.stat().st_size)
    for share in plan.shares():
        plan.read(handle, share)
    assert np.array_equal(target[places], stored[rows])
    assert not target[:50].any() and not target[2550:].any()
    assert handle.bytes_read == 2500 * 64


def test_reads_that_bring_less_than_asked_go_on(tmp_path, monkeypatch):
    path = tmp_path / "bytes"
    stored = np.random.default_rng(0).integers(0, 255, (500, 100), np.uint8)
    path.write_bytes(stored.tobytes())
    real, calls = handles._preadv, itertools.count()
    monkeypatch.setattr(delivery, "MOST_VIEWS", 50)

    def reluctant(number, vectors, count, offset):
        kind = next(calls) % 3
        if kind == 0:  # as where a signal comes first
            ctypes.set_errno(4)
            return -1
        return real(number, vectors, max(1, count // 2) if kind == 1 else count, offset)

    monkeypatch.setattr(handles, "_preadv", reluctant)
    target = np.zeros((500, 100), np.uint8)
    places = np.random.default_rng(2).permutation(500)
    plan = ScatterRead(np.arange(500) * 100, places, target, np.arange(500))
    handle = FileHandle(str(path), path.stat().st_size)
    for share in plan.shares():
        plan.read(handle, share)
    assert np.array_equal(target[places], stored)


def test_rows_that_change_on_their_way_or_are_small_are_not(numbered, scattered_reads):
    for changes, width in (({"scale": 0.5}, WIDTH), ({"dtype": "float64"}, WIDTH), ({}, 3)):
        path = numbered(rows=100, chunks=8, width=width, name=f"{width}{list(changes)}.h5")
        stream = H5ChunkSequence(path, batch_size=16, **changes)
        assert sum(len(y) for _, y in stream.next_epoch()) == 100
    assert not scattered_reads


def test_without_the_systems_call_rows_are_read_all_the_same(numbered, scattered_reads, monkeypatch):
    monkeypatch.setattr(jobs, "CAN_SCATTER", False)
    stream = H5ChunkSequence(numbered(rows=200, chunks=8, width=WIDTH), batch_size=16, memory_budget="150KiB")
    rows = [(x[:, 0], y) for x, y in stream.next_epoch()]
    assert all(np.array_equal(x, y) for x, y in rows) and not scattered_reads
