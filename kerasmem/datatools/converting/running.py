"""Carry a conversion out in a folder beside its output, and move the files when they are whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import h5py
import numpy as np

from kerasmem import files
from kerasmem.datatools.converting.casting import Caster
from kerasmem.datatools.converting.fields import Rows, join_columns
from kerasmem.datatools.converting.ordering import BucketFile, RandomSplit
from kerasmem.datatools.converting.planning import WritePlan, check_space
from kerasmem.datatools.converting.settings import WriteSettings, output_paths
from kerasmem.datatools.converting.sources.row_source import RowSource, even_pieces, rows_in
from kerasmem.datatools.converting.writing import ChunkWriter, copy_attributes
from kerasmem.datatools.inspecting.listing import checksums
from kerasmem.datatools.progress import Progress
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.hdf5.layout import shown

PARTIAL = ".kerasmem-partial"


@dataclass(frozen=True)
class Outcome:
    """Facts of the files that a conversion wrote.

    Args:
        sums: the checksum of each dataset.
        stored: bytes that each takes.
        size: bytes of the files.
        inexact: whole numbers that were rounded, by column.
        losses: images that lost something, by kind of loss.
        resumed_rows: rows of parts that an interrupted run wrote.
        most_rows: of a dataset in one file.
    """

    sums: Sequence[int]
    stored: Sequence[int]
    size: int
    inexact: Mapping[str, int]
    losses: Mapping[str, int]
    resumed_rows: int
    most_rows: int


@dataclass(frozen=True)
class Ways:
    """Options of a conversion on which its result does not depend.

    Args:
        verify: read the files back and compare.
        force: overwrite outputs, and discard the parts of an interrupted conversion with other settings.
        progress: called with the step, the rows done and all rows.
        attributes_from: the HDF5 file whose attributes are copied.
    """

    verify: bool
    force: bool
    progress: Progress
    attributes_from: str | None = None


def write_files(
    source: RowSource, plan: WritePlan, settings: WriteSettings, threads: int, target: str, ways: Ways
) -> Outcome:
    """Write a source's rows to files, whole or not at all.

    Args:
        source: what is read.
        plan: what is written.
        settings: order, split and compression.
        threads: that compress.
        target: the file, from whose name those of several are made.
        ways: options.
    """
    outputs, packs = output_paths(target, settings), settings.compression.packs
    caster = Caster(source.label, plan.read, plan.cast)
    before = source.losses.copy()
    with _work_folder(target) as folder:
        check_space(plan, folder, shuffle=settings.shuffle, packs=packs)
        paths = [os.path.join(folder, f"{number}.h5") for number in range(len(outputs))]
        pieces = _pieces(source, plan, settings, caster)
        if settings.shuffle:
            pieces = _shuffled(pieces, plan, settings, folder, ways.progress)
        try:
            sums = _write(pieces, paths, plan, settings, threads, ways.progress)
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            raise KerasmemError(f"{shown(target)}: cannot be written: {os.strerror(error.errno)}") from error
        if ways.attributes_from is not None:
            pairs = [(field.columns[0], field.name) for field in plan.datasets if len(field.columns) == 1]
            copy_attributes(ways.attributes_from, paths[0], pairs)
        if ways.verify:
            _verify(paths, plan, sums, ways.progress)
        stored = [_stored_bytes(paths[each.file], each.name) for each in plan.targets]
        for path, output in zip(paths, outputs, strict=True):
            os.replace(path, output)
    return Outcome(
        sums, stored, sum(map(os.path.getsize, outputs)), caster.inexact, source.losses - before, 0,
        max(each.rows for each in plan.targets),
    )  # fmt: skip


@contextlib.contextmanager
def _work_folder(output: str) -> Iterator[str]:
    """Yield an empty folder beside an output, which no other process uses; it is removed in the end.

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
    """Yield the same rows in random order; those of a piece are all of one part."""
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
    """Write new files; return the checksum of each dataset."""
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
        wanted = {
            target.name: (expected, target.rows)
            for target, expected in zip(plan.targets, sums, strict=True)
            if target.file == number
        }
        for same_rows in {rows for _, rows in wanted.values()}:
            found = checksums(path, [name for name, (_, rows) in wanted.items() if rows == same_rows])
            for name, value in found.items():
                if value != wanted[name][0]:
                    raise KerasmemError(
                        f"{shown(name)}: reads back as {value:08x} and was written as {wanted[name][0]:08x}; the "
                        "disk or its memory is at fault; nothing was kept"
                    )
            done += same_rows
            progress("verifying", min(done, plan.rows), plan.rows)


def _stored_bytes(path: str, name: str) -> int:
    with h5py.File(path, "r") as file:
        return int(file[name].id.get_storage_size())
