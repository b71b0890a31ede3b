"""Which way the rows of a dataset are best read, found out once from how it is stored."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.hdf5.direct.chunks import MOST_CHUNKS, ChunkIndex
from kerasmem.hdf5.direct.codecs import EXTRA, DecodeError, Pipeline, register_filters
from kerasmem.hdf5.direct.delivery import PIECE_BYTES
from kerasmem.hdf5.direct.handle import Handle
from kerasmem.hdf5.direct.sources import ChunkedSource, ContiguousSource, Hdf5Source, Refuse, Source
from kerasmem.hdf5.layout import DatasetLayout

_PROBED = 4096  # bytes compared where a user block makes places in the file doubtful


def open_source(
    file: h5py.File,
    find: Callable[[], h5py.Dataset],
    layout: DatasetLayout,
    handle: Handle,
    *,
    allow_missing: bool,
    refuse: Refuse,
) -> Source:
    """Return the fastest way to read a dataset that is known to be right.

    Args:
        file: the file, open in h5py.
        find: returns the dataset, open.
        layout: its shape and type; it may have more rows.
        handle: the same file, to be read past HDF5.
        allow_missing: chunks that were never written come as the fill value.
        refuse: raises the error for rows that cannot be read.
    """
    dataset = find()
    shape, dtype, chunks = layout.shape, np.dtype(layout.dtype), layout.chunks
    creation = dataset.id.get_create_plist()
    filters = [(code, values) for code, _, values, _ in map(creation.get_filter, range(creation.get_nfilters()))]
    if EXTRA & {code for code, _ in filters}:
        register_filters()
    cell = chunks[0] if chunks else max(1, PIECE_BYTES // max(1, layout.row_bytes))
    other = Hdf5Source(shape, dtype, refuse, find, cell)
    if not _stored_as_read(dataset) or dataset.is_virtual or dataset.external or not _lies_in(file, dataset):
        return other
    base = _base(file, dataset, handle)
    if base is None:
        return other
    if creation.get_layout() == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        return other if offset is None else ContiguousSource(shape, dtype, refuse, handle, base + offset)
    if chunks is None or dataset.id.get_num_chunks() > MOST_CHUNKS:
        return other
    chunk = chunks + shape[len(chunks) :]
    try:
        pipeline = Pipeline(filters, prod(chunk) * dtype.itemsize)
    except DecodeError:
        return other
    index = ChunkIndex(dataset, shape[: len(chunks)], handle.length, base)
    fill = _fill_value(dataset, dtype) if allow_missing else None
    return ChunkedSource(shape, dtype, refuse, handle, index, chunk, pipeline, fill, other)


def _stored_as_read(dataset: h5py.Dataset) -> bool:
    """Return whether the bytes in the file are those that NumPy's type means: HDF5 has types that NumPy lacks."""
    stored, dtype = dataset.id.get_type(), dataset.dtype
    return bool(stored.equal(h5py.h5t.py_create(dtype, logical=True)))


def _lies_in(file: h5py.File, dataset: h5py.Dataset) -> bool:
    """Return whether a dataset lies in the file itself: at the end of an external link it lies in another."""
    return bool(h5py.h5o.get_info(dataset.id).fileno == h5py.h5o.get_info(file.id).fileno)


def _base(file: h5py.File, dataset: h5py.Dataset, handle: Handle) -> int | None:
    """Return what has to be added to places in the file, or None where that cannot be told.

    Before a file's own data may lie a user block (MATLAB writes one), which versions of HDF5 count or not.
    """
    block = int(file.userblock_size)
    if not block or dataset.is_virtual or dataset.external:
        return 0
    if dataset.chunks is None:
        offset, size = dataset.id.get_offset(), min(dataset.id.get_storage_size(), _PROBED)
        known = None if offset is None else dataset[: max(1, size)].tobytes()[:size]
    elif not dataset.id.get_num_chunks():
        return 0
    else:
        chunk = dataset.id.get_chunk_info(0)
        offset, known = chunk.byte_offset, dataset.id.read_direct_chunk(chunk.chunk_offset)[1][:_PROBED]
    if offset is None or known is None:
        return 0
    fits = []
    for base in (0, block):
        found = bytearray(len(known))
        try:
            handle.read([memoryview(found)], offset + base, len(found))
        except EOFError:
            continue
        if bytes(found) == bytes(known):
            fits.append(base)
    return fits[0] if len(fits) == 1 else None


def _fill_value(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> np.ndarray:
    try:
        return np.asarray(dataset.fillvalue).astype(dtype).reshape(-1)[0:1].reshape(())
    except (RuntimeError, ValueError, TypeError):
        return np.zeros((), dtype)
