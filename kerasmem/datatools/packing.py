"""Unpack values by the attributes of netCDF: scale_factor, add_offset, fill values and valid ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kerasmem.hdf5.rows.texts import text_of

UNPACKED = frozenset(
    ("scale_factor", "add_offset", "_FillValue", "missing_value", "valid_range", "valid_min", "valid_max", "_Unsigned")
)
"""Attributes that describe packed values, and are wrong for unpacked ones."""


@dataclass(frozen=True)
class Packing:
    """How the stored values of a dataset stand for physical ones.

    Args:
        factor: factor of the stored values.
        offset: number added to the product.
        missing: stored values that stand for no value.
        low: smallest valid stored value; None for no limit.
        high: largest valid stored value; None for no limit.
        unsigned: whether signed whole numbers are read as unsigned.
    """

    factor: float = 1.0
    offset: float = 0.0
    missing: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None
    unsigned: bool = False

    @property
    def scales(self) -> bool:
        """Whether a physical value is not the stored one."""
        return (self.factor, self.offset) != (1.0, 0.0)

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Return stored values as numbers: as unsigned ones if they are read so."""
        return values.view(values.dtype.str.replace("i", "u")) if self.unsigned else values

    def is_missing(self, values: np.ndarray) -> np.ndarray:
        """Return a mask of the values that stand for no value.

        Args:
            values: values that `stored` returned.
        """
        missing = np.isin(values, np.array(self.missing, values.dtype))
        if self.low is not None:
            missing |= values < self.low
        if self.high is not None:
            missing |= values > self.high
        return missing

    def unpack(self, values: np.ndarray, dtype: str) -> np.ndarray:
        """Return physical values, NaN for missing ones."""
        values = self.stored(values)
        result = values.astype(np.float64) * self.factor + self.offset
        result[self.is_missing(values)] = np.nan
        return result.astype(dtype)


def read_packing(attribute: Callable[[str], Any], dtype: np.dtype[Any]) -> Packing | None:
    """Return the packing that attributes describe, or None.

    Args:
        attribute: returns an attribute's value, or None.
        dtype: type of the stored values.
    """
    if dtype.kind not in "iuf":
        return None
    factor, offset = _numbers(attribute("scale_factor")) or [1.0], _numbers(attribute("add_offset")) or [0.0]
    scale = float(factor[0]), float(offset[0])
    if not np.isfinite(scale).all() or not scale[0]:
        return None
    unsigned = dtype.kind == "i" and text_of(attribute("_Unsigned")).lower() == "true"
    kind = np.dtype(f"u{dtype.itemsize}") if unsigned else dtype
    missing = [*_numbers(attribute("_FillValue")), *_numbers(attribute("missing_value"))]
    limits = _numbers(attribute("valid_range"))
    if len(limits) != 2:
        limits = [(_numbers(attribute(name)) or [None])[0] for name in ("valid_min", "valid_max")]
    low, high = (_stored_limit(limit, scale, kind) for limit in limits)
    if low is not None and high is not None and low > high:  # a negative factor turns them round
        low, high = high, low
    stored = dict.fromkeys(value for number in missing for value in _stored_number(number, kind))
    packing = Packing(*scale, tuple(stored), low, high, unsigned)
    return None if packing == Packing() else packing


def _numbers(value: Any) -> list[Any]:
    """Return an attribute's numbers in NumPy's types, or nothing if it has none."""
    array = np.asarray([] if value is None else value).reshape(-1)
    return list(array) if array.dtype.kind in "iuf" else []


def _stored_number(number: Any, dtype: np.dtype[Any]) -> list[float]:
    """Return a number in the type of the stored values, or nothing if that cannot hold it."""
    if np.isnan(number):
        return []
    with np.errstate(invalid="ignore", over="ignore"):
        cast = number.astype(dtype)
    wraps = dtype.kind == "u" and number.dtype.kind == "i"
    return [cast.item()] if dtype.kind == "f" or wraps or cast == number else []


def _stored_limit(limit: Any, scale: tuple[float, float], dtype: np.dtype[Any]) -> float | None:
    """Return a limit as a stored value: one of fractions for stored whole numbers is a physical value."""
    if limit is None or not np.isfinite(limit):
        return None
    if dtype.kind == "f":
        return float(limit)
    if limit.dtype.kind == "f":
        return round((float(limit) - scale[1]) / scale[0])
    return int(limit.astype(dtype) if dtype.kind == "u" else limit)
