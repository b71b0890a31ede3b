"""Read datasets, attributes and names without trusting HDF5 to check sizes.

HDF5 does not check how many bytes its filters return for a chunk. If they are too few, it fills the rest with the
process's memory, and a chunk with a checksum and under four bytes crashes the process. So kerasmem decodes chunks
itself, and leaves them to HDF5 only in trusted files.

HDF5 stores variable-length text separately, and any number of elements may refer to the same text: a file of 4 MB can
expand to 16 GB. So attributes with many such texts are read only from trusted files, and datasets in small pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.format.chunks import read_index
from kerasmem.hdf5.format.filters import SHUFFLE, DecodeError, Pipeline, Scratch, register_filters
from kerasmem.hdf5.format.layout import DatasetLayout, quote
from kerasmem.hdf5.format.links import DAMAGED
from kerasmem.hdf5.io.handle import Handle
from kerasmem.hdf5.rows.delivery import PIECE_BYTES
from kerasmem.hdf5.rows.scan import missing_part
from kerasmem.hdf5.rows.sources import ChunkedSource, ContiguousSource, DirectSource, Hdf5Source, Source

MOST_TEXT = 64 << 20
"""Maximum size of an attribute, and of all names in a dataset, in bytes."""
TEXTS_AT_ONCE = 32
"""Maximum number of variable-length texts that are read at once from an untrusted file."""
# h5py reads these bit fields unchanged; it shifts the bits of others.
_WHOLE_BITFIELDS = tuple(getattr(h5py.h5t, f"STD_B{bits}{order}") for bits in (8, 16, 32, 64) for order in ("LE", "BE"))


def open_source(
    file: h5py.File, find: Callable[[], h5py.Dataset], layout: DatasetLayout, handle: Handle, *, trust_file: bool
) -> Source:
    """Return the fastest source of a dataset with a known layout.

    Args:
        file: the file, open in h5py.
        find: function that returns the open dataset.
        layout: layout of the dataset, which may have more rows.
        handle: handle of the same file.
        trust_file: whether HDF5 may decode filters, and unwritten parts are read as fill values.

    Raises:
        DataError: If HDF5 would have to decode filters of an untrusted file.
    """
    dataset = find()
    shape, dtype, chunks = layout.shape, np.dtype(layout.dtype), layout.chunks
    if _is_stored_as_read(dataset) and not dataset.external and _is_within(file, dataset):
        source = _direct_source(dataset, shape, dtype, handle)
        if source is not None and not (trust_file and missing_part(file, dataset)):
            return source
    if trust_file:
        register_filters()
    else:
        _refuse_unchecked(file, dataset, layout.name)
    cell = chunks[0] if chunks else max(1, PIECE_BYTES // max(1, layout.row_bytes))
    return Hdf5Source(shape, dtype, handle, find, cell)


def _direct_source(
    dataset: h5py.Dataset, shape: tuple[int, ...], dtype: np.dtype[Any], handle: Handle
) -> DirectSource | None:
    """Return a source that reads without HDF5, or None if only HDF5 can read the dataset."""
    kind = dataset.id.get_create_plist().get_layout()
    if kind == h5py.h5d.CONTIGUOUS and dataset.id.get_offset() is not None:
        return ContiguousSource(shape, dtype, handle, dataset.id.get_offset())
    if kind != h5py.h5d.CHUNKED:
        return None
    chunks = tuple(map(int, dataset.chunks))
    chunk = chunks + shape[len(chunks) :]
    try:
        pipeline = Pipeline(filters_of(dataset), prod(chunk) * dtype.itemsize)
    except DecodeError:
        return None
    index = read_index(dataset, shape[: len(chunks)], handle.length, _base(dataset.file))
    if index is None:
        return None
    source = ChunkedSource(shape, dtype, handle, index, chunk, pipeline)
    only_shuffled = {code for code, _ in pipeline.filters} == {SHUFFLE}
    return None if only_shuffled and _has_plain_edges(dataset, source) else source


def _has_plain_edges(dataset: h5py.Dataset, source: ChunkedSource) -> bool:
    """Return whether chunks at the dataset's edge are not shuffled, by comparing one with HDF5's result."""
    number, skipped = divmod(source.shape[0] - 1, source.chunk[0])
    *_, chunk = source.index.row_of_chunks(number)
    if chunk.offset is None:
        return False
    inside = (slice(0, skipped + 1), *(slice(0, part.stop - part.start) for part in chunk.inner))
    selection = (slice(source.shape[0] - 1 - skipped, source.shape[0]), *chunk.inner)
    decoded = source.decode(chunk, source.shape[0] - 1, Scratch(), source.handle)[inside]
    return bool(dataset[selection].tobytes() != decoded.tobytes())


def check_chunks(dataset: h5py.Dataset, rows: range | None = None, axis: int = 0) -> None:
    """Check the sizes of compressed chunks by decoding them, before HDF5 reads them unchecked.

    Args:
        dataset: the dataset.
        rows: rows to check. Defaults to all.
        axis: axis of the rows. Defaults to 0.

    Raises:
        DecodeError: If a chunk is damaged.
        DataError: If kerasmem has no decoder for a filter.
    """
    filters = filters_of(dataset)
    try:
        pipeline = Pipeline(filters, prod(dataset.chunks or ()) * _element_size(dataset))
    except DecodeError:
        filters = []
    if not filters:
        _refuse_unchecked(dataset.file, dataset, dataset.name)
        return
    for chunk in _chunks_with(dataset, rows, axis):
        if chunk.size > pipeline.most_stored():
            raise DecodeError(f"a chunk of {pipeline.chunk_bytes:,} bytes takes {chunk.size:,} in the file")
        mask, stored = dataset.id.read_direct_chunk(chunk.chunk_offset)
        pipeline.decode(np.frombuffer(stored, np.uint8), mask, Scratch())


def _chunks_with(dataset: h5py.Dataset, rows: range | None, axis: int) -> Iterator[Any]:
    """Yield the stored chunks that hold any of the rows."""
    count = dataset.id.get_num_chunks()
    if rows is None:
        yield from map(dataset.id.get_chunk_info, range(count))
        return
    corners = [range(0, extent, step) for extent, step in zip(dataset.shape, dataset.chunks, strict=True)]
    if prod(map(len, corners)) > count:
        raise DecodeError("some of its chunks were never written")
    step = dataset.chunks[axis]
    corners[axis] = range(rows.start // step * step, min(rows.stop, dataset.shape[axis]), step)
    for corner in itertools.product(*corners):
        yield dataset.id.get_chunk_info_by_coord(corner)


def filters_of(dataset: h5py.Dataset) -> list[tuple[int, tuple[int, ...]]]:
    """Return the filters of a dataset in their order, with the numbers that the file has for each."""
    creation = dataset.id.get_create_plist()
    filters = map(creation.get_filter, range(creation.get_nfilters()))
    return [(code, parameters) for code, _, parameters, _ in filters]


def _refuse_unchecked(file: h5py.File, dataset: h5py.Dataset, name: str) -> None:
    """Refuse filtered data and data with wrong sizes, because HDF5 checks neither."""
    label = f"{quote(file.filename)}: dataset {quote(name)}"
    creation = dataset.id.get_create_plist()
    if creation.get_nfilters():
        raise DataError(
            f"{label} is compressed, and stored in a way that only HDF5 can read. HDF5 does not check chunks: "
            "a damaged one could crash this process or leak its memory. "
            "If you trust the file, pass trust_file=True; otherwise write plain numbers"
        )
    itemsize = _element_size(dataset)
    if dataset.chunks is not None:
        expected = prod(map(int, dataset.chunks)) * itemsize

        def check(info: Any) -> None:
            if info.size != expected:
                raise DecodeError(f"a chunk of {expected:,} bytes takes {info.size:,} in the file")

        dataset.id.chunk_iter(check)
    elif creation.get_layout() == h5py.h5d.COMPACT and dataset.id.get_storage_size() < prod(dataset.shape) * itemsize:
        raise DecodeError("it has fewer bytes than its shape needs")


def _element_size(dataset: h5py.Dataset) -> int:
    """Return the size of an element in the file in bytes."""
    stored = dataset.id.get_type()
    if isinstance(stored, h5py.h5t.TypeStringID) and stored.is_variable_str():
        return 8 + int(dataset.file.id.get_create_plist().get_sizes()[0])  # length, heap address and index
    return int(stored.get_size())


def _is_stored_as_read(dataset: h5py.Dataset) -> bool:
    """Return whether the stored bytes are NumPy's: HDF5 has types that NumPy lacks."""
    stored, dtype = dataset.id.get_type(), dataset.dtype
    if isinstance(stored, h5py.h5t.TypeBitfieldID):  # booleans of PyTables
        is_whole = any(map(stored.equal, _WHOLE_BITFIELDS)) and stored.get_size() == dtype.itemsize
        return bool(is_whole and (dtype.itemsize == 1 or dtype.kind == "u"))
    return bool(stored.equal(h5py.h5t.py_create(dtype, logical=True)))


