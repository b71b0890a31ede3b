"""What a conversion will write, settled before the first row: fields, parts, chunks, buckets, disk space."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kerasmem.datatools.fields import Field, Target, check_names, written_type
from kerasmem.datatools.settings import ReadOptions, WriteSettings
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import shown
from kerasmem.units import KIB, MIB, format_size

CHUNK_BYTES = MIB
"""Size of a chunk: that of HDF5's cache of chunks, and a read of `H5ChunkSequence`.

A larger one is decoded several times over by programs that read it batch by batch through HDF5, and leaves fewer
blocks to shuffle; a smaller one costs an index entry and a system call for less data.
"""
DEFAULT_MEMORY = 512 * MIB
_PIECE_BYTES = 4 * MIB  # read and converted at a time
_PIECE_ROWS = 1 << 16
_LEAST_CHUNK = 4 * KIB
_ORDER_BYTES = 24  # beside each row: its bucket, its place, and room to sort them
_LEAST_ROWS = 4  # that a quarter of the memory has to hold
_LEAST_SHUFFLED = 16  # the same, for buckets to be of about one size


@dataclass(frozen=True)
class Sizes:
    """How a conversion divides its memory.

    Args:
        piece_rows: rows read, converted and dealt out at a time.
        chunk_bytes: bytes of a chunk.
        run_bytes: bytes of rows that are sorted by bucket and written together.
        bucket_bytes: bytes that a bucket is expected to have.
    """

    piece_rows: int
    chunk_bytes: int
    run_bytes: int
    bucket_bytes: int


@dataclass(frozen=True)
class WritePlan:
    """What will be written.

    Args:
        read: the columns as read, as far as they are written.
        cast: the same columns in the types written.
        datasets: the datasets of a part.
        rows: rows read.
        part_rows: rows of each part.
        sizes: how memory is divided.
        targets: the datasets of all outputs; those of a part lie together, in the order of `datasets`.
        buckets: buckets of each part.
    """

    read: tuple[Field, ...]
    cast: tuple[Field, ...]
    datasets: tuple[Field, ...]
    rows: int
    part_rows: tuple[int, ...]
    sizes: Sizes
    targets: tuple[Target, ...]
    buckets: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as written."""
        return sum(field.row_bytes for field in self.datasets)


def make_plan(source: RowSource, settings: WriteSettings, options: ReadOptions) -> WritePlan:
    """Plan the datasets, chunks and memory of a conversion.

    Raises:
        DataError: the columns cannot be written.
        UsageError: the settings do not fit the source.
    """
    read = tuple(field for field in source.fields if options.columns.reads(field.name))
    cast = tuple(replace(field, dtype=written_type(field, keep_float64=settings.keep_float64)) for field in read)
    datasets = options.columns.datasets(cast)
    check_names(datasets, "output")
    parts = dict(zip(settings.shares, share_out(source.rows, list(settings.shares.values())), strict=True))
    for name, rows in parts.items():
        if not rows:
            raise UsageError(f"split: no rows are left for {name!r} of {source.rows:,}; give it a larger share")
    written = sum(field.row_bytes for field in datasets)
    sizes = choose_sizes(
        max(written, sum(field.row_bytes for field in read)), len(datasets), len(parts), settings.memory,
        threads=options.threads, shuffle=settings.shuffle,
    )  # fmt: skip
    targets = []
    for file, rows in enumerate(parts.values()):
        for field in datasets:
            chunk_rows = choose_chunk_rows(field.row_bytes, rows, settings.batch_size, sizes.chunk_bytes)
            targets.append(Target(file, field, rows, chunk_rows))
    buckets = tuple(max(1, -(-rows * written // sizes.bucket_bytes)) for rows in parts.values())
    return WritePlan(read, cast, datasets, source.rows, tuple(parts.values()), sizes, tuple(targets), buckets)


def check_space(plan: WritePlan, folder: str, *, shuffle: bool, packs: bool) -> None:
    """Raise an error if the disk has too little free space.

    Raises:
        DataError: it has not.
    """
    needed = plan.rows * plan.row_bytes * (int(shuffle) + int(not packs))
    free = shutil.disk_usage(folder).free
    if needed > free:
        why = ", half of it for shuffling" if shuffle and not packs else ""
        room = f"has {format_size(free)} free, and {format_size(needed)} are needed{why}"
        raise DataError(f"{shown(os.path.abspath(folder))}: {room}; choose another disk, compression, or fewer columns")


def choose_chunk_rows(row_bytes: int, rows: int, batch_size: int, target: int = CHUNK_BYTES) -> int:
    """Return the rows of a chunk: about 1 MiB, and whole batches or an even part of one if possible.

    Args:
        row_bytes: bytes of a row, uncompressed.
        rows: rows of the dataset.
        batch_size: rows that are trained on together.
        target: bytes a chunk is meant to have.

    Examples:
        >>> choose_chunk_rows(12_288, 60_000, 32)  # 12 KiB a row: two batches of 384 KiB
        64
        >>> choose_chunk_rows(150_528, 60_000, 32)  # 147 KiB a row: an eighth of a batch
        4
    """
    most = max(1, target // max(row_bytes, 1))
    if most >= batch_size:
        wanted = most // batch_size * batch_size
    else:
        even = [k for k in range(1, most + 1) if batch_size % k == 0]
        wanted = even[-1] if 2 * even[-1] > most else most  # a batch of 97 rows has no even parts
    return max(1, min(wanted, rows))


def choose_sizes(
    row_bytes: int, fields: int, outputs: int, memory: int, *, threads: int = 2, shuffle: bool = False
) -> Sizes:
    """Return sizes that keep a conversion within `memory`.

    A quarter each is for pieces on their way, for the run or the bucket in hand, for its copy in another order, and
    for chunks that are being filled and compressed.

    Args:
        row_bytes: bytes of a row over all datasets, as read or as written, whichever is more.
        fields: datasets of an output.
        outputs: files written.
        memory: bytes.
        threads: that compress.
        shuffle: whether rows go through buckets.

    Raises:
        UsageError: the memory is too small for rows of this size.
    """
    quarter = memory // 4
    least_rows = _LEAST_SHUFFLED if shuffle else _LEAST_ROWS
    if quarter < least_rows * row_bytes:
        least = 4 * least_rows * row_bytes
        sizes = f"{format_size(memory)} is too small for rows of {format_size(row_bytes)}"
        raise UsageError(f"memory_budget: {sizes}; give at least '{-(-least // MIB)}MiB'")
    # every dataset fills a chunk of its own; those being compressed are there three times over
    chunk = min(CHUNK_BYTES, quarter // (fields * outputs + 6 * (threads + 2)))
    piece = min(_PIECE_BYTES, quarter // 6)
    return Sizes(
        piece_rows=max(1, min(_PIECE_ROWS, piece // max(row_bytes, 1))),
        chunk_bytes=max(_LEAST_CHUNK, chunk),
        run_bytes=quarter * row_bytes // (row_bytes + _ORDER_BYTES),
        bucket_bytes=quarter // 2 * row_bytes // (row_bytes + _ORDER_BYTES),
    )


def share_out(count: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers that add up to `count` and come closest to the shares.

    Examples:
        >>> share_out(10, [0.75, 0.25])
        [8, 2]
    """
    exact = [count * share for share in shares]
    whole = [math.floor(part + 1e-9) for part in exact]
    rest = sorted(range(len(shares)), key=lambda k: (whole[k] - exact[k], k))
    for k in rest[: count - sum(whole)]:
        whole[k] += 1
    return whole
