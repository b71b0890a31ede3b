"""What a conversion will write, settled before the first row: fields, parts, chunks, buckets, disk space."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kerasmem.datatools.converting.casting import written_type
from kerasmem.datatools.converting.fields import Field, Target, check_names
from kerasmem.datatools.converting.settings import ReadOptions, WriteSettings
from kerasmem.datatools.converting.sizing import Sizes, choose_chunk_rows, choose_sizes
from kerasmem.datatools.converting.sources.row_source import RowSource, even_pieces, rows_in
from kerasmem.datatools.converting.splitting import GroupedSplit, RandomSplit
from kerasmem.datatools.inspecting.inspection import count_classes
from kerasmem.datatools.progress import Progress
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import shown
from kerasmem.units import format_size

_MOST_KEYS = 5_000_000  # groups that are remembered
_SURVEY_ROWS = 1 << 16
_SURVEY_BYTES = 1 << 22


@dataclass(frozen=True)
class WritePlan:
    """What will be written.

    Args:
        read: the columns as read, as far as they are written.
        cast: the same columns in the types written.
        datasets: the datasets of a part.
        rows: rows read.
        assignment: where each row goes.
        sizes: how memory is divided.
        targets: the datasets of all outputs; those of a part lie together, in the order of `datasets`.
        buckets: buckets of each part.
        key: the column that the assignment looks at.
    """

    read: tuple[Field, ...]
    cast: tuple[Field, ...]
    datasets: tuple[Field, ...]
    rows: int
    assignment: RandomSplit | GroupedSplit
    sizes: Sizes
    targets: tuple[Target, ...]
    buckets: tuple[int, ...]
    key: str | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as written."""
        return sum(field.row_bytes for field in self.datasets)


