"""Attributes and texts of a file: how much there is, is known before it is read, and texts are not left to HDF5."""

from __future__ import annotations

from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.hdf5.direct.codecs import DecodeError
from kerasmem.hdf5.direct.handle import Handle
from kerasmem.hdf5.direct.opening import read_elements
from kerasmem.hdf5.direct.raw import MOST_TEXT, RawError, RawFile
from kerasmem.hdf5.links import DAMAGED


def read_attribute(item: h5py.Group | h5py.Dataset, name: str, raw: RawFile, most: int = MOST_TEXT) -> Any:
    """Return an attribute's value, texts as str; None if it is missing or not supported.

    Args:
        item: the group or dataset.
        name: of the attribute.
        raw: the bytes of its file.
        most: bytes that the value may take.
    """
    try:
        if name not in item.attrs:
            return None
        attribute = item.attrs.get_id(name)
        dtype, shape = attribute.dtype, attribute.shape
        text = h5py.check_string_dtype(dtype)
        if shape is None or (text is None and dtype.hasobject):
            return None
        if text is None or text.length is not None:
            return item.attrs[name] if attribute.get_storage_size() <= most else None
        count = prod(shape)
        elements = raw.attribute(h5py.h5o.get_info(item.id).addr, name)
        if elements is None or len(elements) < count * raw.element_size:
            return None
        texts = [one.decode("utf-8", "replace") for one in raw.texts(elements[: count * raw.element_size], most)]
    except DAMAGED:
        return None
    return np.array(texts, object).reshape(shape) if shape else texts[0]


def read_names(dataset: h5py.Dataset, handle: Handle, raw: RawFile, most: int) -> list[str] | None:
    """Return texts or numbers, one a row, as texts; None for other or larger datasets.

    Args:
        dataset: it lies in its own file, with its sources.
        handle: this file, to be read past HDF5.
        raw: its bytes.
        most: entries.

    Raises:
        RawError: If the texts take more than is read, or are damaged.
    """
    text = h5py.check_string_dtype(dataset.dtype)
    shape = dataset.shape
    if shape is None or len(shape) != 1 or not 0 < shape[0] <= most:
        return None
    dtype = dataset.dtype
    if text is not None:
        dtype = np.dtype((np.void, raw.element_size)) if text.length is None else np.dtype(f"S{text.length}")
    elif dtype.kind not in "iufb":
        return None
    try:
        values = read_elements(dataset.file, dataset, handle, dtype, MOST_TEXT)
    except DecodeError as error:
        raise RawError(str(error)) from error
    if values is None:
        return None
    if text is None:
        return [str(value) for value in values.tolist()]
    if text.length is not None:
        raw.spend(values.nbytes)
    found = raw.texts(values.tobytes()) if text.length is None else values.tolist()
    return [one.decode("utf-8", "replace") for one in found]