def _is_within(file: h5py.File, dataset: h5py.Dataset) -> bool:
    """Return whether a dataset is in the file itself, not in the target of an external link."""
    return bool(h5py.h5o.get_info(dataset.id).fileno == h5py.h5o.get_info(file.id).fileno)


def _base(file: h5py.File) -> int:
    """Return the number to add to chunk offsets: the size of the user block (MATLAB writes one).

    Later versions of HDF5 add it themselves, and all versions add it to the offset of contiguous data.
    """
    return 0 if h5py.version.hdf5_version_tuple >= (1, 14, 4) else int(file.userblock_size)


def read_attribute(
    item: h5py.Group | h5py.Dataset, name: str, *, trust_file: bool = False, most: int = MOST_TEXT
) -> Any:
    """Return the value of an attribute, or None if it is missing, unsupported or too large.

    Args:
        item: the group or dataset.
        name: name of the attribute.
        trust_file: whether to read any number of variable-length texts. Defaults to False.
        most: maximum size in bytes. Defaults to 64 MiB.
    """
    try:
        if not h5py.h5a.get_num_attrs(item.id) or name not in item.attrs:  # counting is faster
            return None
        attribute = item.attrs.get_id(name)
        shape, text = attribute.shape, h5py.check_string_dtype(attribute.dtype)
        if shape is None or (text is None and attribute.dtype.hasobject):
            return None
        if text is not None and text.length is None and prod(shape) > TEXTS_AT_ONCE and not trust_file:
            return None
        return item.attrs[name] if attribute.get_storage_size() <= most else None
    except DAMAGED:
        return None


