"""A folder of images, a folder a class: listed once, decoded by threads, in the order of the names."""

from __future__ import annotations

import copy
import hashlib
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from kerasmem.datatools.converting.fields import Field, Rows
from kerasmem.datatools.converting.settings import ReadOptions
from kerasmem.datatools.converting.sources.image_decoding import (
    SUFFIXES,
    DecodedImage,
    decode_image,
    load_pillow,
    suffix_of,
)
from kerasmem.datatools.converting.sources.row_source import RowSource
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown

_AHEAD = 4  # images a thread that are decoded or waiting to be taken
_DEPTH = 32  # folders within folders


class ImageFolder(RowSource):
    """A folder that holds a folder of images for each class; the classes are numbered in the order of their names.

    Hidden files, and files whose names do not end as an image's, are passed over and counted in a note. Links are
    refused, unless `follow_links` says otherwise: where one leads nobody knows.

    Args:
        path: the folder.
        options: how images become arrays, and whether links to files and folders are followed.

    Raises:
        DataError: there are no classes or no images, or a link that leads back.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        load_pillow()
        super().__init__(shown(path), path)
        self._options = options
        self._digest = hashlib.blake2b(digest_size=16)
        self._skipped: list[str] = []
        self._hidden: list[str] = []
        entries = self._list(path)
        folders = [entry.name for entry in entries if self._is_folder(entry)]
        stray = [entry.name for entry in entries if entry.name not in folders and suffix_of(entry.name) in SUFFIXES]
        if not folders:
            raise DataError(f"{self.label}: holds no folders; a folder of images for each class is needed")
        classes: list[int] = []
        names, ends = bytearray(), [0]  # one text holds all names; where each ends
        for number, name in enumerate(folders):
            before = len(classes)
            for found in self._images(os.path.join(path, name), ()):
                names += os.fsencode(os.path.relpath(found, path))
                ends.append(len(names))
                classes.append(number)
            if len(classes) == before:
                self.notes.append(f"the folder {shown(name)} holds no images")
        if not classes:
            raise DataError(f"{self.label}: holds no images (names that end in {', '.join(SUFFIXES)})")
        self._names = bytes(names)
        self._listed = self._digest.hexdigest()
        del self._digest  # which no other process can be given
        self._begins = 0
        self._classes = np.array(classes, np.int32)
        self._ends = np.array(ends, np.int64)
        self.rows = len(classes)
        for names_of, why in (
            (stray, "they lie beside the folders of the classes, not in one"),
            (self._skipped, "their names are not those of images"),
            (self._hidden, "their names begin with a dot"),
        ):
            if names_of:
                self.notes.append(f"{len(names_of):,} files were passed over: {why}, such as {shown(names_of[0])}")
        self._first: np.ndarray | None = None
        self._first = self._decode(0).array
        class_names = tuple(os.fsencode(name).decode("utf-8", "backslashreplace") for name in folders)
        self.fields = (Field("x", self._first.dtype.str, self._first.shape), Field("y", "<i4", (), class_names))

    def identity(self) -> list[Any]:
        """Return the number of images, and what their names, sizes and times of change come to."""
        return [os.path.abspath(self.paths[0]), self._begins, self.rows, self._listed]

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield images and classes."""
        stream = in_order(self._decode, range(start, self.rows), self._options.threads)
        for first in range(start, self.rows, rows):
            images = np.empty((min(rows, self.rows - first), *self.fields[0].shape), self.fields[0].dtype)
            for image in images:
                found = next(stream)
                image[...] = found.array
                self._losses.update(found.losses)
            yield {"x": images, "y": self._classes[first : first + len(images)]}

    def part(self, start: int, stop: int) -> RowSource:
        """Return some of the images, with no more names than theirs."""
        found = copy.copy(self)
        vars(found).update(
            rows=stop - start,
            _begins=start,
            _losses=Counter(),
            _classes=self._classes[start:stop],
            _names=self._names[self._ends[start] : self._ends[stop]],
            _ends=self._ends[start : stop + 1] - self._ends[start],
        )
        return found

    def _decode(self, number: int) -> DecodedImage:
        name, first = (os.fsdecode(self._names[self._ends[k] : self._ends[k + 1]]) for k in (number, 0))
        path = os.path.join(self.paths[0], name)
        return decode_image(path, shown(path), self._options, suffix_of(name), self._first, shown(first))

    def _images(self, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
        """Yield the images of a folder and those below, sorted by name."""
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in above:
            raise DataError(f"{shown(folder)}: a link leads back to a folder above it; remove it")
        if len(above) > _DEPTH:
            raise DataError(f"{shown(folder)}: more than {_DEPTH} folders within one another")
        for entry in self._list(folder):
            if self._is_folder(entry):
                yield from self._images(entry.path, (*above, (here.st_dev, here.st_ino)))
            elif suffix_of(entry.name) in SUFFIXES:
                self._note(entry)
                yield entry.path
            else:
                self._skipped.append(entry.name)

    def _list(self, folder: str) -> list[os.DirEntry[str]]:
        """Return what a folder holds, sorted by name, without hidden files."""
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        hidden = [entry for entry in entries if entry.name.startswith(".")]
        self._hidden += [each.name for each in hidden if suffix_of(each.name) in SUFFIXES or each.is_dir()]
        return [entry for entry in entries if not entry.name.startswith(".")]

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        found = entry.is_dir()
        if found:
            self._refuse_link(entry, "is a link to a folder")
        return found

    def _note(self, entry: os.DirEntry[str]) -> None:
        self._refuse_link(entry, "is a link")
        found = entry.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{shown(entry.path)}: is called like an image and is no file")
        self._digest.update(os.fsencode(entry.path) + f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode())

    def _refuse_link(self, entry: os.DirEntry[str], what: str) -> None:
        if entry.is_symlink() and not self._options.follow_links:
            raise DataError(
                f"{shown(entry.path)}: {what}; pass follow_links=True (--follow-links) if you trust where it leads"
            )


def in_order(decode: Callable[[int], DecodedImage], numbers: Iterable[int], threads: int) -> Iterator[DecodedImage]:
    """Yield the images of these numbers, in order, decoded by threads that are a few ahead."""
    waiting: deque[Future[DecodedImage]] = deque()
    pool = ThreadPoolExecutor(threads, "kerasmem-decode")
    try:
        for number in numbers:
            waiting.append(pool.submit(decode, number))
            if len(waiting) >= threads * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
