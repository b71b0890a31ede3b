"""Read paths of data files: lists, patterns, URLs and indexes.

An index stores the layouts of many files, so that no file must be opened to read them. It is one JSON object: the
distinct layouts, and the name, size, version and layout number of each file.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np

from kerasmem import checks
from kerasmem.errors import DataError, UsageError
from kerasmem.files import read_json, replace_file
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, FileLayout, one_line, quote
from kerasmem.hdf5.format.urls import is_url, scheme_of
from kerasmem.hdf5.io.access import RemoteAccess, read_remote
from kerasmem.hdf5.io.remote_file import RemoteFile, expand, is_pattern
from kerasmem.records import Record
from kerasmem.units import GIB

INDEX_SUFFIX = ".index"
"""File name suffix of an index."""
_MOST_BYTES = GIB  # more than an index of millions of files
_MOST_EXTENT = 1 << 50


@dataclass(frozen=True)
class Access:
    """Settings for opening files.

    Args:
        trust_file: follow links to other files, let HDF5 decode unknown filters, and accept missing parts. Defaults to
            False.
        remote: settings for remote files.
    """

    trust_file: bool = False
    remote: RemoteAccess = field(default_factory=RemoteAccess)


def read_data(path: Any, trust_file: Any, remote: Any) -> tuple[Sequence[str], Access]:
    """Return the files like `read_files`, and the access settings.

    Raises:
        UsageError: If `remote` is given for local files.
    """
    access = read_remote(remote)
    files = read_files(path, access)
    if remote and not any(map(is_url, files)):
        raise UsageError("remote: is for URLs, but all files are local; leave it out")
    return files, Access(checks.flag("trust_file", trust_file), access)


def read_paths(path: Any, remote: RemoteAccess | None = None) -> tuple[str, ...]:
    """Return absolute paths and URLs, with the matches of patterns in natural order (part-2 before part-10).

    Args:
        path: a path, URL or pattern, or a list of paths and URLs.
        remote: settings for remote files, to list the matches of a URL.

    Raises:
        DataError: If no file matches.
        UsageError: If a path is invalid, or listed twice.
    """
    if isinstance(path, Sequence) and not isinstance(path, (str, bytes)):
        paths = [read_location(entry) for entry in path]
        if not paths:
            raise UsageError("path: the list of files is empty")
        if len(set(paths)) < len(paths):
            repeated = next(location for location in paths if paths.count(location) > 1)
            raise UsageError(f"path: {quote(repeated)} is named more than once; its rows would be read repeatedly")
        return tuple(paths)
    location = read_location(path)
    if is_url(location):
        if not is_pattern(location):
            return (location,)
        return tuple(sorted(expand(location, remote or RemoteAccess()), key=natural_order))
    if glob.has_magic(location) and not os.path.exists(location):
        matches = [name for name in glob.glob(location, recursive=True) if os.path.isfile(name)]
        if not matches:
            raise DataError(
                f"{quote(location)}: no file matches this pattern; pass a path, a list of paths, or a pattern "
                "such as 'data/*.h5' ('**' matches folders within folders)"
            )
        return tuple(sorted(matches, key=natural_order))
    return (location,)


def read_files(path: Any, remote: RemoteAccess | None = None) -> Sequence[str]:
    """Return the files like `read_paths`, or the files of an index.

    Raises:
        DataError: If no file matches, or the index is damaged.
        UsageError: If a path is invalid, or listed twice.
    """
    paths = read_paths(path, remote)
    if len(paths) > 1 or not paths[0].split("?")[0].endswith(INDEX_SUFFIX):
        return paths
    return DataIndex(paths[0], remote or RemoteAccess())


def natural_order(path: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that compares numbers by value: part-2 before part-10."""
    pieces = re.split(r"([0-9]+)", path)  # text and digits alternate
    numbered = [(int(piece), "") if number % 2 else (0, piece) for number, piece in enumerate(pieces)]
    return numbered, path


def read_path(path: Any) -> str:
    """Return an absolute path, so that it stays valid in worker processes and after `chdir`."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        kind = type(path).__name__
        raise UsageError(f"path: must be a path, a pattern or a list of paths; got {kind}") from None
    if not text or "\0" in text:
        raise UsageError(f"path: {text!r} is not a path")
    return os.path.abspath(os.path.expanduser(text))


def read_location(path: Any) -> str:
    """Return a URL, or an absolute path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        return read_path(path)
    return text if is_url(text) and "\0" not in text else read_path(text)


@dataclass(frozen=True)
class IndexContent(Record, what="index of data files", version=1):
    """The content of an index.

    Args:
        layouts: datasets of a file, each combination once. Their `stored_bytes` are 0.
        files: path, size, tag, time of change, and number of the layout of each file.
    """

    layouts: tuple[tuple[DatasetLayout, ...], ...]
    files: tuple[tuple[str, int, str | None, int, int], ...]


