"""Write rows to new HDF5 files: in random order and in parts if asked, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from kerasmem import files
from kerasmem.datatools.chunk_writer import ChunkWriter, copy_attributes
from kerasmem.datatools.fields import Caster, Rows, join_columns
from kerasmem.datatools.listing import checksums
from kerasmem.datatools.planning import WritePlan, check_space
from kerasmem.datatools.reports import Progress
from kerasmem.datatools.settings import WriteSettings, output_paths
from kerasmem.datatools.shuffling import BucketFile, RandomSplit
from kerasmem.datatools.sources.rows import RowSource, even_pieces, rows_in
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.hdf5.format.layout import shown

PARTIAL = ".kerasmem-partial"


@dataclass(frozen=True)
class Outcome:
    """Facts of the files that a conversion wrote.

    Args:
        sums: the checksum of each dataset; None if it lies in parts.
        stored: bytes that each takes.
        size: bytes of the files.
        inexact: whole numbers that were rounded, by column.
        losses: images or values that lost something, by the note about it.
        resumed_rows: rows of parts that an interrupted run wrote.
        most_rows: of a dataset in one file.
    """

    sums: Sequence[int | None]
    stored: Sequence[int]
    size: int
    inexact: dict[str, int]
    losses: dict[str, int]
    resumed_rows: int
    most_rows: int


@dataclass(frozen=True)
class RunOptions:
    """Options that do not change the result of a conversion.

    Args:
        verify: read the files back and compare.
        force: overwrite outputs, and discard the parts of an interrupted conversion with other settings.
        progress: called with the step, the rows done and all rows.
        executor: writes the parts of an index; None for this process.
        part_bytes: bytes of rows of such a part.
        attributes_from: the HDF5 file whose attributes are copied.
        trust_file: whether that file is trusted.
        remote: how outputs behind a URL are reached, as for `H5ChunkSequence`.
    """

    verify: bool
    force: bool
    progress: Progress
    executor: Executor | None
    part_bytes: int
    attributes_from: str | None = None
    trust_file: bool = False
    remote: Mapping[str, Any] | None = None


def write_files(
    source: RowSource, plan: WritePlan, settings: WriteSettings, threads: int, target: str, run: RunOptions
) -> Outcome:
    """Write a source's rows to files, whole or not at all.

    Args:
        source: what is read.
        plan: what is written.
        settings: order, split and compression.
        threads: that compress.
        target: the file, from whose name those of several are made.
        run: options.
    """
    outputs, packs = output_paths(target, settings), settings.compression.packs
    caster = Caster(source.label, plan.read, plan.cast)
    before = source.losses.copy()
    with _work_folder(target) as folder:
        check_space(plan, folder, shuffle=settings.shuffle, packs=packs)
        paths = [os.path.join(folder, f"{number}.h5") for number in range(len(outputs))]
        pieces = _pieces(source, plan, settings, caster)
        if settings.shuffle:
            pieces = _shuffled(pieces, plan, settings, folder, run.progress)
        try:
            sums = _write(pieces, paths, plan, settings, threads, run.progress)
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            raise KerasmemError(f"{shown(target)}: cannot be written: {os.strerror(error.errno)}") from error
        if run.attributes_from is not None:
            names = [(field.columns[0], field) for field in plan.datasets if len(field.columns) == 1]
            for path in paths:
                notes = copy_attributes(run.attributes_from, path, names, trust_file=run.trust_file)
            source.notes += notes
        if run.verify:
            _verify(paths, plan, sums, run.progress)
        stored = [_stored_bytes(paths[each.file], each.field.name) for each in plan.targets]
        for path, output in zip(paths, outputs, strict=True):
            os.replace(path, output)
    return Outcome(
        sums, stored, sum(map(os.path.getsize, outputs)), caster.inexact, source.losses - before, 0,
        max(each.rows for each in plan.targets),
    )  # fmt: skip


@contextlib.contextmanager
def _work_folder(output: str) -> Iterator[str]:
    """Yield an empty, locked folder beside an output, and remove it at the end.

    Raises:
        UsageError: If another process writes this output, or the folder holds what no conversion left.
    """
    folder = output + PARTIAL
    files.own_folder("output", folder)
    lock_path = os.path.join(folder, "lock")
    for entry in os.scandir(folder):
        if not entry.is_file(follow_symlinks=False):
            raise UsageError(f"{shown(entry.path)}: is not a file of a conversion; remove the folder {folder!r}")
    with os.fdopen(files.open_plain(lock_path, os.O_WRONLY | os.O_CREAT), "wb") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                files.lock(lock, wait=False)
            except BlockingIOError:
                raise UsageError(f"{shown(output)}: another process is writing this output; wait for it") from None
        for name in os.listdir(folder):  # left by a process that was killed
            if name != "lock":
                os.unlink(os.path.join(folder, name))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


_Piece = tuple[int, Rows, np.ndarray]
"""Number, rows as written, and the part of each row."""


def _pieces(source: RowSource, plan: WritePlan, settings: WriteSettings, caster: Caster) -> Iterator[_Piece]:
    """Yield the rows of a source in order."""
    size = plan.sizes.piece_rows
    split = RandomSplit(plan.part_rows, settings.seed)
    for number, piece in enumerate(even_pieces(source.pieces(0, size), size)):
        read = {field.name: piece[field.name] for field in plan.read}
        rows = join_columns(caster.cast(read, number * size), plan.datasets)
        yield number, rows, split.deal(number, rows_in(rows))


def _shuffled(
    pieces: Iterator[_Piece], plan: WritePlan, settings: WriteSettings, folder: str, progress: Progress
) -> Iterator[_Piece]:
    """Yield the same rows in random order, those of a piece from one part."""
    run_rows = max(plan.sizes.run_bytes // plan.row_bytes, plan.sizes.piece_rows)
    with open(os.path.join(folder, "buckets"), "x+b") as file:
        buckets = BucketFile(file, plan.datasets, plan.buckets, run_rows, settings.seed)
        done = 0
        for number, rows, parts in pieces:
            buckets.add(number, rows, parts)
            done += len(parts)
            progress("reading", done, plan.rows)
        for number, (part, rows) in enumerate(buckets.shuffled(plan.sizes.piece_rows)):
            yield number, rows, np.full(rows_in(rows), part, np.uint8)


def _write(
    pieces: Iterator[_Piece],
    paths: Sequence[str],
    plan: WritePlan,
    settings: WriteSettings,
    threads: int,
    progress: Progress,
) -> list[int]:
    """Write new files and return the checksum of each dataset."""
    done = 0
    with closing(ChunkWriter(paths, plan.targets, settings.compression, threads)) as writer:
        for _, rows, parts in pieces:
            for part in np.unique(parts).tolist():
                mine = parts == part
                for place, field in enumerate(plan.datasets):
                    values = rows[field.name]
                    writer.append(part * len(plan.datasets) + place, values if mine.all() else values[mine])
            done += len(parts)
            progress("writing", done, plan.rows)
        writer.finish()
        return writer.sums


def _verify(paths: Sequence[str], plan: WritePlan, sums: Sequence[int], progress: Progress) -> None:
    """Read the files back and compare.

    Raises:
        KerasmemError: If the values read are not those written.
    """
    done = 0
    for number, path in enumerate(paths):
        targets = zip(plan.targets, sums, strict=True)
        expected = {target.field.name: value for target, value in targets if target.file == number}
        for name, value in checksums(path, list(expected)).items():
            if value != expected[name]:
                sums_differ = f"reads back as {value:08x} and was written as {expected[name]:08x}"
                raise KerasmemError(
                    f"{shown(name)}: {sums_differ}; the disk or its memory is at fault; nothing was kept"
                )
        done += plan.part_rows[number]
        progress("verifying", done, plan.rows)


def _stored_bytes(path: str, name: str) -> int:
    with h5py.File(path, "r") as file:
        return int(file[name].id.get_storage_size())
