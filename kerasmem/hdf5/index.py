"""An index of many files: their rows, types and chunks in one file, so that none of them is opened to find out.

It is an archive as NumPy's `savez` writes it, of plain arrays that nothing compresses and no pickle: `about`, a JSON
text on the datasets and the ways of storing them, `files`, one with the name and version of each file, and for each
file a number in `rows`, `sizes` and so on. Arrays with a number a chunk are looked up where the chunks of a file are
asked for, and not read as a whole.
"""

from __future__ import annotations

import functools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import numpy as np

from kerasmem.errors import DataError, InputError, UsageError
from kerasmem.files import read_json, replacing
from kerasmem.hdf5.index_archive import IndexArchive
from kerasmem.hdf5.layout import DataLayout, DatasetLayout, FileLayout, one_line, shown
from kerasmem.hdf5.remote.access import RemoteAccess
from kerasmem.hdf5.remote.urls import is_url, scheme_of
from kerasmem.records import Record
from kerasmem.units import MIB

CHECKSUM = "checksum"  # among the filters of data without others whose blocks have checksums
_ALIKE = 1024
_MOST_ABOUT = 64 * MIB
_PER_FILE = {"rows": "<i8", "sizes": "<i8", "times": "<i8"}
_PER_DATASET = {"kinds": "<u4", "stored": "<i8", "begins": "<i8", "chunk_ends": "<i8"}
_PER_CHUNK = {"offsets": "<i8", "lengths": "<u4", "masks": "<u4", "sums": "<u4"}


@dataclass(frozen=True)
class StoredAs(Record, what="way of storing a dataset"):
    """How a dataset is stored, the same in most files.

    Args:
        storage: "contiguous", "chunked" and so on.
        chunks: chunk shape; of data without chunks whose blocks have checksums, the shape of a block.
        filters: their names.
        pipeline: code and numbers of each filter.
        plain_edges: whether chunks at the edge are stored without the filters.
        direct: whether its place in the file is in the index; else HDF5 looks into the file.
    """

    storage: str
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    pipeline: tuple[tuple[int, tuple[int, ...]], ...] = ()
    plain_edges: bool = False
    direct: bool = True


@dataclass(frozen=True)
class About(Record, what="index of data files", version=1):
    """What an index says beside its arrays.

    Args:
        names: of the datasets.
        dtypes: type of each as stored.
        row_shapes: shape of a row of each.
        kinds: ways of storing, referred to by number.
        checksums: whether there is a checksum for each block.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    row_shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[StoredAs, ...]
    checksums: bool = False


class Table(NamedTuple):
    """Where a dataset lies in a file: the place of a contiguous one, or those of its chunks in their order.

    Attributes:
        kind: how it is stored.
        begin: place of data without chunks, else -1.
        offsets: place of each chunk.
        lengths: its bytes.
        masks: which filters were left out for it.
        sums: CRC-32 of its bytes; None where the index has none.
    """

    kind: StoredAs
    begin: int
    offsets: np.ndarray
    lengths: np.ndarray
    masks: np.ndarray
    sums: np.ndarray | None


class DataIndex(Sequence[str]):
    """The files that an index names, and what it says of them.

    Args:
        path: the index, a file or a URL.
        access: how URLs are reached.

    Raises:
        DataError: it is no index, or a damaged one.
    """

    def __init__(self, path: str, access: RemoteAccess) -> None:
        self.path = path
        self._archive = IndexArchive(path, access, _PER_CHUNK)
        try:
            arrays = self._archive.read()
            text = arrays["about"].tobytes()
            if len(text) > _MOST_ABOUT:
                raise ValueError(f"it describes itself in {len(text):,} bytes")
            self.about = About.from_dict(read_json(text))
            self._arrays = self._checked(arrays)
            named = [(str(path), str(tag)) for path, tag in read_json(arrays["files"].tobytes())]
            if len(named) != len(arrays["rows"]):
                raise ValueError("it names more files, or fewer, than it has rows of")
        except (DataError, UsageError):
            raise
        except InputError as error:
            raise DataError(f"{shown(path)}: {error}; make the index again with `kerasmem data index`") from error
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

    def layout(self, names: Sequence[str]) -> IndexedData:
        """Return the layout of some datasets in all files.

        Raises:
            DataError: the index has no such dataset.
        """
        known = self.about.names
        for name in names:
            if name not in known:
                raise DataError(
                    f"{shown(self.path)}: the index has no dataset {shown(name)}; it has "
                    f"{', '.join(map(shown, known[:12]))}"
                )
        return IndexedData(self, names)

    def file_layouts(self, names: Sequence[str]) -> Iterator[FileLayout]:
        """Yield what each file looks like, as `scan_file` would find it."""
        about, arrays = self.about, self._arrays
        columns = [
            (
                name,
                about.row_shapes[at],
                about.dtypes[at],
                arrays[f"kinds{at}"].tolist(),
                arrays[f"stored{at}"].tolist(),
            )
            for at, name in ((about.names.index(name), name) for name in names)
        ]
        rows, sizes = arrays["rows"].tolist(), arrays["sizes"].tolist()

        @functools.lru_cache(maxsize=_ALIKE)  # where files are alike, one object does for all
        def dataset(name: str, kind: StoredAs, shape: tuple[int, ...], dtype: str, stored: int) -> DatasetLayout:
            return DatasetLayout(name, shape, dtype, kind.storage, kind.chunks, kind.filters, stored)

        for number, path in enumerate(self._paths):
            datasets = [
                dataset(name, about.kinds[kinds[number]], (rows[number], *row_shape), dtype, stored[number])
                for name, row_shape, dtype, kinds, stored in columns
            ]
            yield FileLayout(path, sizes[number], tuple(datasets), self._tags[number])

    def time(self, number: int) -> int:
        """Return when a file of this machine was changed, in ns; 0 where checksums tell more."""
        return 0 if self.about.checksums else int(self._arrays["times"][number])

    def table(self, number: int, name: str) -> Table | None:
        """Return where a dataset lies in a file; None where the index does not know."""
        at, arrays = self.about.names.index(name), self._arrays
        kind = self.about.kinds[int(arrays[f"kinds{at}"][number])]
        if not kind.direct:
            return None
        ends = arrays[f"chunk_ends{at}"]
        start, stop = (int(ends[number - 1]) if number else 0), int(ends[number])
        found = {}
        for what in _PER_CHUNK:
            if self._archive.length(f"{what}{at}"):
                found[what] = self._archive.part(f"{what}{at}", start, stop)
        empty = np.zeros(stop - start, np.uint32)
        if stop > start and not {"offsets", "lengths"} <= set(found):
            raise DataError(f"{shown(self.path)}: the index is damaged: it has no places of chunks")
        return Table(
            kind,
            int(arrays[f"begins{at}"][number]),
            found.get("offsets", empty[:0].astype(np.int64)),
            found.get("lengths", empty[:0]),
            found.get("masks", empty),
            found.get("sums"),
        )

    def _checked(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays that there have to be, each with a number a file."""
        about = self.about
        _refuse_nonsense(about)
        wanted = {**_PER_FILE}
        for at in range(len(about.names)):
            wanted |= {f"{name}{at}": dtype for name, dtype in _PER_DATASET.items()}
        files = len(arrays["rows"])
        for name, dtype in wanted.items():
            if arrays[name].shape != (files,) or arrays[name].dtype != np.dtype(dtype):
                raise ValueError(f"{name} has another shape or type")
        numbers = {name: arrays[name] for name in wanted}
        if not files or (numbers["rows"] < 1).any() or int(numbers["rows"].astype(object).sum()) >= 1 << 62:
            raise ValueError("its files have no rows, or too many")
        for at in range(len(about.names)):
            if (numbers[f"kinds{at}"] >= len(about.kinds)).any() or (np.diff(numbers[f"chunk_ends{at}"]) < 0).any():
                raise ValueError("it names ways of storing, or chunks, that it does not have")
        return numbers

    def _absolute(self, name: str) -> str:
        """Return a file that the index names; names without a folder or a server count from the index's."""
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


