"""What a conversion will write, settled before the first row: fields, parts, chunks, buckets, disk space."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.datatools.converting.casting import written_type
from kerasmem.datatools.converting.fields import Field, Target, check_names
from kerasmem.datatools.converting.settings import ReadOptions, WriteSettings
from kerasmem.datatools.converting.sizing import Sizes, choose_chunk_rows, choose_sizes
from kerasmem.datatools.converting.sources.row_source import RowSource
from kerasmem.datatools.converting.splitting import RandomSplit
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import shown
from kerasmem.units import format_size


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
    """

    read: tuple[Field, ...]
    cast: tuple[Field, ...]
    datasets: tuple[Field, ...]
    rows: int
    assignment: RandomSplit
    sizes: Sizes
    targets: tuple[Target, ...]
    buckets: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as written."""
        return sum(field.row_bytes for field in self.datasets)


def make_plan(source: RowSource, settings: WriteSettings, options: ReadOptions) -> WritePlan:
    """Settle what is written.

    Raises:
        DataError: the columns cannot be written.
        UsageError: the settings do not fit the source.
    """
    read = tuple(field for field in source.fields if options.columns.reads(field.name))
    cast = tuple(replace(field, dtype=written_type(field, keep_float64=settings.keep_float64)) for field in read)
    datasets = options.columns.datasets(cast)
    check_names(datasets, "output")
    assignment = RandomSplit(source.rows, list(settings.shares.values()), settings.seed)
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
    return WritePlan(read, cast, datasets, source.rows, assignment, sizes, tuple(targets), buckets)


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
        "order": [settings.shuffle, settings.seed, dict(settings.shares)],
        "sizes": [plan.sizes.piece_rows, plan.sizes.run_bytes, list(plan.buckets)],
        "compression": [compression.kind, compression.level],
    }
