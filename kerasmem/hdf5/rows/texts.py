"""Read attributes and names of a file within bounds of memory.

HDF5 keeps a text of variable length elsewhere in the file, and any number of elements may refer to the same one: a file
of 4 MB can expand to 16 GB. So an attribute with many such texts is read only from a trusted file, and a dataset of
them a few at a time.
"""

from __future__ import annotations

from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.format.links import DAMAGED
from kerasmem.hdf5.rows.opening import check_chunks

MOST_TEXT = 64 << 20
"""Largest size of an attribute, and of all names in a dataset, in bytes."""
TEXTS_AT_ONCE = 32
"""Number of texts of variable length that are read together from a file without trust."""


def read_attribute(
    item: h5py.Group | h5py.Dataset, name: str, *, trust_file: bool = False, most: int = MOST_TEXT
) -> Any:
    """Return an attribute's value; None if it is missing, unsupported or too large.

    Args:
        item: the group or dataset.
        name: the attribute.
        trust_file: whether any number of texts of variable length is read.
        most: largest size in bytes.
    """
    try:
        if not h5py.h5a.get_num_attrs(item.id) or name not in item.attrs:  # the first is the faster question
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
    """Return texts or numbers, one a row, as texts; None for other or larger datasets.

    Args:
        dataset: a dataset that lies in its own file.
        most: largest number of rows.

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
    """Return an attribute's value as text; "" if it is not a text."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