class IndexedData(DataLayout, what="layout of indexed data", version=1):
    """The layout that an index tells, and the way back to it.

    Args:
        index: the index.
        names: the datasets.
    """

    index: DataIndex

    def __init__(self, index: DataIndex, names: Sequence[str]) -> None:
        object.__setattr__(self, "index", index)
        super().__init__(tuple(index.file_layouts(names)))


class IndexWriter:
    """Gathers what an index says, file by file.

    Args:
        path: of the index to be written.
        datasets: those of any of the files; names, types and row shapes are the same in all.
        checksums: whether each block has one.
    """

    def __init__(self, path: str, datasets: Sequence[DatasetLayout], checksums: bool) -> None:
        self.path = path
        names, dtypes, shapes = zip(*((each.name, each.dtype, each.row_shape) for each in datasets), strict=True)
        self._about = About(names, dtypes, shapes, (), checksums)
        self._kinds: dict[StoredAs, int] = {}
        self._named: list[tuple[str, str]] = []
        self._numbers: dict[str, list[Any]] = defaultdict(list)

    def add(self, layout: FileLayout, time: int, tables: Sequence[Table]) -> None:
        """Note a file, with where each of its datasets lies."""
        numbers = self._numbers
        self._named.append((self._relative(layout.path), layout.tag or ""))
        for name, value in zip(_PER_FILE, (layout.datasets[0].rows, layout.size, time), strict=True):
            numbers[name].append(value)
        for at, (dataset, table) in enumerate(zip(layout.datasets, tables, strict=True)):
            kind = self._kinds.setdefault(table.kind, len(self._kinds))
            end = (numbers[f"chunk_ends{at}"] or [0])[-1] + len(table.offsets)
            for name, value in zip(_PER_DATASET, (kind, dataset.stored_bytes, table.begin, end), strict=True):
                numbers[f"{name}{at}"].append(value)
            for name in _PER_CHUNK:
                values = getattr(table, name)
                if values is not None and len(values):
                    numbers[f"{name}{at}"].append(np.asarray(values, _PER_CHUNK[name]))

    def write(self) -> None:
        """Write the index, under another name until it is whole."""
        about = replace(self._about, kinds=tuple(self._kinds))
        texts = {"about": about.to_dict(), "files": self._named}
        arrays = {name: np.frombuffer(json.dumps(text).encode(), np.uint8) for name, text in texts.items()}
        for name, dtype in _PER_FILE.items():
            arrays[name] = np.array(self._numbers[name], dtype)
        for at in range(len(about.names)):
            for name, dtype in _PER_DATASET.items():
                arrays[f"{name}{at}"] = np.array(self._numbers[f"{name}{at}"], dtype)
            for name, dtype in _PER_CHUNK.items():
                parts = self._numbers[f"{name}{at}"]
                if parts and (name != "masks" or any(part.any() for part in parts)):
                    arrays[f"{name}{at}"] = np.concatenate(parts).astype(dtype)
        with replacing(self.path) as file:
            np.savez(file, allow_pickle=False, **arrays)

    def _relative(self, path: str) -> str:
        """Return a file's name as seen from the index, where it lies beside or below it."""
        if is_url(path):
            return path
        name = os.path.relpath(path, os.path.dirname(self.path))
        return path if name.startswith("..") else name
