"""`kerasmem.data.stats`: mean, variance, range and class weights of datasets, in one pass through a file."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.datatools.fields import Packing
from kerasmem.datatools.inspection import choose_columns, find_entry
from kerasmem.datatools.listing import Entry, list_contents
from kerasmem.datatools.reports import ColumnStats, DataStats, Progress
from kerasmem.datatools.row_source import even_pieces
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import quote
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.rows.paths import Access, read_files, read_path
from kerasmem.hdf5.rows.scan import scan_files
from kerasmem.processes.executors import run_tasks
from kerasmem.streaming.data_source import read_windows

_MOST_CLASSES = 1000  # different values of labels
_SECTION_VALUES = 1 << 18  # float64 values per sum, so that they stay in the processor's cache
_SECTIONS = 256  # per task, for any executor, so that results are the same to the last digit


def stats(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    datasets: Sequence[str] | None = None,
    *,
    trust_file: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> DataStats:
    """Compute mean, variance, range and class weights of datasets, for `Normalization` layers and `class_weight`.

    Means and variances are over all axes but the last, as in `keras.layers.Normalization(axis=-1).adapt`. They are
    computed in float64 with the pairwise update of Chan, Golub and LeVeque, which stays accurate for any number of rows
    and for values far from 0. NaN, infinity and netCDF's fill values are counted and left out. Packed values
    (scale_factor, add_offset) are unpacked. Results are the same to the last digit with any executor.

    Args:
        path: the HDF5 file, or an index, a list or a pattern of files that are read as one.
        datasets: names of datasets with equally many rows. Defaults to all with as many rows as the largest.
        trust_file: as for `H5ChunkSequence`. Defaults to False.
        executor: as for `kerasmem.data.convert`. Its workers must see the files under the same names.
        progress: called with the step, the number of rows done and the number of all rows.

    Returns:
        A `DataStats`: `result["x"]` has the figures of dataset "x", and `code` the lines of Python that use them.

    Raises:
        DataError: If the file cannot be read.
        UsageError: If a name is not that of a dataset that can be trained from.

    Examples:
        >>> import h5py, kerasmem, numpy as np
        >>> with h5py.File("/tmp/stats.h5", "w") as f:
        ...     f["x"], f["y"] = np.arange(8.0).reshape(4, 2), [0, 0, 0, 1]
        >>> result = kerasmem.data.stats("/tmp/stats.h5")
        >>> result["x"].mean, result["x"].variance
        ((3.0, 4.0), (5.0, 5.0))
        >>> {label: round(weight, 3) for label, weight in result["y"].class_weight.items()}
        {0: 0.667, 1: 2.0}
    """
    access = Access(checks.flag("trust_file", trust_file))
    files = read_files(path)
    if is_url(files[0]):
        raise UsageError(f"path must be a local file; got {quote(files[0])}")
    contents = list_contents(files[0], access)
    named = [find_entry(contents, "datasets", name) for name in datasets or ()]
    features, target = choose_columns(contents, named[0].name if named else None, None)
    if not features:
        contents.refuse_unusable()
    entries = named or contents.with_rows_of(features[0])
    rows = scan_files(files, [entry.name for entry in entries], access).datasets[0].rows
    section = max(1, _SECTION_VALUES // max(prod(entry.column.shape) for entry in entries))
    step = section * _SECTIONS
    tasks = [range(start, min(start + step, rows)) for start in range(0, rows, step)]
    sum_up = functools.partial(_sum_up, files=files, entries=entries, access=access, section=section)
    columns: list[_Moments] = []
    for task, moments in zip(tasks, run_tasks(executor, sum_up, tasks), strict=True):
        columns = _join(columns, moments)
        if progress is not None:
            progress("adding up", task.stop, rows)
    results = tuple(column.result(entry) for column, entry in zip(columns, entries, strict=True))
    shown_path = read_path(path) if isinstance(path, (str, os.PathLike)) else contents.path
    return DataStats(shown_path, rows, results, _code(shown_path, results, features[0], target, datasets))


def _sum_up(
    rows: range, *, files: Sequence[str], entries: Sequence[Entry], access: Access, section: int
) -> list[_Moments]:
    """Return the moments of each dataset over some rows."""
    names = [entry.name for entry in entries]
    windows = read_windows(files, names, start=rows.start, stop=rows.stop, access=access)
    moments: list[_Moments] = []
    for piece in even_pieces((window for _, window in windows), section):
        moments = _join(moments, [_moments(piece[entry.name], entry) for entry in entries])
    return moments


def _join(moments: list[_Moments], other: list[_Moments]) -> list[_Moments]:
    if not (moments and other):
        return moments or other
    return [first.join(second) for first, second in zip(moments, other, strict=True)]


@dataclass
class _Moments:
    """Statistics of some stored rows of a dataset. Arrays have one number per entry of the last axis."""

    left_out: np.ndarray  # numbers of missing values, NaN and infinities
    low: float
    high: float
    labels: Counter[int] | None  # number of rows by value, or None if the values are not labels
    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray  # of deviations from the mean

    def join(self, other: _Moments) -> _Moments:
        """Return the statistics of both sets of rows."""
        total = np.maximum(self.count + other.count, 1)
        shift = other.mean - self.mean
        labels = None if self.labels is None or other.labels is None else self.labels + other.labels
        return _Moments(
            self.left_out + other.left_out,
            min(self.low, other.low), max(self.high, other.high),
            labels if labels is None or len(labels) <= _MOST_CLASSES else None,
            self.count + other.count,
            self.mean + shift * (other.count / total),
            self.squares + other.squares + np.square(shift) * (self.count * other.count / total),
        )  # fmt: skip

    def result(self, entry: Entry) -> ColumnStats:
        """Return the statistics of physical values."""
        packing = entry.packing or Packing()
        factor, offset = packing.factor, packing.offset
        variance = self.squares / np.maximum(self.count, 1)
        known = self.low <= self.high
        ends = sorted(end * factor + offset for end in (self.low, self.high)) if known else [None, None]
        weights = None
        if self.labels and min(self.labels) >= 0:
            rows = self.labels.total()
            weights = {k: rows / (len(self.labels) * n) for k, n in sorted(self.labels.items())}
        missing, nans, infinite = self.left_out.tolist()
        return ColumnStats(
            name=entry.name, shape=entry.column.shape, dtype=np.dtype(entry.dtype).newbyteorder("=").name,
            mean=tuple((self.mean * factor + offset).tolist()), variance=tuple((variance * factor**2).tolist()),
            minimum=ends[0], maximum=ends[1],
            nan_count=nans, infinite_count=infinite, missing_count=missing,
            class_counts=dict(sorted(self.labels.items())) if self.labels else None, class_weight=weights,
        )  # fmt: skip


def _moments(values: np.ndarray, entry: Entry) -> _Moments:
    packing = entry.packing or Packing()
    values = packing.apply_sign(values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1))
    missing = packing.is_missing(values)
    labels = None
    if entry.column.may_be_labels:
        classes, rows = np.unique(values[~missing], return_counts=True)
        if len(classes) <= _MOST_CLASSES:
            labels = Counter({int(value): int(count) for value, count in zip(classes, rows, strict=True)})
    flat = values.astype(np.float64)
    finite = np.isfinite(flat) & ~missing
    where: Any = True if finite.all() else finite
    left_out = [np.count_nonzero(mask) for mask in (missing, np.isnan(flat), np.isinf(flat) & ~missing)]
    count = np.count_nonzero(finite, axis=0).astype(np.float64)
    mean = flat.sum(axis=0, where=where) / np.maximum(count, 1)
    return _Moments(
        np.array(left_out),
        float(flat.min(where=where, initial=np.inf)), float(flat.max(where=where, initial=-np.inf)), labels,
        count, mean, np.square(flat - mean).sum(axis=0, where=where),
    )  # fmt: skip


def _code(path: str, columns: Sequence[ColumnStats], x: str, y: str | None, datasets: Sequence[str] | None) -> str:
    """Return lines of Python that use the statistics, or ""."""
    lines = []
    for column in columns:
        result = f"stats[{column.name!r}]"
        if column.name == x and column.class_weight is None:
            axis, entry = (-1, "") if column.shape else (None, "[0]")
            moments = f"mean={result}.mean{entry}, variance={result}.variance{entry}"
            lines.append(f"normalization = keras.layers.Normalization(axis={axis}, {moments})")
        if column.name == y and len(column.class_weight or ()) > 1:
            lines.append(f"class_weight = {result}.class_weight")
    arguments = repr(path)
    arguments += "" if datasets is None else f", {list(datasets)!r}"
    return "\n".join([f"stats = kerasmem.data.stats({arguments})", *lines] if lines else [])
