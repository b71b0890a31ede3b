"""A folder of images, a folder a class: listed once, decoded by threads, in the order of the names."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from kerasmem.datatools.converting.fields import Field, Piece
from kerasmem.datatools.converting.sources.image_decoding import (
    SUFFIXES,
    ImageOptions,
    decode_alike,
    decode_image,
    load_pillow,
    suffix_of,
)
from kerasmem.datatools.converting.sources.protocol import RowSource
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown

_AHEAD = 4  # images a thread that are decoded or waiting to be taken
_DEPTH = 32  # folders within folders


class ImageFolder(RowSource):
    """A folder that holds a folder of images for each class; the classes are numbered in the order of their names.

    Hidden files, and files whose names do not end as an image's, are passed over. Links are refused, unless
    `follow_links` says otherwise: where one leads nobody knows.

    Args:
        path: the folder.
        options: how images become arrays.
        follow_links: follow links to files and folders.
        threads: that decode.

    Raises:
        DataError: there are no classes or no images, or a link that leads back.
    """

    def __init__(self, path: str, options: ImageOptions, *, follow_links: bool, threads: int) -> None:
        load_pillow()
        super().__init__(shown(path), path)
        self._options, self._threads = options, threads
        self._digest = hashlib.blake2b(digest_size=16)
        self._skipped = 0
        folders = [entry.name for entry in _list(path) if _is_folder(entry, follow_links)]
        if not folders:
            raise DataError(f"{self.label}: holds no folders; a folder of images for each class is needed")
        classes: list[int] = []
        names, ends = bytearray(), [0]  # one text holds all names; where each ends
        for number, name in enumerate(folders):
            before = len(classes)
            for found in self._images(os.path.join(path, name), follow_links, ()):
                names += os.fsencode(os.path.relpath(found, path))
                ends.append(len(names))
                classes.append(number)
            if len(classes) == before:
                self.notes.append(f"the folder {shown(name)} holds no images")
        if not classes:
            raise DataError(f"{self.label}: holds no images (names that end in {', '.join(SUFFIXES)})")
        self._names = bytes(names)
        self._classes = np.array(classes, np.int32)
        self._ends = np.array(ends, np.int64)
        self.rows = len(classes)
        if self._skipped:
            self.notes.append(f"{self._skipped:,} files were passed over: their names are not those of images")
        self._shape = self._decode(0).shape
        class_names = tuple(os.fsencode(name).decode("utf-8", "backslashreplace") for name in folders)
        self.fields = (Field("x", "|u1", self._shape), Field("y", "<i4", (), class_names))

    def identity(self) -> list[Any]:
        """Return the number of images, and what their names, sizes and times of change come to."""
        return [os.path.abspath(self.paths[0]), self.rows, self._digest.hexdigest()]

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield images and classes."""
        if names is not None and "x" not in names:
            for first in range(start, self.rows, rows):
                yield {"y": self._classes[first : first + rows]}
            return
        with ThreadPoolExecutor(self._threads, "kerasmem-decode") as pool:
            stream = in_order(pool, self._decode, range(start, self.rows), self._threads * _AHEAD)
            for first in range(start, self.rows, rows):
                count = min(rows, self.rows - first)
                images = np.empty((count, *self._shape), np.uint8)
                for number in range(count):
                    images[number] = next(stream)
                yield {"x": images, "y": self._classes[first : first + count]}

    def _decode(self, number: int) -> np.ndarray:
        name = os.fsdecode(self._names[self._ends[number] : self._ends[number + 1]])
        path = os.path.join(self.paths[0], name)
        if not number:
            return decode_image(path, shown(path), self._options, suffix_of(name))
        first = shown(os.fsdecode(self._names[: self._ends[1]]))
        return decode_alike(path, shown(path), self._options, suffix_of(name), self._shape, first)

    def _images(self, folder: str, follow: bool, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
        """Yield the images of a folder and those below, sorted by name."""
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in above:
            raise DataError(f"{shown(folder)}: a link leads back to a folder above it; remove it")
        if len(above) > _DEPTH:
            raise DataError(f"{shown(folder)}: more than {_DEPTH} folders within one another")
        for entry in _list(folder):
            if _is_folder(entry, follow):
                yield from self._images(entry.path, follow, (*above, (here.st_dev, here.st_ino)))
            elif suffix_of(entry.name) in SUFFIXES:
                self._note(entry, follow)
                yield entry.path
            else:
                self._skipped += 1

    def _note(self, entry: os.DirEntry[str], follow: bool) -> None:
        _refuse_link(entry, follow, "is a link")
        try:
            found = entry.stat()
        except OSError as error:
            raise DataError(f"{shown(entry.path)}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{shown(entry.path)}: is called like an image and is no file")
        self._digest.update(os.fsencode(entry.path) + f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode())


def in_order(pool: ThreadPoolExecutor, work: Callable[[Any], Any], items: Sequence[Any], most: int) -> Iterator[Any]:
    """Yield what `work` makes of each item, in order, with at most so many items begun."""
    waiting: deque[Future[Any]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _list(folder: str) -> list[os.DirEntry[str]]:
    """Return what a folder holds, sorted by name, without hidden files."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{shown(folder)}: the folder cannot be read: {error.strerror}") from error
    return sorted(visible, key=lambda entry: os.fsencode(entry.name))


def _is_folder(entry: os.DirEntry[str], follow: bool) -> bool:
    try:
        if entry.is_dir():
            _refuse_link(entry, follow, "is a link to a folder")
        return entry.is_dir()
    except OSError as error:  # a link that leads to itself
        raise DataError(f"{shown(entry.path)}: cannot be read: {error.strerror}") from error


def _refuse_link(entry: os.DirEntry[str], follow: bool, what: str) -> None:
    if entry.is_symlink() and not follow:
        raise DataError(
            f"{shown(entry.path)}: {what}; pass follow_links=True (--follow-links) if you trust where it leads"
        )
