"""HDF5 files with chunks that their filters did not write."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
from cases import Case
from hdf5_targets import COMMANDS, Hdf5Target
from mutation import mutate

GZIP, SHUFFLE, FLETCHER, SZIP, NBIT, OFFSET, LZF = 1, 2, 3, 4, 5, 6, 32000
BLOSC, LZ4, BITSHUFFLE, ZFP, ZSTD, BLOSC2, BZIP2 = 32001, 32004, 32008, 32013, 32015, 32026, 307
Filters = Sequence[tuple[int, tuple[int, ...]]]

PIPELINES: tuple[Filters, ...] = (
    ((GZIP, (4,)),), ((SHUFFLE, ()), (GZIP, (1,))), ((SHUFFLE, ()), (GZIP, (6,)), (FLETCHER, ())), ((FLETCHER, ()),),
    ((LZF, ()),), ((SHUFFLE, ()), (LZF, ())), ((OFFSET, (2, 3)),), ((NBIT, ()),), ((SHUFFLE, ()),),
    ((BLOSC, (0, 0, 0, 0, 5, 1, 0)),), ((BLOSC, (0, 0, 0, 0, 5, 2, 1)),), ((BLOSC, (0, 0, 0, 0, 5, 0, 5)),),
    ((BLOSC, (0, 0, 0, 0, 0, 1, 4)),), ((BLOSC2, (0, 0, 0, 0, 5, 1, 0)),), ((BLOSC2, (0, 0, 0, 0, 5, 2, 5)),),
    ((LZ4, ()),), ((LZ4, (512,)),), ((BITSHUFFLE, (0, 2)),), ((BITSHUFFLE, (0, 0)),), ((BITSHUFFLE, (64, 3)),),
    ((ZSTD, (3,)),), ((SHUFFLE, ()), (ZSTD, (1,)), (FLETCHER, ())), ((ZFP, ()),), ((BZIP2, (9,)),),
)  # fmt: skip
"""Filters by code and numbers, in the order in which they are applied."""

ODD_NUMBERS = ((), (0,), (1,), (2**32 - 1,), (0, 0, 0), (0, 0, 2**31), (1, 4, 1, 1 << 20, 5, 0, 0), (0, 0, 1, 0, 2),
               (2, 2, 8, 64, 9, 2, 9), (0, 0, 3, 0, 2), (0,) * 20)  # fmt: skip


class CodecTarget(Hdf5Target):
    """Changed chunks of each codec, with other masks and parameters."""

    name = "codecs"

    def make_seeds(self) -> dict[str, bytes]:
        """Compress sound chunks with each pipeline. Every case gets a new file."""
        values = np.concatenate([np.arange(600) % 41, np.arange(424) * 7919 % 65521])
        self.chunks: dict[str, tuple[Filters, str, bytes, int]] = {}
        for number, filters in enumerate(PIPELINES):
            for kind in ("u1", "<f4", "<i8"):
                try:
                    stored, mask = _stored(filters, values.astype(kind))
                except (OSError, ValueError):
                    continue
                self.chunks[f"{number} {kind}"] = (filters, kind, stored, mask)
        return {}

    def make(self, draw: random.Random) -> Case:
        """Return a file with one changed chunk, or with changed filter parameters."""
        seed = draw.choice(list(self.chunks))
        filters, kind, stored, mask = self.chunks[seed]
        chunk = mutate(stored, draw, [(0, 48)] if draw.random() < 0.6 else []) if draw.random() < 0.9 else stored
        chunk = draw.choice((b"", chunk[:3], chunk * 2, bytes(len(chunk)))) if draw.random() < 0.05 else chunk
        if draw.random() < 0.1:
            mask = draw.choice((0, 1, 2, 3, 7, 0xFFFFFFFF))
        numbers: Filters | None = None
        if draw.random() < 0.15:
            numbers = [(code, draw.choice(ODD_NUMBERS) if draw.random() < 0.7 else given) for code, given in filters]
        rows = draw.choice((1024, 1024, 1900, 2048))
        try:
            data = _file(numbers or filters, kind, chunk, mask, rows)
        except (OSError, ValueError, RuntimeError):
            data = _file(filters, kind, chunk or b"\0", mask, rows)
        command = (("data", *draw.choice(COMMANDS)),) if draw.random() < 0.2 else ()
        return Case({"x.h5": data}, command, {}, f"{filters} {kind}", {"twice": True, "odd": numbers is not None})


def _creation(filters: Filters, rows: int) -> Any:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((rows,))
    for code, numbers in filters:
        creation.set_filter(code, h5py.h5z.FLAG_OPTIONAL, numbers)
    return creation


def _stored(filters: Filters, values: np.ndarray) -> tuple[bytes, int]:
    with h5py.File(io.BytesIO(), "w") as file:
        space = h5py.h5s.create_simple(values.shape)
        creation = _creation(filters, len(values))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.py_create(values.dtype), space, creation)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        file.flush()
        mask, stored = dataset.read_direct_chunk((0,))
        return bytes(stored), int(mask)


def _file(filters: Filters, kind: str, chunk: bytes, mask: int, rows: int) -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w", libver="latest" if rows == 1900 else None) as file:
        space = h5py.h5s.create_simple((rows,))
        creation = _creation(filters, 1024)
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.py_create(np.dtype(kind)), space, creation)
        for start in range(0, rows, 1024):
            dataset.write_direct_chunk((start,), chunk, mask)
        file["y"] = np.arange(rows) % 3
    return memory.getvalue()