def read_names(dataset: h5py.Dataset, most: int) -> list[str] | None:
    """Return the rows of a dataset as texts, or None if they are not single texts or numbers, or too many.

    Args:
        dataset: a dataset without data in other files.
        most: maximum number of rows.

    Raises:
        DataError: If the texts are too large.
        DecodeError: If a chunk is damaged.
    """
    shape, text = dataset.shape, h5py.check_string_dtype(dataset.dtype)
    if shape is None or len(shape) != 1 or not 0 < shape[0] <= most:
        return None
    if text is None and dataset.dtype.kind not in "iufb":
        return None
    if max(shape + (dataset.chunks or ())) * dataset.id.get_type().get_size() > MOST_TEXT:
        return None
    check_chunks(dataset)
    step = TEXTS_AT_ONCE if text is not None and text.length is None else shape[0]
    names: list[str] = []
    size = 0
    for start in range(0, shape[0], step):
        values = dataset[start : start + step].tolist()
        names += [text_of(value) if text is not None else str(value) for value in values]
        size += sum(len(value) for value in values) if text is not None else 0
        if size > MOST_TEXT:
            raise DataError(f"the texts of {dataset.name} take more than {MOST_TEXT:,} bytes")
    return names


def text_of(value: Any) -> str:
    """Return the value of an attribute as text, or "" if it is not text."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
