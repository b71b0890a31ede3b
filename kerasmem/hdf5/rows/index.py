"""An index of many files: their rows, types and chunks in one file, so that none of them is opened to find out.

It is an archive as NumPy's `savez` writes it, of arrays that nothing compresses and no pickle: `about`, a JSON text on
the datasets and the ways of storing them, `names`, one with the name and version of each file, `files`, a record for
each file, and for each dataset `dataset0` and so on, a record for each file, and `chunks0`, a record for each chunk.
"""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import numpy as np

from kerasmem.archives import open_archive
from kerasmem.errors import DataError, UsageError
from kerasmem.files import read_json, replacing
from kerasmem.hdf5.format.chunks import CHUNK
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, FileLayout, one_line, shown
from kerasmem.hdf5.format.urls import is_url, scheme_of
from kerasmem.hdf5.io.access import RemoteAccess
from kerasmem.hdf5.io.remote_file import RemoteFile
from kerasmem.records import Record
from kerasmem.units import GIB, MIB

_MOST_REMOTE = GIB  # an index of millions of files has less
_ALIKE = 1024
_MOST_ABOUT = 64 * MIB
_FILE = np.dtype([("rows", "<i8"), ("size", "<i8"), ("time", "<i8")])
_DATASET = np.dtype([("kind", "<u4"), ("stored", "<i8"), ("begin", "<i8"), ("chunk_end", "<i8")])


@dataclass(frozen=True)
class StoredAs(Record, what="way of storing a dataset"):
    """How a dataset is stored, the same in most files.

    Args:
        storage: "contiguous", "chunked" and so on.
        chunks: chunk shape; None if the data is not chunked.
        filters: their names.
        pipeline: code and numbers of each filter.
        direct: whether its place in the file is in the index; else HDF5 looks into the file.
    """

    storage: str
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    pipeline: tuple[tuple[int, tuple[int, ...]], ...] = ()
    direct: bool = True


