"""Write rows to new HDF5 files, optionally in random order. Files appear only once they are complete."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import h5py
import numpy as np

from kerasmem.datatools.conversion_settings import ReadOptions, WriteOptions
from kerasmem.datatools.fields import PACKING_ATTRIBUTES, Field, Rows, check_names, written_rows, written_type
from kerasmem.datatools.listing import CLASS_NAMES, open_h5
from kerasmem.datatools.reports import Progress, ignore_progress
from kerasmem.datatools.row_source import RowSource, even_pieces, rows_in
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.files import replace_file
from kerasmem.hdf5.format.layout import quote
from kerasmem.hdf5.format.links import DAMAGED, encode_name
from kerasmem.hdf5.rows.safe_reading import TEXTS_AT_ONCE, read_attribute
from kerasmem.units import KIB, MIB

_CHUNK_BYTES = MIB
_LEAST_CHUNK = 4 * KIB
_PIECE_BYTES = 4 * MIB  # per read and write
_PIECE_ROWS = 1 << 16
_MOST_ATTRIBUTE = 60_000  # bytes; HDF5 cannot store larger ones in an object's header


@dataclass(frozen=True)
class WritePlan:
    """Columns, datasets and sizes of a conversion.

    Args:
        read: the columns to read.
        datasets: the datasets to write.
        rows: number of rows.
        piece_rows: rows per read and write.
        chunk_bytes: size of the chunks.
        run_bytes: size of the rows that are shuffled together in memory.
    """

    read: tuple[Field, ...]
    datasets: tuple[Field, ...]
    rows: int
    piece_rows: int
    chunk_bytes: int
    run_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all datasets."""
        return sum(field.row_bytes for field in self.datasets)


class WriteOutcome(NamedTuple):
    """Bytes of the outputs, and the number of values that were not converted exactly, by the text of the note."""

    size: int
    losses: Counter[str]


