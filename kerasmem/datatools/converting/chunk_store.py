"""Where finished chunks are kept until the file is whole, so that a killed process leaves nothing half-written.

HDF5's own index of chunks is not sound while a file is being written. So chunks that are not compressed go past HDF5
to the places in the file that were settled when it was made; compressed ones, whose sizes nobody knows beforehand,
go to a log, and from there into the file when all are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.compat.hdf5_lock import hdf5_lock
from kerasmem.datatools.converting.encoding import Compression, create_dataset
from kerasmem.datatools.converting.fields import Target
from kerasmem.datatools.converting.job import open_log, read_into, sync
from kerasmem.datatools.inspecting.listing import CLASS_NAMES
from kerasmem.files import open_plain
from kerasmem.hdf5.direct.chunks import read_index
from kerasmem.hdf5.direct.codecs import DecodeError
from kerasmem.hdf5.direct.indexes import refuse_endless_index
from kerasmem.hdf5.direct.raw import raw_file
from kerasmem.hdf5.links import DAMAGED, encoded
from kerasmem.hdf5.texts import read_attribute

_MOST_IN_ATTRIBUTE = 2000  # class names: an attribute has 64 KiB
_MOST_BYTES = 60_000  # of an attribute; HDF5 keeps no larger ones beside a dataset
_ENTRY = np.dtype([("target", "i8"), ("chunk", "i8"), ("at", "i8"), ("size", "i8")])


class PlainStore:
    """Chunks written to their places in the HDF5 files.

    Args:
        folder: where the files come about.
        paths: the files; made unless there is a state.
        targets: the datasets in them.
        compression: none.
        state: what `sync` returned, where there is something to go on from.
    """

    def __init__(
        self,
        folder: str,
        paths: Sequence[str],
        targets: Sequence[Target],
        compression: Compression,
        state: Mapping[str, int] | None,
    ) -> None:
        if state is None:
            create_files(paths, targets, compression)
        self._targets = targets
        self._offsets = [_places(paths[target.file], target) for target in targets]
        self._files = [os.fdopen(open_plain(path, os.O_RDWR), "r+b") for path in paths]

    def put(self, target: int, chunk: int, data: Any) -> None:
        """Write a chunk."""
        file = self._files[self._targets[target].file]
        file.seek(int(self._offsets[target][chunk]))
        file.write(data)

    def sync(self) -> dict[str, int]:
        """Have everything reach the disk; return what has to be known to go on from here."""
        sync(*self._files)
        return {}

    def finish(self) -> None:
        """Close the files, which are whole now."""
        self.sync()
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class PackedStore:
    """Compressed chunks in a log, from which the HDF5 files are made at the end.

    Args:
        folder: where the log lies.
        paths: the files to be made.
        targets: the datasets in them.
        compression: what was done to the chunks.
        state: what `sync` returned, where there is something to go on from; the log is cut back to it.
    """

    def __init__(
        self,
        folder: str,
        paths: Sequence[str],
        targets: Sequence[Target],
        compression: Compression,
        state: Mapping[str, int] | None,
    ) -> None:
        self._paths, self._targets, self._compression = paths, targets, compression
        kept = state or {"size": 0, "chunks": 0}
        self._log = open_log(folder, "chunks", kept["size"])
        self._index = open_log(folder, "chunks.index", kept["chunks"] * _ENTRY.itemsize)

    def put(self, target: int, chunk: int, data: Any) -> None:
        """Append a chunk to the log."""
        self._index.write(np.array([(target, chunk, self._log.tell(), len(data))], _ENTRY).tobytes())
        self._log.write(data)

    def sync(self) -> dict[str, int]:
        """Have everything reach the disk; return what has to be known to go on from here."""
        sync(self._log, self._index)
        return {"size": self._log.tell(), "chunks": self._index.tell() // _ENTRY.itemsize}

    def finish(self) -> None:
        """Make the HDF5 files."""
        create_files(self._paths, self._targets, self._compression)
        entries = np.empty(self._index.tell() // _ENTRY.itemsize, _ENTRY)
        read_into(self._index, entries, 0)
        self._check(entries)
        for number, target in enumerate(self._targets):
            with h5py.File(self._paths[target.file], "r+") as file:
                dataset = file[target.name].id
                for _, chunk, at, size in entries[entries["target"] == number].tolist():
                    self._log.seek(at)
                    place = (chunk * target.chunk_rows, *(0 for _ in target.field.shape))
                    packed = self._log.read(size)
                    with hdf5_lock():
                        dataset.write_direct_chunk(place, packed, 0)
        self.close()

    def _check(self, entries: np.ndarray) -> None:
        """Refuse an index that leads out of the log, as one may that an interrupted conversion left."""
        counts = np.array([-(-target.rows // target.chunk_rows) for target in self._targets])
        size = self._log.seek(0, os.SEEK_END)
        sound = (entries["target"] >= 0) & (entries["target"] < len(counts))
        sound &= (entries["chunk"] >= 0) & (entries["chunk"] < counts[np.where(sound, entries["target"], 0)])
        sound &= (entries["at"] >= 0) & (entries["size"] >= 0) & (entries["size"] <= size - entries["at"])
        if not sound.all():
            raise OSError("its list of chunks is damaged")

    def close(self) -> None:
        """Close the log."""
        self._log.close()
        self._index.close()


def create_files(paths: Sequence[str], targets: Sequence[Target], compression: Compression) -> None:
    """Make the HDF5 files with their datasets, without content."""
    for number, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            for target in targets:
                if target.file == number:
                    create_dataset(file, target, compression)
                    if target.field.class_names is not None:
                        _name_classes(file, target.name, target.field.class_names)


def _name_classes(file: h5py.File, name: str, class_names: Sequence[str]) -> None:
    names = [text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0") for text in class_names]
    if len(names) <= _MOST_IN_ATTRIBUTE:
        file[name].attrs.create(CLASS_NAMES, names, dtype=h5py.string_dtype())
    else:
        file.create_dataset(f"{name}_{CLASS_NAMES}", data=names, dtype=h5py.string_dtype())


def _places(path: str, target: Target) -> np.ndarray:
    """Return where in a file each chunk of a dataset lies.

    Raises:
        DecodeError: the file, which an interrupted conversion left, is damaged.
        RawError: so it is.
    """
    with h5py.File(path, "r") as file:
        dataset = file[target.name]
        refuse_endless_index(raw_file(file), h5py.h5o.get_info(dataset.id).addr)
        index = read_index(dataset, dataset.shape, os.path.getsize(path))
        size = prod(dataset.chunks) * dataset.dtype.itemsize
        places = index.offsets(np.arange(-(-target.rows // target.chunk_rows)), size)
    if places is None:
        raise DecodeError(f"the chunks of {target.name} do not lie where they were made")
    return places


def copy_attributes(source: str, output: str, names: Sequence[tuple[str, str]]) -> None:
    """Copy attributes that are numbers or texts; those that point to other objects would point nowhere.

    Args:
        source: the file that was read.
        output: the file that was written.
        names: datasets there and here.
    """
    with h5py.File(source, "r") as one, h5py.File(output, "r+") as other:
        raw = raw_file(one)
        for name, written in [("/", "/"), *names]:
            try:
                item = one[encoded(name)]
                for key in item.attrs:
                    value = read_attribute(item, key, raw, _MOST_BYTES)
                    plain = isinstance(value, str) or getattr(value, "dtype", np.dtype("V")).kind in "iufbSUO"
                    if plain and key not in other[written].attrs:
                        other[written].attrs[key] = value
            except DAMAGED:
                continue
