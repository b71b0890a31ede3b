"""`data_stats`: mean, variance, range and class weights of a file's datasets, in one pass through it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.datatools.inspecting.inspection import choose_pair, count_classes
from kerasmem.datatools.inspecting.listing import Contents, list_contents
from kerasmem.datatools.inspecting.results import ColumnStats, DataStats
from kerasmem.datatools.progress import Progress
from kerasmem.errors import UsageError
from kerasmem.hdf5.layout import DatasetLayout, plain_name, shown
from kerasmem.hdf5.settings import Access, read_path
from kerasmem.streaming.file_order import read_windows

_PIECE_VALUES = 1 << 18  # taken together as float64: they stay in the processor's cache
_MOST_SHOWN = 16  # numbers written out in code


@checks.former_names(names="datasets")
def data_stats(
    path: str | os.PathLike[str],
    datasets: Sequence[str] | None = None,
    *,
    scale: float = 1.0,
    allow_external: bool = False,
    allow_hdf5_filters: bool = False,
    progress: Progress | None = None,
) -> DataStats:
    """Return mean, variance, range and class weights of datasets, for `keras.layers.Normalization` and `class_weight`.

    Means and variances are those that `Normalization(axis=-1).adapt` finds: over all axes but the last. They are taken
    piece by piece in float64 and put together as Chan, Golub and LeVeque do, which loses no digits however many rows
    there are and however far from 0 the values lie. NaN and infinity are counted and left out.

    Args:
        path: the HDF5 file.
        datasets: the datasets, of equally many rows; None for all that go with the largest.
        scale: the factor that x will be multiplied by, such as 1/255; applied to the features, not to labels.
        allow_external: follow what leads into other files.
        allow_hdf5_filters: have HDF5 undo filters that kerasmem cannot, unchecked.
        progress: called with what goes on, the rows done and all rows.

    Raises:
        DataError: the file cannot be read.
        UsageError: a name is none of its datasets.

    Examples:
        >>> import h5py, numpy as np
        >>> with h5py.File("/tmp/stats.h5", "w") as f:
        ...     f["x"], f["y"] = np.arange(8.0).reshape(4, 2), [0, 0, 0, 1]
        >>> stats = data_stats("/tmp/stats.h5")
        >>> stats["x"].mean, stats["x"].variance
        ((3.0, 4.0), (5.0, 5.0))
        >>> {label: round(weight, 3) for label, weight in stats["y"].class_weight.items()}
        {0: 0.667, 1: 2.0}
    """
    scale = checks.number("scale", scale, least=-math.inf)
    access = Access(allow_external=allow_external, allow_hdf5_filters=allow_hdf5_filters)
    contents = list_contents(read_path(path), access)
    first, second = choose_pair(contents, datasets[0] if datasets else None, None)
    if first is None:
        contents.refuse_unusable()
    layouts = _choose_layouts(contents, first, datasets)
    columns = {layout.name: _Moments(layout) for layout in layouts}
    rows = 0
    for start, window in read_windows([contents.path], list(columns), access=access):
        for name, values in window.items():
            columns[name].add(values)
        rows = start + len(next(iter(window.values())))
        if progress is not None:
            progress("adding up", rows, layouts[0].rows)
    results = tuple(column.result(scale) for column in columns.values())
    return DataStats(contents.path, rows, scale, results, _code(contents.path, results, first, second, datasets, scale))


def _choose_layouts(contents: Contents, first: str, datasets: Sequence[str] | None) -> list[DatasetLayout]:
    """Return the datasets that were named, or all that have as many rows as the first."""
    found = contents.with_rows_of(first)
    if not datasets:
        return found
    for name in datasets:
        choose_pair(contents, name, None)
    wanted = [plain_name(name) for name in datasets]
    found = [layout for layout in found if layout.name in wanted]
    if len(found) < len(wanted):
        raise UsageError(
            f"datasets: {', '.join(map(shown, wanted))} differ in their number of rows; take them one by one"
        )
    return found


class _Moments:
    """Count, mean and sum of squared deviations, a number for each entry of the last axis."""

    def __init__(self, layout: DatasetLayout) -> None:
        may_be_labels = np.dtype(layout.dtype).kind in "iub" and prod(layout.row_shape) == 1
        self.layout = layout
        self.counts: Counter[int] | None = Counter() if may_be_labels else None  # rows of each value
        self.nans = self.infinite = self.rows = 0
        self.low, self.high = np.inf, -np.inf
        self._state: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def add(self, values: np.ndarray) -> None:
        if self.counts is not None and not count_classes(self.counts, values):
            self.counts = None
        self.rows += len(values)
        width = self.layout.shape[-1] if self.layout.row_shape else 1
        flat = values.reshape(-1, width)
        step = max(1, _PIECE_VALUES // width)
        for first in range(0, len(flat), step):
            self._add(flat[first : first + step].astype(np.float64))

    def _add(self, values: np.ndarray) -> None:
        finite = np.isfinite(values)
        where: Any = True
        if not finite.all():
            where = finite
            nans = int(np.count_nonzero(np.isnan(values)))
            self.nans += nans
            self.infinite += finite.size - int(np.count_nonzero(finite)) - nans
        count = np.count_nonzero(finite, axis=0).astype(np.float64)
        mean = values.sum(axis=0, where=where) / np.maximum(count, 1)
        squares = np.square(values - mean).sum(axis=0, where=where)
        self.low = min(self.low, float(values.min(where=where, initial=np.inf)))
        self.high = max(self.high, float(values.max(where=where, initial=-np.inf)))
        if self._state is None:
            self._state = count, mean, squares
            return
        count0, mean0, squares0 = self._state
        total = np.maximum(count0 + count, 1)
        shift = mean - mean0
        self._state = (
            count0 + count,
            mean0 + shift * (count / total),
            squares0 + squares + np.square(shift) * (count0 * count / total),
        )

    def result(self, scale: float) -> ColumnStats:
        assert self._state is not None
        count, mean, squares = self._state
        scale = 1.0 if self.counts is not None else scale
        variance = squares / np.maximum(count, 1)
        known = self.low <= self.high
        ends = sorted((self.low * scale, self.high * scale)) if known else [None, None]
        weights = None
        if self.counts and min(self.counts) >= 0:
            weights = {k: self.rows / (len(self.counts) * n) for k, n in sorted(self.counts.items())}
        native = np.dtype(self.layout.dtype).newbyteorder("=").name
        return ColumnStats(
            name=self.layout.name, shape=self.layout.row_shape, dtype=native,
            mean=tuple((mean * scale).tolist()), variance=tuple((variance * scale**2).tolist()),
            minimum=ends[0], maximum=ends[1], nan_count=self.nans, infinite_count=self.infinite,
            class_counts=dict(sorted(self.counts.items())) if self.counts else None, class_weight=weights,
        )  # fmt: skip


def _code(
    path: str, columns: Sequence[ColumnStats], x: str, y: str | None, datasets: Sequence[str] | None, scale: float
) -> str:
    """Return lines of Python: numbers where they are few, and a call where they are many."""
    by_name = {column.name: column for column in columns}
    call = _call(path, datasets, scale)
    lines: list[str] = []
    features, labels = by_name.get(x), by_name.get(y or "")
    if features is not None and features.class_weight is None:
        axis, texts = (-1, "[{}]") if features.shape else (None, "{}")
        mean, variance = (
            texts.format(", ".join(f"{value:.9g}" for value in values)) for values in (features.mean, features.variance)
        )
        if len(features.mean) > _MOST_SHOWN:
            lines += [call, f"stats = found[{x!r}]"]
            mean, variance = "stats.mean", "stats.variance"
        lines.append(f"normalization = keras.layers.Normalization(axis={axis}, mean={mean}, variance={variance})")
    if labels is not None and labels.class_weight is not None and len(labels.class_weight) > 1:
        weights = "{" + ", ".join(f"{k}: {weight:.6g}" for k, weight in labels.class_weight.items()) + "}"
        if len(labels.class_weight) > _MOST_SHOWN:
            lines += [] if call in lines else [call]
            weights = f"found[{y!r}].class_weight"
        lines.append(f"class_weight = {weights}")
    return "\n".join(lines)


def _call(path: str, datasets: Sequence[str] | None, scale: float) -> str:
    more = "" if datasets is None else f", {list(datasets)!r}"
    more += "" if scale == 1 else f", scale={scale!r}"
    return f"found = kerasmem.data_stats({path!r}{more})"