def make_plan(source: RowSource, reading: ReadOptions, writing: WriteOptions) -> WritePlan:
    """Plan a conversion.

    Raises:
        DataError: If the columns cannot be written.
    """
    read = tuple(field for field in source.fields if reading.columns.reads(field.name))
    cast = tuple(replace(field, dtype=written_type(field, float32=writing.float32)) for field in read)
    datasets = reading.columns.datasets(cast)
    check_names(datasets, "output")
    row_bytes = max(sum(field.row_bytes for field in fields) for fields in (read, datasets))
    files = max(1, len(writing.shares))
    piece_bytes = min(_PIECE_BYTES, writing.memory // 24)
    chunk_bytes = max(_LEAST_CHUNK, min(_CHUNK_BYTES, writing.memory // 4 // (len(datasets) * files)))
    piece_rows = max(1, min(_PIECE_ROWS, piece_bytes // max(row_bytes, 1)))
    return WritePlan(read, datasets, source.rows, piece_rows, chunk_bytes, writing.memory // 8)


def write_files(
    source: RowSource,
    reading: ReadOptions,
    writing: WriteOptions,
    outputs: Sequence[str],
    progress: Progress = ignore_progress,
) -> WriteOutcome:
    """Write a source's rows to files. If this fails, no file is left.

    Args:
        source: the source.
        reading: options for reading.
        writing: options for writing.
        outputs: paths of the files: one, or one per share.
        progress: called with the step, the number of rows done and the number of all rows.

    Raises:
        DataError: If the rows cannot be read.
        KerasmemError: If a file cannot be written.
    """
    plan = make_plan(source, reading, writing)
    shares = itertools.accumulate(list(writing.shares.values())[:-1])
    bounds = [0, *(round(plan.rows * share) for share in shares), plan.rows]
    if len(set(bounds)) < len(bounds):
        raise UsageError(f"split: a share of {plan.rows:,} rows is empty; use larger shares")
    folder = os.path.dirname(outputs[0])
    before = source.losses.copy()
    pieces = _pieces(source, plan)
    if writing.shuffle:
        pieces = _shuffle(pieces, plan, writing.seed, folder, progress)
    try:
        with contextlib.ExitStack() as stack:
            paths = [stack.enter_context(replace_file(output, durable=True)).name for output in outputs]
            raw_files = [stack.enter_context(_OutputFile(path, "r+")) for path in paths]
            work = _write(pieces, raw_files, bounds, plan, source, reading, writing)
            for done in stack.enter_context(contextlib.closing(work)):
                for file in raw_files:
                    file.check()
                progress("writing", done, plan.rows)
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise KerasmemError(f"{quote(outputs[0])}: cannot be written: {os.strerror(error.errno)}") from error
    return WriteOutcome(sum(map(os.path.getsize, outputs)), source.losses - before)


def _pieces(source: RowSource, plan: WritePlan) -> Iterator[Rows]:
    """Yield the rows of a source in the form of the datasets."""
    done = 0
    for piece in even_pieces(source.pieces(plan.piece_rows), plan.piece_rows):
        yield written_rows(piece, plan.datasets, source.label, done)
        done += rows_in(piece)


def _shuffle(pieces: Iterator[Rows], plan: WritePlan, seed: int, folder: str, progress: Progress) -> Iterator[Rows]:
    """Yield the same rows in random order.

    Rows are assigned to random buckets and written to a temporary file in runs, which are sorted by bucket. Then each
    bucket is shuffled in memory. This is equivalent to sorting by random numbers that begin with the bucket, so
    every order is equally likely for any memory size (Rao, 1961; Sandelius, 1962).
    """
    random = np.random.default_rng(seed)
    record = np.dtype([(field.name, field.dtype, field.shape) for field in plan.datasets])
    run_rows = max(1, plan.run_bytes // record.itemsize)
    buckets = -(-plan.rows // run_rows)
    counts = []  # number of rows in each bucket, by run
    with tempfile.TemporaryFile(dir=folder) as file:
        for number, run in enumerate(even_pieces(pieces, run_rows), start=1):
            records = np.empty(rows_in(run), record)
            for name, values in run.items():
                records[name] = values
            drawn_buckets = random.integers(0, buckets, len(records))
            order = np.argsort(drawn_buckets, kind="stable")
            for first in range(0, len(records), plan.piece_rows):
                file.write(records[order[first : first + plan.piece_rows]].view(np.uint8).data)
            counts.append(np.bincount(drawn_buckets, minlength=buckets))
            progress("reading", min(number * run_rows, plan.rows), plan.rows)
        del run, records
        lengths = np.array(counts) * record.itemsize
        starts = np.cumsum(lengths).reshape(lengths.shape) - lengths
        for bucket in range(buckets):
            records = np.empty(lengths[:, bucket].sum() // record.itemsize, record)
            buffer = records.view(np.uint8).data
            for start, length in zip(starts[:, bucket].tolist(), lengths[:, bucket].tolist(), strict=True):
                file.seek(start)
                file.readinto(buffer[:length])
                buffer = buffer[length:]
            order = random.permutation(len(records))
            for first in range(0, len(records), plan.piece_rows):
                piece = records[order[first : first + plan.piece_rows]]
                yield {name: piece[name] for name in record.names or ()}


class _OutputFile(io.FileIO):
    """A file that stores its first write error instead of raising it, because HDF5 would crash at exit."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes. Do nothing after a failure."""
        unwritten = memoryview(data)
        try:
            while unwritten and self.failure is None:
                unwritten = unwritten[super().write(unwritten) :]
        except OSError as error:
            self.failure = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Set the size. Do nothing after a failure."""
        return 0 if self.failure else super().truncate(size)

    def check(self) -> None:
        """Raise the error of a failed write."""
        if self.failure:
            raise self.failure


def _write(
    pieces: Iterator[Rows],
    raw_files: Sequence[_OutputFile],
    bounds: Sequence[int],
    plan: WritePlan,
    source: RowSource,
    reading: ReadOptions,
    writing: WriteOptions,
) -> Generator[int, None, None]:
    """Write rows to one file after another, and yield the number of rows written so far."""
    cache = {"rdcc_nbytes": plan.chunk_bytes, "rdcc_w0": 1}  # one chunk per dataset
    spans = list(itertools.pairwise(bounds))
    done = 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(h5py.File(file, "w", **cache)) for file in raw_files]
        datasets = [
            {field.name: _create_dataset(file, field, stop - start, plan, writing) for field in plan.datasets}
            for file, (start, stop) in zip(files, spans, strict=True)
        ]
        for piece in pieces:
            count = rows_in(piece)
            for (start, stop), targets in zip(spans, datasets, strict=True):
                low, high = max(start, done), min(stop, done + count)
                if low < high:
                    for name, values in piece.items():
                        targets[name][low - start : high - start] = values[low - done : high - done]
            done += count
            yield done
        for file in files:
            _copy_attributes(source, file, plan.datasets, trust_file=reading.trust_file)
    yield done


def _create_dataset(file: h5py.File, field: Field, rows: int, plan: WritePlan, writing: WriteOptions) -> h5py.Dataset:
    chunk_rows = max(1, min(rows, plan.chunk_bytes // max(field.row_bytes, 1)))
    dtype = np.dtype(field.dtype)
    dataset = file.create_dataset(
        field.name, (rows, *field.shape), dtype, chunks=(chunk_rows, *field.shape), fill_time="never",
        shuffle=bool(writing.compression) and dtype.itemsize > 1, **writing.compression,
    )  # fmt: skip
    if field.class_names is not None:
        names = [text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0") for text in field.class_names]
        if len(names) <= TEXTS_AT_ONCE:
            dataset.attrs[CLASS_NAMES] = names
        else:
            file[f"{field.name}_{CLASS_NAMES}"] = names
    return dataset


def _copy_attributes(source: RowSource, file: h5py.File, datasets: Sequence[Field], *, trust_file: bool) -> None:
    """Copy attributes that are numbers or texts from a single HDF5 file. Note those that are too large."""
    path = source.paths[0]
    if len(set(source.paths)) > 1 or not h5py.is_hdf5(path):
        return
    columns = [(field.columns[0], field) for field in datasets if len(field.columns) == 1]
    with open_h5(path, f"{quote(path)}: its list of attributes") as original:
        for name, field in [("/", Field("/", "<f4")), *columns]:
            with contextlib.suppress(*DAMAGED):
                item, target = original[encode_name(name)], file[field.name].attrs
                for key in item.attrs:
                    value = read_attribute(item, key, trust_file=trust_file, most=_MOST_ATTRIBUTE)
                    if key in target or (field.stored_dtype and key in PACKING_ATTRIBUTES):
                        continue
                    if isinstance(value, str) or getattr(value, "dtype", np.dtype("V")).kind in "iufbSUO":
                        target[key] = value
                    elif value is None and h5py.check_string_dtype(item.attrs.get_id(key).dtype) is not None:
                        source.notes.append(
                            f"left out: attribute {quote(key)} of {quote(name)}, because its texts are too long"
                        )
