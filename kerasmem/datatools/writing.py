"""Write rows to new HDF5 files: in random order and in parts if asked, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO

import h5py
import numpy as np

from kerasmem import files
from kerasmem.compat.files import hdf5_lock
from kerasmem.datatools.fields import Caster, Field, Rows, Target, join_columns
from kerasmem.datatools.listing import CHECKSUM, CLASS_NAMES, checksums
from kerasmem.datatools.packing import UNPACKED
from kerasmem.datatools.planning import WritePlan, check_space, share_out
from kerasmem.datatools.progress import Progress
from kerasmem.datatools.settings import Compression, WriteSettings, output_paths
from kerasmem.datatools.sources.rows import RowSource, even_pieces, rows_in
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.hdf5.format.filters import ZSTD
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.format.links import DAMAGED, encoded
from kerasmem.hdf5.rows.texts import TEXTS_AT_ONCE, read_attribute

_MOST_BYTES = 60_000  # of an attribute; HDF5 keeps no larger ones beside a dataset


class ChunkWriter:
    """Write rows to the datasets of new files.

    Args:
        paths: the files.
        targets: the datasets.
        compression: what is done to chunks.
        threads: that compress.

    Attributes:
        sums: CRC-32 of the rows of each dataset so far.
    """

    def __init__(self, paths: Sequence[str], targets: Sequence[Target], compression: Compression, threads: int) -> None:
        self._paths, self._targets = paths, targets
        self._files = [h5py.File(path, "w") for path in paths]
        self._datasets = [_create_dataset(self._files[target.file], target, compression) for target in targets]
        self._chunks = [np.zeros((target.chunk_rows, *target.field.shape), target.field.dtype) for target in targets]
        self._filled = [0] * len(targets)
        self._done = [0] * len(targets)
        self.sums = [0] * len(targets)
        self._encode = compression.encode
        self._pool = ThreadPoolExecutor(threads, "kerasmem-pack") if compression.packs else None
        self._most = threads + 2
        self._waiting: deque[tuple[int, int, Future[bytes]]] = deque()

    def append(self, target: int, rows: np.ndarray) -> None:
        """Take rows of a dataset."""
        chunk, size = self._chunks[target], self._targets[target].chunk_rows
        at = 0
        while at < len(rows):
            filled = self._filled[target]
            taken = min(size - filled, len(rows) - at)
            chunk[filled : filled + taken] = rows[at : at + taken]
            self._filled[target] += taken
            at += taken
            if self._filled[target] == size:
                self._emit(target)

    def finish(self) -> None:
        """Write the chunks that are not full and the checksums, and make the files reach the disk."""
        for target, filled in enumerate(self._filled):
            if filled:
                self._chunks[target][filled:] = 0
                self._emit(target)
        self._drain(0)
        for dataset, value in zip(self._datasets, self.sums, strict=True):
            dataset.attrs[CHECKSUM] = np.uint32(value)
        for file in self._files:
            file.flush()
        self.close()
        for path in self._paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """End the threads and close the files; on a full disk, closing fails too."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            with contextlib.suppress(RuntimeError):
                file.close()

    def _emit(self, target: int) -> None:
        chunk, filled, number = self._chunks[target], self._filled[target], self._done[target]
        self.sums[target] = zlib.crc32(chunk[:filled].reshape(-1).view(np.uint8).data, self.sums[target])
        if self._pool is None:
            self._put(target, number, chunk.reshape(-1).view(np.uint8).data)
        else:
            self._waiting.append((target, number, self._pool.submit(self._encode, chunk.copy())))
            self._drain(self._most)
        self._filled[target] = 0
        self._done[target] += 1

    def _drain(self, most: int) -> None:
        while len(self._waiting) > most:
            target, number, done = self._waiting.popleft()
            self._put(target, number, done.result())

    def _put(self, target: int, chunk: int, data: Any) -> None:
        dataset = self._datasets[target]
        place = (chunk * self._targets[target].chunk_rows, *(0 for _ in dataset.shape[1:]))
        with hdf5_lock():
            dataset.id.write_direct_chunk(place, data, 0)


