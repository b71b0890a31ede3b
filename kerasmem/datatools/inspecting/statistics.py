"""`kerasmem.data.stats`: mean, variance, range and class weights of a file's datasets, in one pass through it."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from math import prod
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.datatools.inspecting.inspection import MOST_CLASSES, choose_pair, count_classes
from kerasmem.datatools.inspecting.listing import Contents, list_contents
from kerasmem.datatools.inspecting.results import ColumnStats, DataStats
from kerasmem.datatools.progress import Progress, tell_nobody
from kerasmem.errors import UsageError
from kerasmem.hdf5.layout import DatasetLayout, plain_name, shown
from kerasmem.hdf5.remote.urls import is_url
from kerasmem.hdf5.scan import scan_files
from kerasmem.hdf5.settings import Access, read_files, read_path
from kerasmem.processes.executors import run_tasks
from kerasmem.streaming.file_order import read_windows

_PIECE_VALUES = 1 << 18  # taken together as float64: they stay in the processor's cache
_SECTION_VALUES = 1 << 24  # added up by themselves, whoever does it
_TASK_VALUES = 1 << 28  # that a worker adds up at a time
_MOST_SHOWN = 16  # numbers written out in code


def stats(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    datasets: Sequence[str] | None = None,
    *,
    scale: float = 1.0,
    trust_file: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> DataStats:
    """Return mean, variance, range and class weights of datasets, for `keras.layers.Normalization` and `class_weight`.

    Means and variances are those that `Normalization(axis=-1).adapt` finds: over all axes but the last. They are taken
    piece by piece in float64 and put together as Chan, Golub and LeVeque do, which loses no digits however many rows
    there are and however far from 0 the values lie. NaN and infinity are counted and left out. The figures are the same
    to the last digit whatever reads the data.

    Args:
        path: the HDF5 file, or an index, a list or a pattern of files that are read as one.
        datasets: the datasets, of equally many rows; None for all that go with the largest.
        scale: the factor that x will be multiplied by, such as 1/255; applied to the features, not to labels.
        trust_file: as for `H5ChunkSequence`.
        executor: as for `kerasmem.data.convert`. Its workers must see the files under the same names.
        progress: called with what goes on, the rows done and all rows.

    Raises:
        DataError: the file cannot be read.
        UsageError: a name is none of its datasets.

    Examples:
        >>> import h5py, numpy as np
        >>> with h5py.File("/tmp/stats.h5", "w") as f:
        ...     f["x"], f["y"] = np.arange(8.0).reshape(4, 2), [0, 0, 0, 1]
        >>> found = stats("/tmp/stats.h5")
        >>> found["x"].mean, found["x"].variance
        ((3.0, 4.0), (5.0, 5.0))
        >>> {label: round(weight, 3) for label, weight in found["y"].class_weight.items()}
        {0: 0.667, 1: 2.0}
    """
    scale = checks.number("scale", scale, least=-math.inf)
    access = Access(checks.flag("trust_file", trust_file))
    files = read_files(path)
    contents = list_contents(_first_file(files), access)
    first, second = choose_pair(contents, datasets[0] if datasets else None, None)
    if first is None:
        contents.refuse_unusable()
    layouts = scan_files(files, [each.name for each in _choose_layouts(contents, first, datasets)], access).datasets
    rows = layouts[0].rows
    section = max(1, _SECTION_VALUES // max(prod(layout.row_shape) for layout in layouts))
    step = rows if executor is None else section * max(1, _TASK_VALUES // _SECTION_VALUES)
    tasks = [range(start, min(start + step, rows)) for start in range(0, rows, step)]
    tell = progress or tell_nobody
    add_up = functools.partial(
        _add_up, files=files, layouts=layouts, access=access, section=section,
        progress=tell if executor is None else None,
    )  # fmt: skip
    columns: list[_Moments] = []
    for task, found in zip(tasks, run_tasks(executor, add_up, tasks), strict=True):
        columns = [one.join(other) for one, other in zip(columns, found, strict=True)] if columns else found
        tell("adding up", task.stop, rows)
    results = tuple(column.result(scale) for column in columns)
    given = read_path(path) if isinstance(path, (str, os.PathLike)) else contents.path
    return DataStats(given, rows, scale, results, _code(given, results, first, second, datasets, scale))


def _first_file(files: Sequence[str | Mapping[str, str]]) -> str:
    first = files[0]
    if not isinstance(first, str) or is_url(first):
        raise UsageError("path: statistics are of files on this machine, one after another")
    return first


def _add_up(
    rows: range,
    *,
    files: Sequence[str | Mapping[str, str]],
    layouts: Sequence[DatasetLayout],
    access: Access,
    section: int,
    progress: Progress | None,
) -> list[_Moments]:
    """Return what some rows of each dataset come to; they begin where a section does."""
    columns = {layout.name: _Moments(layout, section, from_start=not rows.start) for layout in layouts}
    for start, window in read_windows(files, list(columns), start=rows.start, stop=rows.stop, access=access):
        for name, values in window.items():
            columns[name].add(values)
        if progress is not None:
            progress("adding up", start + len(values), rows.stop)
    for column in columns.values():
        column.finish()
    return list(columns.values())


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


_State = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Count, mean and sum of squared deviations, a number for each entry of the last axis."""


