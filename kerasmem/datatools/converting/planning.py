"""What a conversion will write, settled before the first row: fields, parts, chunks, buckets, disk space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kerasmem.datatools.converting.casting import written_type
from kerasmem.datatools.converting.chunk_store import Target
from kerasmem.datatools.converting.fields import ColumnFilter, Field, Join, check_names, choose_fields
from kerasmem.datatools.converting.settings import WriteSettings
from kerasmem.datatools.converting.sizing import Sizes, choose_chunk_rows, choose_sizes
from kerasmem.datatools.converting.sources.protocol import RowSource, even_pieces
from kerasmem.datatools.converting.splitting import GroupedSplit, RandomSplit, Split
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import shown
from kerasmem.units import format_size

_MOST_KEYS = 5_000_000  # groups that are remembered
_SURVEY_ROWS = 1 << 16

Progress = Callable[[str, int, int], None]
"""Told what goes on, how many rows are done and of how many."""


@dataclass(frozen=True)
class WritePlan:
    """What will be written.

    Args:
        read: the columns as read, as far as they are needed.
        cast: the same columns in the types written.
        joins: the datasets, and the columns they are made of.
        rows: rows read.
        parts: the names of the parts.
        assignment: where each row goes.
        sizes: how memory is divided.
        targets: the datasets of all outputs; those of a part lie together, in the order of `joins`.
        buckets: buckets of each part.
        key: the column that the assignment looks at.
    """

    read: tuple[Field, ...]
    cast: tuple[Field, ...]
    joins: tuple[Join, ...]
    rows: int
    parts: tuple[str, ...]
    assignment: Split
    sizes: Sizes
    targets: tuple[Target, ...]
    buckets: tuple[int, ...]
    key: str | None

    @property
    def fields(self) -> list[Field]:
        """The datasets of a part."""
        return [join.field for join in self.joins]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as written."""
        return sum(field.row_bytes for field in self.fields)