class DataIndex(Sequence[str]):
    """The paths and layouts of the files of an index.

    Args:
        path: path or URL of the index.
        access: settings for remote files.

    Raises:
        DataError: If it is not an index, or is damaged.
    """

    def __init__(self, path: str, access: RemoteAccess) -> None:
        self.path = path
        try:
            self._content = IndexContent.from_dict(read_json(_read_bytes(path, access)))
            _refuse_nonsense(self._content)
            self._paths = [self._absolute(name) for name, *_ in self._content.files]
        except (DataError, UsageError):
            raise
        except Exception as error:  # NumPy and the JSON parser raise various errors for damaged files
            raise DataError(
                f"{quote(path)}: this is not an index of data files, or it is damaged ({one_line(str(error), 100)}); "
                "make it with `kerasmem data index`"
            ) from error

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: Any) -> Any:
        return self._paths[number]

    def layout(self, names: Sequence[str]) -> DataLayout:
        """Return the layout of datasets in all files.

        Raises:
            DataError: If the index does not list a dataset.
        """
        known = [dataset.name for dataset in self._content.layouts[0]]
        for name in names:
            if name not in known:
                raise DataError(
                    f"{quote(self.path)}: the index has no dataset {quote(name)}; it has "
                    f"{', '.join(map(quote, known[:12]))}"
                )
        numbers = [known.index(name) for name in names]
        layouts = [tuple(datasets[at] for at in numbers) for datasets in self._content.layouts]
        files = zip(self._paths, self._content.files, strict=True)
        return DataLayout(
            tuple(FileLayout(path, size, layouts[at], tag, time) for path, (_, size, tag, time, at) in files)
        )

    def _absolute(self, name: str) -> str:
        """Return the absolute path or URL of a file. Names are relative to the index."""
        if not is_url(self.path):
            return name if is_url(name) else os.path.normpath(os.path.join(os.path.dirname(self.path), name))
        scheme, _, rest = self.path.partition("://")
        url = name if is_url(name) else f"{scheme}:{urljoin('//' + rest, name)}"
        if (scheme_of(url), urlsplit(url).netloc) != (scheme_of(self.path), urlsplit(self.path).netloc):
            raise DataError(
                f"{quote(self.path)}: the index must name files on the same server or bucket; got {quote(url)}. "
                "If you trust the index, download it"
            )
        return url


def _read_bytes(path: str, access: RemoteAccess) -> bytes:
    if is_url(path):
        with RemoteFile(path, access) as remote:
            if remote.known.size > _MOST_BYTES:
                raise ValueError(f"it has {remote.known.size:,} bytes, more than the limit of {_MOST_BYTES:,}")
            return remote.read(remote.known.size)
    return Path(path).read_bytes()


def _refuse_nonsense(content: IndexContent) -> None:
    layouts, files = content.layouts, content.files
    if not layouts or not files or not all(0 <= number < len(layouts) for *_, number in files):
        raise ValueError("it has no files, or layouts are missing")
    for datasets in layouts:
        if not datasets or [dataset.name for dataset in datasets] != [dataset.name for dataset in layouts[0]]:
            raise ValueError("its files have no datasets, or different ones")
        for dataset in datasets:
            shape, chunks, dtype = dataset.shape, dataset.chunks, np.dtype(dataset.dtype)
            extents = all(0 < extent < _MOST_EXTENT for extent in (*shape, *(chunks or ())))
            if not shape or chunks == () or not extents or dtype.kind not in "fiub":
                raise ValueError(f"a dataset has the shape {shape}, the type {dtype} and chunks of {chunks}")
            if dataset.rows != datasets[0].rows:
                raise ValueError("the datasets of a file differ in their number of rows")
    if sum(layouts[number][0].rows for *_, number in files) >= 1 << 62:
        raise ValueError("its files have too many rows")


def write_index(path: str, files: Sequence[FileLayout]) -> None:
    """Write an index atomically.

    Args:
        path: path of the index.
        files: layouts of the files, all with the same datasets.
    """
    numbers: dict[tuple[DatasetLayout, ...], int] = {}
    entries = []
    for file in files:
        datasets = tuple(replace(dataset, stored_bytes=0) for dataset in file.datasets)
        number = numbers.setdefault(datasets, len(numbers))
        entries.append((_relative(file.path, path), file.size, file.tag, file.time, number))
    content = IndexContent(tuple(numbers), tuple(entries))
    with replace_file(path) as stream:
        stream.write(json.dumps(content.to_dict()).encode())


def _relative(path: str, index: str) -> str:
    """Make a path relative to the index if the file is in the same folder or below."""
    if is_url(path):
        return path
    name = os.path.relpath(path, os.path.dirname(index))
    return path if name.startswith("..") else name
