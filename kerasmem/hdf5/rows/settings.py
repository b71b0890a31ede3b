"""Settings of a sequence, checked one by one: files, parts of a batch, rows."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.columns import Part, read_part
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.access import RemoteAccess, read_remote
from kerasmem.units import format_count

INDEX_SUFFIX = ".index"
"""By which an index of files is known."""


@dataclass(frozen=True)
class Access:
    """How far files are trusted, and how remote ones are reached.

    Args:
        trust_file: follow links into other files, let HDF5 undo unknown filters, and accept missing parts.
        remote: how files behind URLs are reached.
    """

    trust_file: bool = False
    remote: RemoteAccess = field(default_factory=RemoteAccess)


def read_data(path: Any, trust_file: Any, remote: Any) -> tuple[Sequence[str], Access]:
    """Return the files, as `read_files` does, and how they are accessed."""
    access = read_remote(remote)
    files = read_files(path, access)
    if remote and not any(map(is_url, files)):
        raise UsageError("remote: it is for URLs, and all files given are on this machine; leave it out")
    return files, Access(checks.flag("trust_file", trust_file), access)


def read_paths(path: Any, remote: RemoteAccess | None = None) -> tuple[str, ...]:
    """Return absolute paths: of one file, of those in a list, or of all that match a pattern, part-2 before part-10.

    Args:
        path: what was given; URLs stay as they are.
        remote: how URLs are reached, to find those that match a pattern.

    Raises:
        DataError: If no file matches.
        UsageError: If these are no paths, or one is named twice.
    """
    if isinstance(path, Sequence) and not isinstance(path, (str, bytes)):
        paths = [read_place(one) for one in path]
        if not paths:
            raise UsageError("path: the list of files is empty")
        if len(set(paths)) < len(paths):
            twice = next(one for one in paths if paths.count(one) > 1)
            raise UsageError(f"path: {shown(twice)} is named more than once; its rows would come more than once")
        return tuple(paths)
    one = read_place(path)
    if is_url(one):
        from kerasmem.hdf5.io.remote_file import expand, is_pattern

        return tuple(sorted(expand(one, remote or RemoteAccess()), key=natural_order)) if is_pattern(one) else (one,)
    if glob.has_magic(one) and not os.path.exists(one):
        matches = [name for name in glob.glob(one, recursive=True) if os.path.isfile(name)]
        if not matches:
            raise DataError(
                f"{shown(one)}: no file matches this pattern; give the path of a file, a list of paths, "
                "or a pattern such as 'data/*.h5' that some match ('**' stands for folders within folders)"
            )
        return tuple(sorted(matches, key=natural_order))
    return (one,)


def read_files(path: Any, remote: RemoteAccess | None = None) -> Sequence[str]:
    """Return the files like `read_paths`; of an index, the files that it names.

    Raises:
        DataError: If no file matches.
        UsageError: If these are no paths.
    """
    paths = read_paths(path, remote)
    if len(paths) > 1 or not paths[0].split("?")[0].endswith(INDEX_SUFFIX):
        return paths
    from kerasmem.hdf5.rows.index import DataIndex

    return DataIndex(paths[0], remote or RemoteAccess())


def natural_order(path: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that counts like people: part-2 before part-10."""
    pieces = re.split(r"([0-9]+)", path)  # text and digits in turn, so that like is compared with like
    numbered = [(int(piece), "") if at % 2 else (0, piece) for at, piece in enumerate(pieces)]
    return numbered, path


def read_path(path: Any) -> str:
    """Return an absolute path, so that worker processes and later `chdir`s find the same file."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        kind = type(path).__name__
        raise UsageError(f"path: give the path of an HDF5 file, a list or a pattern of paths, not {kind}") from None
    if not text or "\0" in text:
        raise UsageError(f"path: {text!r} is not a path")
    return os.path.abspath(os.path.expanduser(text))


def read_place(path: Any) -> str:
    """Return a URL as it is, or an absolute path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        return read_path(path)
    return text if is_url(text) and "\0" not in text else read_path(text)


def read_parts(x: Any, y: Any, sample_weight: Any) -> tuple[Part, ...]:
    """Return x, y and sample_weight as far as they are given."""
    if x is None:
        raise UsageError("x: name the dataset of the features")
    if y is None and sample_weight is not None:
        raise UsageError("sample_weight: Keras takes weights only together with y")
    given = (("x", x), ("y", y), ("sample_weight", sample_weight))
    return tuple(read_part(role, value) for role, value in given if value is not None)


def read_rows(rows: Any, length: int, *, ordered: bool) -> range | np.ndarray:
    """Return the selected rows: a `range` if they are one run, else a sorted int64 array.

    Args:
        rows: None (all), a slice, a range, a (start, stop) tuple or an array or list of row numbers.
        length: rows in the file.
        ordered: whether the rows will be delivered in file order; an index array must then be increasing,
            because its own order would be lost without a word.

    Raises:
        UsageError: If `rows` is nothing of the kind.
        DataError: If rows are outside the file, negative, named twice, or none at all.
    """
    if rows is None:
        return range(length)
    if isinstance(rows, (tuple, slice)):
        rows = _as_range(rows, length)
    if isinstance(rows, range):
        if not len(rows):
            raise DataError(f"rows: {rows.start:,} to {rows.stop:,} selects no rows; the file has {length:,}")
        if rows.step < 0:
            raise UsageError(f"rows: {rows} falls; give a rising range, as rows are taken in file order")
    else:
        rows = _as_rising(rows, length, ordered)
    low, high = int(rows[0]), int(rows[-1])
    if low < 0:
        raise DataError(f"rows: {low} is negative; count from the first row, 0 to {length - 1:,}")
    if high >= length:
        raise DataError(f"rows: {high:,} is past the end; the file has {format_count(length, 'row')}")
    return range(low, high + 1) if high - low + 1 == len(rows) else np.asarray(rows, np.int64)


def _as_range(rows: Any, length: int) -> range:
    if isinstance(rows, tuple):
        if len(rows) != 2:
            raise UsageError(f"rows: a tuple means (start, stop), and {rows!r} has {len(rows)} entries")
        rows = slice(*rows)
    start, stop = (
        default if value is None else checks.whole("rows", value, -sys.maxsize)
        for value, default in ((rows.start, 0), (rows.stop, length))
    )
    return range(start, stop, 1 if rows.step is None else checks.whole("rows", rows.step))


def _as_rising(rows: Any, length: int, ordered: bool) -> np.ndarray:
    try:
        array = np.asarray(rows)
    except (ValueError, TypeError) as error:
        raise UsageError(f"rows: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(
            "rows: give a slice, a range, (start, stop) or a flat array of whole row numbers, such as "
            "numpy.flatnonzero(mask)"
        )
    if not array.size:
        raise DataError(f"rows: the array is empty; the file has {format_count(length, 'row')}")
    rising, counts = np.unique(array.astype(np.int64), return_counts=True)
    if len(rising) < len(array):
        raise DataError(f"rows: row {int(rising[counts.argmax()]):,} is named more than once")
    if ordered and not np.array_equal(rising, array):
        raise UsageError(
            "rows: with shuffle=False rows come in file order, and these are not in it; "
            "pass numpy.sort(rows), and use that order for the results"
        )
    return rising