def _create_dataset(file: h5py.File, target: Target, compression: Compression) -> h5py.Dataset:
    shape, dtype = target.field.shape, np.dtype(target.field.dtype)
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk((target.chunk_rows, *shape))
    creation.set_obj_track_times(False)  # the same data makes the same file
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if compression.packs:
        if dtype.itemsize > 1:
            creation.set_shuffle()
        if compression.kind == "gzip":
            creation.set_deflate(compression.level)
        else:
            creation.set_filter(ZSTD, h5py.h5z.FLAG_MANDATORY, (compression.level,))
    else:
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    space = h5py.h5s.create_simple((target.rows, *shape))
    created = h5py.h5d.create(file.id, None, h5py.h5t.py_create(dtype, logical=True), space, creation)
    file[target.field.name] = h5py.Dataset(created)
    if target.field.class_names is not None:
        _name_classes(file, target.field.name, target.field.class_names)
    return file[target.field.name]


def _name_classes(file: h5py.File, name: str, class_names: Sequence[str]) -> None:
    names = [text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0") for text in class_names]
    if len(names) <= TEXTS_AT_ONCE:
        file[name].attrs.create(CLASS_NAMES, names, dtype=h5py.string_dtype())
    else:
        file.create_dataset(f"{name}_{CLASS_NAMES}", data=names, dtype=h5py.string_dtype())


def copy_attributes(source: str, output: str, names: Sequence[tuple[str, Field]], *, trust_file: bool) -> list[str]:
    """Copy attributes that are numbers or texts; those that point to other objects would point nowhere.

    Args:
        source: the file that was read.
        output: the file that was written.
        names: names of datasets there, and the datasets here.
        trust_file: whether any number of texts of variable length is read.

    Returns:
        Notes on attributes that were left out.
    """
    left_out = []
    with h5py.File(source, "r") as one, h5py.File(output, "r+") as other:
        for name, field in [("/", Field("/", "<f4")), *names]:
            try:
                item = one[encoded(name)]
                for key in item.attrs:
                    value = read_attribute(item, key, trust_file=trust_file, most=_MOST_BYTES)
                    plain = isinstance(value, str) or getattr(value, "dtype", np.dtype("V")).kind in "iufbSUO"
                    if field.unpacked and key in UNPACKED:
                        continue
                    if plain and key not in other[field.name].attrs:
                        other[field.name].attrs[key] = value
                    elif value is None and h5py.check_string_dtype(item.attrs.get_id(key).dtype) is not None:
                        left_out.append(
                            f"left out: attribute {shown(key)} of {shown(name)}, which has many or long texts"
                        )
            except DAMAGED:
                continue
    return left_out


_DRAW, _BUCKETS, _PLACES = 1, 2, 3  # which of the random streams
_MOST_DRAWN = 10**9  # rows from which NumPy draws; of more, each piece gets its exact share
_COPY_BYTES = 1 << 20  # put in order and written at a time


class RandomSplit:
    """Draw the part of each row at random, without replacement, so that shares are exact.

    Args:
        rows: of each part.
        seed: of the draw.
    """

    def __init__(self, rows: Sequence[int], seed: int) -> None:
        self._left, self._seed = np.array(rows, np.int64), seed

    def deal(self, piece: int, rows: int) -> np.ndarray:
        """Return the number of the part of each row of the next piece.

        Args:
            piece: its number; pieces are dealt in order.
            rows: its rows.
        """
        rng = np.random.default_rng((self._seed, _DRAW, piece))
        taken = _draw(rng, self._left, rows)
        self._left -= taken
        parts = np.repeat(np.arange(len(taken), dtype=np.uint8), taken)
        rng.shuffle(parts)
        return parts


def _draw(rng: np.random.Generator, left: np.ndarray, count: int) -> np.ndarray:
    """Return how many of `count` rows go to each part."""
    total = int(left.sum())
    if total < _MOST_DRAWN:
        return rng.multivariate_hypergeometric(left, count, method="marginals")
    return np.array(share_out(count, (left / total).tolist()), np.int64)


class BucketFile:
    """Shuffle rows on disk: each goes to a random bucket, and each bucket is shuffled in memory.

    That is sorting all rows by random numbers, whose first digits are the bucket and whose others are the place in it.
    Every order of all rows is equally likely, whatever the memory (Rao, 1961; Sandelius, 1962).

    Args:
        file: a temporary file. It becomes a list of runs: rows as they came, sorted by bucket.
        fields: the datasets.
        buckets: the number of buckets of each part; parts have buckets of their own.
        run_rows: rows that are sorted and written together.
        seed: of the order.
    """

    def __init__(
        self, file: BinaryIO, fields: Sequence[Field], buckets: Sequence[int], run_rows: int, seed: int
    ) -> None:
        self._file, self._names, self._seed = file, [field.name for field in fields], seed
        record = [(field.name, field.dtype, field.shape) for field in fields]
        self._rows = np.empty(run_rows, record)
        self._keys = np.empty(run_rows, np.int32)
        self._filled = 0
        self._counts: list[np.ndarray] = []  # rows of each bucket, by run
        self._buckets = np.array(buckets)
        self._first = np.cumsum([0, *buckets[:-1]])

    def add(self, piece: int, rows: Rows, parts: np.ndarray) -> None:
        """Deal the rows of a piece to buckets.

        Args:
            piece: its number.
            rows: its rows.
            parts: the number of the part of each.
        """
        if self._filled + len(parts) > len(self._rows):
            self._flush()
        some = slice(self._filled, self._filled + len(parts))
        for name in self._names:
            self._rows[name][some] = rows[name]
        drawn = np.random.default_rng((self._seed, _BUCKETS, piece)).integers(0, self._buckets[parts])
        self._keys[some] = self._first[parts] + drawn
        self._filled = some.stop

    def shuffled(self, rows: int) -> Iterator[tuple[int, Rows]]:
        """Yield the part and the rows of each bucket in random order, `rows` at a time."""
        self._flush()
        record = self._rows.dtype
        self._rows, self._keys = self._rows[:0].copy(), self._keys[:0].copy()
        counts = np.array(self._counts, np.int64)
        starts = (np.cumsum(counts, axis=None).reshape(counts.shape) - counts) * record.itemsize
        part_of = np.repeat(np.arange(len(self._buckets)), self._buckets).tolist()
        for bucket, part in enumerate(part_of):
            found = np.empty(int(counts[:, bucket].sum()), record)
            done = 0
            for start, count in zip(starts[:, bucket].tolist(), counts[:, bucket].tolist(), strict=True):
                self._read(found[done : done + count], start)
                done += count
            order = np.random.default_rng((self._seed, _PLACES, bucket)).permutation(len(found))
            for at in range(0, len(found), rows):
                some = found[order[at : at + rows]]
                yield part, {name: some[name] for name in self._names}

    def _flush(self) -> None:
        """Write the run that is being filled."""
        keys = self._keys[: self._filled]
        order = np.argsort(keys, kind="stable")
        step = max(1, _COPY_BYTES // self._rows.dtype.itemsize)
        for first in range(0, self._filled, step):
            self._file.write(self._rows[order[first : first + step]].view(np.uint8).data)
        self._counts.append(np.bincount(keys, minlength=int(self._buckets.sum())))
        self._filled = 0

    def _read(self, rows: np.ndarray, start: int) -> None:
        self._file.seek(start)
        if self._file.readinto(rows.view(np.uint8).data) != rows.nbytes:  # type: ignore[attr-defined]
            raise OSError("a temporary file of the conversion was cut off")


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