def make_plan(source: RowSource, settings: WriteSettings, *, threads: int, progress: Progress) -> WritePlan:
    """Settle what is written; reads the columns that this depends on.

    Raises:
        DataError: the columns cannot be written.
        UsageError: the settings do not fit the source.
    """
    wanted = ColumnFilter(settings.columns, settings.drop, ())
    kept = [field for field in source.fields if wanted.keeps(field.name)]
    limits = _find_limits(source, kept, progress) if settings.narrow else {}
    cast = [
        replace(field, dtype=written_type(field, keep_float64=settings.keep_float64, limits=limits.get(field.name)))
        for field in kept
    ]
    unused = [replace(field) for field in source.fields if field not in kept]
    joins = choose_fields([*cast, *unused], settings.columns, settings.drop)
    check_names([join.field for join in joins], "output")
    needed = {column for join in joins for column in join.columns}
    read = tuple(field for field in kept if field.name in needed)
    key = _key_column(source, joins, settings)
    counts = {0: source.rows} if key is None else _count_keys(source, key, progress)
    shares = list(settings.shares.values())
    assignment: Split
    if settings.group is not None:
        assignment = GroupedSplit(counts, shares, settings.seed)
    else:
        assignment = RandomSplit(counts, shares, settings.seed)
    for name, size in zip(settings.shares, assignment.sizes, strict=True):
        if not size:
            raise UsageError(f"split: no rows are left for {name!r} of {source.rows:,}; give it a larger share")
    row_bytes = max(sum(field.row_bytes for field in read), sum(join.field.row_bytes for join in joins))
    sizes = choose_sizes(row_bytes, len(joins), len(shares), settings.memory, threads=threads, shuffle=settings.shuffle)
    targets = []
    for number, (name, rows) in enumerate(zip(settings.shares, assignment.sizes, strict=True)):
        prefix = f"{name}/" if settings.as_groups else ""
        for join in joins:
            chunk = choose_chunk_rows(join.field.row_bytes, rows, settings.batch_size, sizes.chunk_bytes)
            targets.append(
                Target(0 if settings.as_groups else number, prefix + join.field.name, join.field, rows, chunk)
            )
    written = sum(join.field.row_bytes for join in joins)
    buckets = tuple(max(1, -(-rows * written // sizes.bucket_bytes)) for rows in assignment.sizes)
    return WritePlan(
        read=read,
        cast=tuple(field for field in cast if field.name in needed),
        joins=tuple(joins),
        rows=source.rows,
        parts=tuple(settings.shares),
        assignment=assignment,
        sizes=sizes,
        targets=tuple(targets),
        buckets=buckets,
        key=key,
    )


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
    if values.dtype.kind == "f":
        if not np.isfinite(values).all() or (values != np.rint(values)).any() or (np.abs(values) >= 2**62).any():
            raise DataError(
                f"{shown(name)}: holds numbers with fractions, NaN or infinity; classes or groups are whole numbers "
                "or texts"
            )
    elif values.dtype.kind not in "iub":
        raise DataError(f"{shown(name)}: has the type {values.dtype}; classes or groups are whole numbers or texts")
    return values.astype(np.int64)


def _key_column(source: RowSource, joins: Sequence[Join], settings: WriteSettings) -> str | None:
    key = settings.key
    if key is None:
        return None
    option = "stratify" if settings.stratify is not None else "group"
    for join in joins:
        if join.field.name == key and len(join.columns) == 1:
            return join.columns[0]
    if key not in [field.name for field in source.fields]:
        names = ", ".join(shown(field.name, 60) for field in source.fields[:12])
        raise UsageError(f"{option}: there is no column {key!r}; there are {names}")
    return key


def _count_keys(source: RowSource, key: str, progress: Progress) -> dict[int, int]:
    counts: dict[int, int] = {}
    done = 0
    for piece in even_pieces(source.pieces(0, _SURVEY_ROWS, [key]), _SURVEY_ROWS):
        found, rows = np.unique(keys_of(piece[key], key), return_counts=True)
        for value, count in zip(found.tolist(), rows.tolist(), strict=True):
            counts[value] = counts.get(value, 0) + count
        if len(counts) > _MOST_KEYS:
            raise DataError(
                f"{shown(key)}: has more than {_MOST_KEYS:,} different values; they cannot all be remembered"
            )
        done += len(piece[key])
        progress("counting", done, source.rows)
    return counts


def _find_limits(source: RowSource, fields: Sequence[Field], progress: Progress) -> dict[str, tuple[int, int]]:
    names = [field.name for field in fields if np.dtype(field.dtype).kind in "iu"]
    limits: dict[str, tuple[int, int]] = {}
    done = 0
    if not names:
        return limits
    widest = max(field.row_bytes for field in fields if field.name in names)
    rows = max(1, min(_SURVEY_ROWS, (1 << 22) // max(1, widest)))
    for piece in source.pieces(0, rows, names):
        for name, values in piece.items():
            low, high = int(values.min()), int(values.max())
            before = limits.get(name, (low, high))
            limits[name] = (min(low, before[0]), max(high, before[1]))
        done += len(next(iter(piece.values())))
        progress("looking for the smallest types", done, source.rows)
    return limits


def fingerprint(source: RowSource, plan: WritePlan, settings: WriteSettings) -> dict[str, Any]:
    """Return what has to be the same for an interrupted conversion to be gone on with."""
    compression = settings.compression
    return {
        "version": 1,
        "sources": source.identity(),
        "rows": plan.rows,
        "datasets": [[t.file, t.name, t.field.dtype, t.field.shape, t.rows, t.chunk_rows] for t in plan.targets],
        "columns": [[field.name, field.dtype, field.shape, field.class_names] for field in plan.read],
        "joins": [list(join.columns) for join in plan.joins],
        "order": [settings.shuffle, settings.seed, dict(settings.shares), settings.stratify, settings.group],
        "sizes": [plan.sizes.piece_rows, plan.sizes.run_bytes, list(plan.buckets)],
        "compression": [compression.kind, compression.level],
    }