def _together(one: _State, other: _State) -> _State:
    (count0, mean0, squares0), (count, mean, squares) = one, other
    total = np.maximum(count0 + count, 1)
    shift = mean - mean0
    return (
        count0 + count,
        mean0 + shift * (count / total),
        squares0 + squares + np.square(shift) * (count0 * count / total),
    )


class _Moments:
    """What a run of rows comes to, in sections that begin at the same rows whoever adds them up, and in what order.

    Args:
        layout: the dataset.
        section: rows of a section.
        from_start: whether it begins with the dataset's first row; sections are then put together as they end.
    """

    def __init__(self, layout: DatasetLayout, section: int, *, from_start: bool) -> None:
        self.layout = layout
        self.counts: Counter[int] | None = Counter() if layout.may_be_labels else None  # rows of each value
        self.nans = self.infinite = self.rows = 0
        self.low, self.high = np.inf, -np.inf
        width = layout.shape[-1] if layout.row_shape else 1
        self._section = section * (prod(layout.row_shape) // width)
        self._left, self._from_start = self._section, from_start
        self._ended: list[_State] = []
        self._state: _State | None = None  # of the section that is being added up
        self._piece = np.empty((max(1, _PIECE_VALUES // width), width))
        self._held = 0

    def add(self, values: np.ndarray) -> None:
        """Add the rows that come next."""
        if self.counts is not None and not count_classes(self.counts, values):
            self.counts = None
        self.rows += len(values)
        flat = values.reshape(-1, self._piece.shape[1])
        while len(flat):
            taken = min(len(flat), len(self._piece) - self._held, self._left)
            self._piece[self._held : self._held + taken] = flat[:taken]
            self._held += taken
            self._left -= taken
            flat = flat[taken:]
            if self._held == len(self._piece):
                self._end_piece()
            if not self._left:
                self._end_section()

    def finish(self) -> None:
        """End the section that has begun, and keep what can be put together with others."""
        self._end_section()
        self._piece = self._piece[:0].copy()

    def join(self, other: _Moments) -> _Moments:
        """Add what the rows after these come to."""
        self._ended = [functools.reduce(_together, self._ended + other._ended)]
        counts = None if self.counts is None or other.counts is None else self.counts + other.counts
        self.counts = counts if counts is None or len(counts) <= MOST_CLASSES else None
        self.rows += other.rows
        self.nans += other.nans
        self.infinite += other.infinite
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        return self

    def _end_section(self) -> None:
        if self._held:
            self._end_piece()
        if self._state is not None:
            self._ended.append(self._state)
        self._state, self._left = None, self._section
        if self._from_start and len(self._ended) > 1:
            self._ended = [functools.reduce(_together, self._ended)]

    def _end_piece(self) -> None:
        values, self._held = self._piece[: self._held], 0
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
        found = count, mean, squares
        self._state = found if self._state is None else _together(self._state, found)

    def result(self, scale: float) -> ColumnStats:
        """Return the figures, of values times a scale."""
        ((count, mean, squares),) = self._ended
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
    return f"found = kerasmem.data.stats({path!r}{more})"
