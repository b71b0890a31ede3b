"""Which rows of the file are used: the `rows` setting, read and checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from kerasmem.errors import DataError, UsageError


def read_rows(rows: Any, length: int, *, ordered: bool) -> range | np.ndarray:
    """Return the selected rows: a `range` where they are one run, else a sorted int64 array.

    Args:
        rows: None (all), a slice, a range, a (start, stop) tuple or an array or list of row numbers.
        length: rows in the file.
        ordered: whether the rows will be delivered in file order; an index array must then be increasing,
            because its own order would be lost without a word.

    Raises:
        UsageError: `rows` is nothing of the kind.
        DataError: rows outside the file, negative, named twice, or none at all.
    """
    if rows is None:
        return range(length)
    if isinstance(rows, tuple):
        if len(rows) != 2:
            raise UsageError(f"rows: a tuple means (start, stop), and {rows!r} has {len(rows)} entries")
        rows = slice(*rows)
    if isinstance(rows, slice):
        rows = _as_range(rows, length)
    if isinstance(rows, range):
        return _check_range(rows, length, ordered)
    return _check_array(rows, length, ordered)


def _as_range(rows: slice, length: int) -> range:
    bounds = {"start": (rows.start, 0), "stop": (rows.stop, length), "step": (rows.step, 1)}
    values = {}
    for name, (value, default) in bounds.items():
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise UsageError(f"rows: {name} {value!r} is not a whole number")
        values[name] = int(value)
    if values["step"] < 1:
        raise UsageError(f"rows: a step of {values['step']} is not possible; rows come in file order or shuffled")
    for name in ("start", "stop"):
        if values[name] < 0:
            raise DataError(f"rows: {name} {values[name]} is negative; count from the first row, 0 to {length:,}")
        if values[name] > length:
            raise DataError(f"rows: {name} {values[name]:,} is past the end; the file has {length:,} rows")
    return range(values["start"], values["stop"], values["step"])


def _check_range(rows: range, length: int, ordered: bool) -> range | np.ndarray:
    if not len(rows):
        raise DataError(f"rows: {rows.start:,} to {rows.stop:,} selects no rows; the file has {length:,}")
    _check_bounds(min(rows), max(rows), length)
    if rows.step < 0 and ordered:
        raise UsageError("rows: with shuffle=False rows come in file order; a falling range cannot be kept")
    if abs(rows.step) == 1:
        return range(min(rows), max(rows) + 1)
    return np.sort(np.asarray(rows, np.int64))


def _check_array(rows: Any, length: int, ordered: bool) -> range | np.ndarray:
    try:
        array = np.asarray(rows)
    except (ValueError, TypeError) as error:
        raise UsageError(f"rows: {error}") from error
    if array.ndim == 1 and array.dtype.kind == "b":
        raise UsageError("rows: a boolean mask is not accepted; pass numpy.flatnonzero(mask)")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError("rows: give a slice, a range, (start, stop) or a flat array of whole row numbers")
    if not array.size:
        raise DataError(f"rows: the array is empty; the file has {length:,} rows")
    low, high = int(array.min()), int(array.max())
    _check_bounds(low, high, length)
    array = _in_file_order(array.astype(np.int64), ordered)
    return range(low, high + 1) if high - low + 1 == array.size else array


def _check_bounds(low: int, high: int, length: int) -> None:
    if low < 0:
        raise DataError(f"rows: {low} is negative; count from the first row, 0 to {length - 1:,}")
    if high >= length:
        raise DataError(f"rows: {high:,} is past the end; the file has {length:,} rows")


def _in_file_order(rows: np.ndarray, ordered: bool) -> np.ndarray:
    if np.all(rows[1:] > rows[:-1]):
        return rows
    rows = np.sort(rows)
    same = np.flatnonzero(rows[1:] == rows[:-1])
    if same.size:
        raise DataError(f"rows: row {int(rows[same[0]]):,} is named more than once")
    if ordered:
        raise UsageError(
            "rows: with shuffle=False rows come in file order, and these are not in it; "
            "pass numpy.sort(rows), and use that order for the results"
        )
    return rows
