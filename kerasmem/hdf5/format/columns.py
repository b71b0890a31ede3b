"""Map datasets to x, y and sample_weight, with the type of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import DatasetLayout, plain_name, shown

STORED = "stored"
_DTYPES = ("float32", "float16", "float64", STORED)


@dataclass(frozen=True)
class Column:
    """One array of a batch: a dataset, and how it is converted.

    Args:
        name: the dataset's path in the file.
        row_shape: shape of one row.
        stored: NumPy's text for the stored type.
        dtype: name of the type delivered, native byte order.
        scale: factor, or None if values are cast as they are.
        offset: added after scaling.
    """

    name: str
    row_shape: tuple[int, ...]
    stored: str
    dtype: str
    scale: float | None = None
    offset: float = 0.0

    @property
    def row_bytes(self) -> int:
        """Bytes of one delivered row."""
        return prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def converts(self) -> bool:
        """Whether rows change on their way from the file to the batch."""
        same = np.dtype(self.stored) == np.dtype(self.dtype) and np.dtype(self.stored).kind != "b"
        return not same or self.scale is not None


@dataclass(frozen=True)
class Part:
    """x, y or sample_weight: one name, a tuple of names or a dict of names.

    Args:
        role: "x", "y" or "sample_weight".
        names: dataset paths in order.
        keys: the dict's keys, or None.
        single: whether one bare name was given.
    """

    role: str
    names: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    single: bool = False

    def build(self, arrays: Sequence[Any]) -> Any:
        """Return `arrays` in the structure the names were given in (a list becomes a tuple)."""
        if self.single:
            return arrays[0]
        return tuple(arrays) if self.keys is None else dict(zip(self.keys, arrays, strict=True))


def read_part(role: str, value: Any) -> Part:
    """Return the checked x, y or sample_weight as a `Part`."""
    if isinstance(value, str):
        names, keys, single = [value], None, True
    elif isinstance(value, Mapping):
        names, keys, single = list(value.values()), tuple(value.keys()), False
    elif isinstance(value, (list, tuple)):
        names, keys, single = list(value), None, False
    else:
        raise UsageError(
            f"{role}: give a dataset's name, a list of names or a dict of names, not {type(value).__name__}"
        )
    if not names:
        raise UsageError(f"{role}: no dataset named")
    for name in (*names, *(keys or ())):
        if not isinstance(name, str) or not plain_name(name) or "\0" in name:
            raise UsageError(f"{role}: {name!r} is not a dataset's name; write for example 'train/images'")
    return Part(role, tuple(plain_name(name) for name in names), keys, single)


def make_columns(
    part: Part, layouts: Mapping[str, DatasetLayout], dtype: Mapping[str, str], scale: Mapping[str, Any]
) -> list[Column]:
    """Return the columns of one part.

    Features and weights come out as float32 whatever is stored; targets that are integers or booleans keep
    their type, in native byte order, unless a scale is given for them.

    Args:
        part: the names.
        layouts: what the file says about each name.
        dtype: asked-for type by dataset name; "" holds the general one for x.
        scale: factor or (factor, offset) by dataset name; "" holds the general one for x.
    """
    columns = []
    for name in part.names:
        layout = layouts[name]
        stored = np.dtype(layout.dtype)
        given = scale.get(name, scale.get("") if part.role == "x" else None)
        factor, offset = (None, 0.0) if given is None else given
        wanted = dtype.get(name, dtype[""] if part.role == "x" else "")
        if not wanted:
            keeps = part.role == "y" and stored.kind in "iub" and factor is None
            wanted = STORED if keeps else "float32"
        if wanted == STORED:
            if factor is not None:
                raise UsageError(f"scale and dtype='stored' contradict each other for {shown(name)}")
            wanted = stored.newbyteorder("=").name
        if part.role == "sample_weight" and layout.row_shape not in ((), (1,)):
            raise DataError(
                f"sample_weight: dataset {shown(name)} has shape {layout.shape}; one weight a row is needed: "
                f"({layout.rows},) or ({layout.rows}, 1)"
            )
        columns.append(Column(name, layout.row_shape, layout.dtype, wanted, factor, offset))
    return columns


def read_dtype(value: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the dtype setting by dataset name. The key "" holds the default of x."""
    given = {"": "float32", **_by_name("dtype", value, names)} if isinstance(value, Mapping) else {"": value}
    return {name: _dtype_name(entry) for name, entry in given.items()}


def _dtype_name(entry: Any) -> str:
    text = entry
    if entry is not None and not isinstance(entry, str):
        try:
            text = np.dtype(getattr(entry, "as_numpy_dtype", entry)).name  # TensorFlow's have one
        except (TypeError, ValueError):
            text = ""
    if text not in _DTYPES:
        raise UsageError(f"dtype: {entry!r} is not one of {', '.join(_DTYPES)}")
    return str(text)


def read_scale(value: Any, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the scale setting as (factor, offset) by dataset name. The key "" holds that of x."""
    if value is None:
        return {}
    given = _by_name("scale", value, names) if isinstance(value, Mapping) else {"": value}
    return {name: _factor_and_offset(entry) for name, entry in given.items()}


def _factor_and_offset(entry: Any) -> tuple[float, float]:
    pair = entry if isinstance(entry, (tuple, list)) else (entry, 0.0)
    try:
        factor, offset = (checks.number("scale", each, least=-np.inf) for each in pair)
    except (UsageError, ValueError, OverflowError):
        raise UsageError(f"scale: {entry!r} is neither a number nor (factor, offset)") from None
    return factor, offset


def _by_name(setting: str, given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    result = {}
    for name, entry in given.items():
        plain = plain_name(name) if isinstance(name, str) else name
        if plain != "" and plain not in names:
            known = ", ".join(shown(known) for known in names)
            raise UsageError(f"{setting}: {name!r} is none of the datasets used ({known})")
        result[plain] = entry
    return result