def make_plan(source: RowSource, settings: WriteSettings, options: ReadOptions, progress: Progress) -> WritePlan:
    """Settle what is written; reads the columns that this depends on.

    Raises:
        DataError: the columns cannot be written.
        UsageError: the settings do not fit the source.
    """
    read = tuple(field for field in source.fields if options.columns.writes(field.name))
    limits = _find_limits(source, read, progress) if settings.narrow_integers else {}
    cast = tuple(
        replace(field, dtype=written_type(field, keep_float64=settings.keep_float64, limits=limits.get(field.name)))
        for field in read
    )
    datasets = options.columns.datasets(cast)
    check_names(datasets, "output")
    key = _key_column(source, datasets, settings)
    counts = {0: source.rows} if key is None else _count_keys(source, key, progress)
    split: type[RandomSplit | GroupedSplit] = RandomSplit if settings.group is None else GroupedSplit
    assignment = split(counts, list(settings.shares.values()), settings.seed)
    parts = dict(zip(settings.shares, assignment.sizes, strict=True))
    for name, rows in parts.items():
        if not rows:
            raise UsageError(f"split: no rows are left for {name!r} of {source.rows:,}; give it a larger share")
    written = sum(field.row_bytes for field in datasets)
    sizes = choose_sizes(
        max(written, sum(field.row_bytes for field in read)), len(datasets), len(parts), settings.memory,
        threads=options.threads, shuffle=settings.shuffle,
    )  # fmt: skip
    targets = []
    for number, (name, rows) in enumerate(parts.items()):
        file, group = (0, f"{name}/") if settings.as_groups else (number, "")
        for field in datasets:
            chunk_rows = choose_chunk_rows(field.row_bytes, rows, settings.batch_size, sizes.chunk_bytes)
            targets.append(Target(file, group + field.name, field, rows, chunk_rows))
    buckets = tuple(max(1, -(-rows * written // sizes.bucket_bytes)) for rows in parts.values())
    return WritePlan(read, cast, datasets, source.rows, assignment, sizes, tuple(targets), buckets, key)


def check_space(plan: WritePlan, folder: str, *, shuffle: bool, packs: bool) -> None:
    """Refuse to begin where the disk has no room.

    Raises:
        DataError: it has not.
    """
    needed = plan.rows * plan.row_bytes * (int(shuffle) + int(not packs))
    free = shutil.disk_usage(folder).free
    if needed > free:
        why = ", half of it for shuffling" if shuffle and not packs else ""
        raise DataError(
            f"{shown(os.path.abspath(folder))}: has {format_size(free)} free, and {format_size(needed)} are "
            f"needed{why}; "
            "choose another disk, compression, or fewer columns"
        )


def keys_of(values: np.ndarray, name: str) -> np.ndarray:
    """Return one whole number a row: the class of one-hot rows, the values of others.

    Raises:
        DataError: these are neither.
    """
    if values.ndim > 1 and values[0].size > 1:
        if values.ndim > 2:
            raise DataError(
                f"{shown(name)}: has rows of shape {values.shape[1:]}; classes or groups are one number a row, or "
                "one-hot"
            )
        return values.argmax(axis=1).astype(np.int64)
    values = values.reshape(len(values))
    if values.dtype.kind not in "fiub":
        raise DataError(f"{shown(name)}: has the type {values.dtype}; classes or groups are whole numbers or texts")
    with np.errstate(invalid="ignore"):
        keys = values.astype(np.int64)
    if values.dtype.kind == "f" and (keys != values).any():
        raise DataError(
            f"{shown(name)}: holds numbers with fractions, NaN or infinity; classes or groups are whole numbers or "
            "texts"
        )
    return keys


def _key_column(source: RowSource, datasets: Sequence[Field], settings: WriteSettings) -> str | None:
    key = settings.key
    if key is None:
        return None
    for field in datasets:
        if field.name == key and len(field.columns) == 1:
            return field.columns[0]
    if key not in [field.name for field in source.fields]:
        option = "stratify" if settings.stratify is not None else "group"
        names = ", ".join(shown(field.name, 60) for field in source.fields[:12])
        raise UsageError(f"{option}: there is no column {key!r}; there are {names}")
    return key


def _count_keys(source: RowSource, key: str, progress: Progress) -> dict[int, int]:
    counts: Counter[int] = Counter()
    done = 0
    for piece in even_pieces(source.pieces(0, _SURVEY_ROWS, [key]), _SURVEY_ROWS):
        if not count_classes(counts, keys_of(piece[key], key), _MOST_KEYS):
            raise DataError(
                f"{shown(key)}: has more than {_MOST_KEYS:,} different values; they cannot all be remembered"
            )
        done += rows_in(piece)
        progress("counting", done, source.rows)
    return counts


def _find_limits(source: RowSource, fields: Sequence[Field], progress: Progress) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest value of each column of whole numbers."""
    whole = [field for field in fields if np.dtype(field.dtype).kind in "iu"]
    limits: dict[str, tuple[int, int]] = {}
    if not whole:
        return limits
    rows = max(1, min(_SURVEY_ROWS, _SURVEY_BYTES // max(1, *(field.row_bytes for field in whole))))
    done = 0
    for piece in source.pieces(0, rows, [field.name for field in whole]):
        for name, values in piece.items():
            low, high = int(values.min()), int(values.max())
            before = limits.get(name, (low, high))
            limits[name] = (min(low, before[0]), max(high, before[1]))
        done += rows_in(piece)
        progress("looking for the smallest types", done, source.rows)
    return limits


def fingerprint(source: RowSource, plan: WritePlan, settings: WriteSettings) -> dict[str, Any]:
    """Return what has to be the same for an interrupted conversion to be gone on with."""
    compression = settings.compression
    return {
        "version": 2,
        "sources": source.identity(),
        "rows": plan.rows,
        "datasets": [[t.file, t.name, t.field.dtype, t.field.shape, t.rows, t.chunk_rows] for t in plan.targets],
        "columns": [[field.name, field.dtype, field.shape, field.class_names] for field in plan.read],
        "joins": [list(field.columns) for field in plan.datasets],
        "order": [settings.shuffle, settings.seed, dict(settings.shares), settings.stratify, settings.group],
        "sizes": [plan.sizes.piece_rows, plan.sizes.run_bytes, list(plan.buckets)],
        "compression": [compression.kind, compression.level],
    }