@dataclass(frozen=True)
class About(Record, what="index of data files", version=1):
    """Description of an index beside its arrays.

    Args:
        names: of the datasets.
        dtypes: type of each as stored.
        row_shapes: shape of a row of each.
        kinds: ways of storing, referred to by number.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    row_shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[StoredAs, ...]


class Table(NamedTuple):
    """The place of a contiguous dataset in a file, or the places of its chunks in order.

    Attributes:
        kind: how it is stored.
        begin: place of data without chunks, else -1.
        chunks: a `CHUNK` for each chunk, in order.
    """

    kind: StoredAs
    begin: int
    chunks: np.ndarray


class IndexedFile(NamedTuple):
    """An entry of an index about one file.

    Attributes:
        index_path: path of the index.
        time: time of change of a local file when the index was made, in ns; 0 if unknown.
        tables: where datasets lie; those that only HDF5 finds are missing.
    """

    index_path: str
    time: int
    tables: dict[str, Table]


class DataIndex(Sequence[str]):
    """The files of an index, and their layouts.

    Args:
        path: the index, a file or a URL.
        access: how URLs are reached.

    Raises:
        DataError: If it is no index, or a damaged one.
    """

    def __init__(self, path: str, access: RemoteAccess) -> None:
        self.path = path
        try:
            arrays = _read_arrays(path, access)
            text = arrays["about"].tobytes()
            if len(text) > _MOST_ABOUT:
                raise ValueError(f"it describes itself in {len(text):,} bytes")
            self.about = About.from_dict(read_json(text))
            _refuse_nonsense(self.about)
            named = [(str(path), str(tag)) for path, tag in read_json(arrays["names"].tobytes())]
            self._files = _records(arrays, "files", _FILE, len(named))
            if not named or (self._files["rows"] < 1).any() or sum(self._files["rows"].tolist()) >= 1 << 62:
                raise ValueError("its files have no rows, or too many")
            numbers = range(len(self.about.names))
            self._datasets = [_records(arrays, f"dataset{at}", _DATASET, len(named)) for at in numbers]
            ends = [dataset["chunk_end"] for dataset in self._datasets]
            self._chunks = [_records(arrays, f"chunks{at}", CHUNK, int(ends[at][-1])) for at in numbers]
            for dataset in self._datasets:
                unknown = (dataset["kind"] >= len(self.about.kinds)).any()
                if unknown or (np.diff(dataset["chunk_end"], prepend=0) < 0).any():
                    raise ValueError("it names ways of storing, or chunks, that it does not have")
        except (DataError, UsageError):
            raise
        except OSError as error:
            raise DataError(f"{shown(path)}: the index cannot be read: {error.strerror or error}") from error
        except Exception as error:  # zipfile, NumPy and Python's parser raise whatever they meet in damaged ones
            raise DataError(
                f"{shown(path)}: this is no index of data files, or a damaged one ({one_line(str(error), 100)}); make "
                "it with `kerasmem data index`"
            ) from error
        self._paths = [self._absolute(path) for path, _ in named]
        self._tags = [tag or None for _, tag in named]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: Any) -> Any:
        return self._paths[number]

    def layout(self, names: Sequence[str]) -> DataLayout:
        """Return the layout of some datasets in all files.

        Raises:
            DataError: If the index has no such dataset.
        """
        known = self.about.names
        for name in names:
            if name not in known:
                raise DataError(
                    f"{shown(self.path)}: the index has no dataset {shown(name)}; it has "
                    f"{', '.join(map(shown, known[:12]))}"
                )
        return DataLayout(tuple(self._file_layouts(names)), self)

    def _file_layouts(self, names: Sequence[str]) -> Iterator[FileLayout]:
        """Yield the layout of each file, as `scan_file` does."""
        about = self.about
        numbers = [about.names.index(name) for name in names]
        kinds = [self._datasets[at]["kind"].tolist() for at in numbers]
        stored = [self._datasets[at]["stored"].tolist() for at in numbers]
        rows, sizes = self._files["rows"].tolist(), self._files["size"].tolist()

        @functools.lru_cache(maxsize=_ALIKE)  # where files are alike, one object does for all
        def dataset(at: int, kind: StoredAs, rows: int, stored: int) -> DatasetLayout:
            shape = (rows, *about.row_shapes[at])
            return DatasetLayout(
                about.names[at], shape, about.dtypes[at], kind.storage, kind.chunks, kind.filters, stored
            )

        for number, path in enumerate(self._paths):
            datasets = tuple(
                dataset(at, about.kinds[kinds[column][number]], rows[number], stored[column][number])
                for column, at in enumerate(numbers)
            )
            yield FileLayout(path, sizes[number], datasets, self._tags[number])

    def file(self, number: int) -> IndexedFile:
        """Return the entry of one file."""
        tables = {}
        for name, dataset, chunks in zip(self.about.names, self._datasets, self._chunks, strict=True):
            kind = self.about.kinds[int(dataset["kind"][number])]
            if kind.direct:
                first = int(dataset["chunk_end"][number - 1]) if number else 0
                here = chunks[first : int(dataset["chunk_end"][number])]
                tables[name] = Table(kind, int(dataset["begin"][number]), here)
        return IndexedFile(self.path, int(self._files["time"][number]), tables)

    def _absolute(self, name: str) -> str:
        """Return the absolute path or URL of a file. Relative names count from the index."""
        if not name or "\0" in name:
            raise DataError(f"{shown(self.path)}: the index is damaged: it names a file without a name")
        if not is_url(self.path):
            return name if is_url(name) else os.path.normpath(os.path.join(os.path.dirname(self.path), name))
        found = name if is_url(name) else _joined(self.path, name)
        if (scheme_of(found), urlsplit(found).netloc) != (scheme_of(self.path), urlsplit(self.path).netloc):
            raise DataError(
                f"{shown(self.path)}: the index names {shown(found)}, which lies elsewhere; a remote index may name "
                "files of its own server or bucket only: download it to use it so"
            )
        return found


def _read_arrays(path: str, access: RemoteAccess) -> dict[str, np.ndarray]:
    file: Any = None
    if is_url(path):
        with RemoteFile(path, access) as remote:
            if remote.known.size > _MOST_REMOTE:
                raise ValueError(f"it has {remote.known.size:,} bytes, and {_MOST_REMOTE:,} are read at most")
            file = io.BytesIO(remote.read(remote.known.size))
    with file or open(path, "rb") as stream, open_archive(stream) as content:
        return {name: content[name] for name in content}


def _records(arrays: dict[str, np.ndarray], name: str, dtype: np.dtype[Any], count: int) -> np.ndarray:
    array = arrays[name]
    if array.shape != (count,) or array.dtype != dtype:
        raise ValueError(f"{name} has another shape or type")
    return array


def _refuse_nonsense(about: About) -> None:
    if not about.names or not len(about.names) == len(about.dtypes) == len(about.row_shapes):
        raise ValueError("it names no datasets, or not their types")
    if any(np.dtype(dtype).kind not in "fiub" for dtype in about.dtypes):
        raise ValueError("a dataset has no numbers")
    for kind in about.kinds:
        if kind.chunks is not None and not (kind.chunks and all(0 < extent < 1 << 40 for extent in kind.chunks)):
            raise ValueError(f"it has chunks of {kind.chunks}")


def _joined(url: str, name: str) -> str:
    if scheme_of(url) in ("http", "https"):
        return urljoin(url, name)
    folder = url.rsplit("/", 1)[0]
    while name.startswith("../"):
        folder, name = folder.rsplit("/", 1)[0], name[3:]
    return f"{folder}/{name}"


class IndexWriter:
    """Gather the entries of an index, file by file.

    Args:
        path: of the index to be written.
        datasets: those of any of the files; names, types and row shapes are the same in all.
    """

    def __init__(self, path: str, datasets: Sequence[DatasetLayout]) -> None:
        self.path = path
        names, dtypes, shapes = zip(*((each.name, each.dtype, each.row_shape) for each in datasets), strict=True)
        self._about = About(names, dtypes, shapes, ())
        self._kinds: dict[StoredAs, int] = {}
        self._named: list[tuple[str, str]] = []
        self._files: list[tuple[int, int, int]] = []
        self._datasets: list[list[tuple[int, ...]]] = [[] for _ in datasets]
        self._chunks: list[list[np.ndarray]] = [[np.zeros(0, CHUNK)] for _ in datasets]
        self._ends = [0] * len(datasets)

    def add(self, layout: FileLayout, time: int, tables: Sequence[Table]) -> None:
        """Add a file with the places of its datasets."""
        self._named.append((self._relative(layout.path), layout.tag or ""))
        self._files.append((layout.datasets[0].rows, layout.size, time))
        for at, (dataset, table) in enumerate(zip(layout.datasets, tables, strict=True)):
            kind = self._kinds.setdefault(table.kind, len(self._kinds))
            self._ends[at] += len(table.chunks)
            self._datasets[at].append((kind, dataset.stored_bytes, table.begin, self._ends[at]))
            self._chunks[at].append(table.chunks)

    def write(self) -> None:
        """Write the index, under another name until it is whole."""
        about = replace(self._about, kinds=tuple(self._kinds))
        texts = {"about": about.to_dict(), "names": self._named}
        arrays = {name: np.frombuffer(json.dumps(text).encode(), np.uint8) for name, text in texts.items()}
        arrays["files"] = np.array(self._files, _FILE)
        for at, (records, chunks) in enumerate(zip(self._datasets, self._chunks, strict=True)):
            arrays[f"dataset{at}"] = np.array(records, _DATASET)
            arrays[f"chunks{at}"] = np.concatenate(chunks)
        with replacing(self.path) as file:
            np.savez(file, allow_pickle=False, **arrays)

    def _relative(self, path: str) -> str:
        """Return a file's name relative to the index if it lies beside or below it."""
        if is_url(path):
            return path
        name = os.path.relpath(path, os.path.dirname(self.path))
        return path if name.startswith("..") else name
