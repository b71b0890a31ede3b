"""Where finished chunks are kept until the file is whole, so that a killed process leaves nothing half-written.

HDF5's own index of chunks is not sound while a file is being written. So chunks that are not compressed go past HDF5
to the places in the file that were settled when it was made; compressed ones, whose sizes nobody knows beforehand,
go to a log, and from there into the file when all are there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from kerasmem.datatools.converting.encoding import Compression, create_dataset
from kerasmem.datatools.converting.fields import Field
from kerasmem.datatools.converting.raw_files import open_log, read_into, write_at
from kerasmem.datatools.inspecting.listing import CLASS_NAMES
from kerasmem.hdf5.direct.index_walk import walk_chunks
from kerasmem.hdf5.links import DAMAGED, encoded

_MOST_IN_ATTRIBUTE = 2000  # class names: an attribute has 64 KiB
_MOST_BYTES = 60_000  # of an attribute; HDF5 keeps no larger ones beside a dataset


@dataclass(frozen=True)
class Target:
    """One dataset of an output.

    Args:
        file: number of the output file.
        name: full name in it.
        field: type and row shape.
        rows: its rows.
        chunk_rows: rows of a chunk.
    """

    file: int
    name: str
    field: Field
    rows: int
    chunk_rows: int

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.rows // self.chunk_rows)


class PlainStore:
    """Chunks written to their places in the HDF5 files.

    Args:
        paths: the files; made unless they are there.
        targets: the datasets in them.
        fresh: whether to make the files.
    """

    def __init__(self, paths: Sequence[str], targets: Sequence[Target], *, fresh: bool) -> None:
        if fresh:
            create_files(paths, targets, Compression())
        self._targets = targets
        self._offsets = [np.empty(target.chunks, np.int64) for target in targets]
        for number, path in enumerate(paths):
            with h5py.File(path, "r") as file:
                for target, offsets in zip(targets, self._offsets, strict=True):
                    if target.file == number:
                        note = functools.partial(_note_offset, offsets, target.chunk_rows)
                        walk_chunks(file[target.name], note)
        self._files = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in paths]

    def put(self, target: int, chunk: int, data: Any) -> None:
        """Write a chunk."""
        write_at(self._files[self._targets[target].file], data, int(self._offsets[target][chunk]))

    def sync(self) -> dict[str, int]:
        """Have everything reach the disk; return what has to be known to go on from here."""
        for file in self._files:
            os.fdatasync(file)
        return {}

    def finish(self) -> None:
        """Close the files, which are whole now."""
        self.sync()
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())


class PackedStore:
    """Compressed chunks in a log, from which the HDF5 files are made at the end.

    Args:
        folder: where the log lies.
        paths: the files to be made.
        targets: the datasets in them.
        compression: what was done to the chunks.
        state: what `sync` returned; the log is cut back to it.
    """

    def __init__(
        self,
        folder: str,
        paths: Sequence[str],
        targets: Sequence[Target],
        compression: Compression,
        state: dict[str, int],
    ) -> None:
        self._paths, self._targets, self._compression = paths, targets, compression
        self._size, self._count = state.get("size", 0), state.get("chunks", 0)
        self._log = open_log(folder, "chunks", self._size)
        self._index = open_log(folder, "chunks.index", self._count * 32)

    def put(self, target: int, chunk: int, data: Any) -> None:
        """Append a chunk to the log."""
        size = write_at(self._log, data, self._size)
        write_at(self._index, np.array([target, chunk, self._size, size], np.int64), self._count * 32)
        self._size += size
        self._count += 1

    def sync(self) -> dict[str, int]:
        """Have everything reach the disk; return what has to be known to go on from here."""
        os.fdatasync(self._log)
        os.fdatasync(self._index)
        return {"size": self._size, "chunks": self._count}

    def finish(self) -> None:
        """Make the HDF5 files."""
        create_files(self._paths, self._targets, self._compression)
        entries = np.empty((self._count, 4), np.int64)
        read_into(self._index, entries.reshape(-1).view(np.uint8).data, 0)
        for number, path in enumerate(self._paths):
            with h5py.File(path, "r+") as file:
                datasets = {k: file[target.name].id for k, target in enumerate(self._targets) if target.file == number}
                for target, chunk, at, size in entries.tolist():
                    if target in datasets:
                        place = (
                            chunk * self._targets[target].chunk_rows,
                            *(0 for _ in self._targets[target].field.shape),
                        )
                        datasets[target].write_direct_chunk(place, os.pread(self._log, size, at), 0)
        self.close()

    def close(self) -> None:
        """Close the log."""
        if self._log >= 0:
            os.close(self._log)
            os.close(self._index)
            self._log = -1


def create_files(paths: Sequence[str], targets: Sequence[Target], compression: Compression) -> None:
    """Make the HDF5 files with their datasets, without content."""
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            for target in targets:
                if target.file == number:
                    create_dataset(file, target.name, target.field, target.rows, target.chunk_rows, compression)
                    if target.field.class_names is not None:
                        _name_classes(file, target.name, target.field.class_names)


def _name_classes(file: h5py.File, name: str, class_names: Sequence[str]) -> None:
    names = [text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0") for text in class_names]
    if len(names) <= _MOST_IN_ATTRIBUTE:
        file[name].attrs.create(CLASS_NAMES, names, dtype=h5py.string_dtype())
    else:
        file.create_dataset(f"{name}_{CLASS_NAMES}", data=names, dtype=h5py.string_dtype())


def _note_offset(offsets: np.ndarray, chunk_rows: int, info: Any) -> None:
    offsets[info.chunk_offset[0] // chunk_rows] = info.byte_offset


def copy_attributes(source: str, output: str, names: Sequence[tuple[str, str]]) -> None:
    """Copy attributes that are numbers or texts; those that point to other objects would point nowhere.

    Args:
        source: the file that was read.
        output: the file that was written.
        names: datasets there and here.
    """
    with h5py.File(source, "r") as one, h5py.File(output, "r+") as other:
        for name, written in [("/", "/"), *names]:
            try:
                for key, value in one[encoded(name)].attrs.items():
                    kind = one[encoded(name)].attrs.get_id(key).dtype
                    plain = kind.kind in "iufbSU" or h5py.check_string_dtype(kind) is not None
                    if plain and key not in other[written].attrs and np.asarray(value).nbytes <= _MOST_BYTES:
                        other[written].attrs[key] = value
            except DAMAGED:
                continue
