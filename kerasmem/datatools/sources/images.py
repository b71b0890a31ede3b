"""Folders of images, a folder a class, and how an image becomes an array."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import NoReturn

import numpy as np

from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError, MissingExtraError
from kerasmem.hdf5.format.layout import one_line, shown

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")  # Pillow starts other programs for some others
_MODES = {"rgb": ("RGB", 3), "gray": ("L", 1)}
_MOST_PIXELS = 1 << 26  # of one image, and about as many of all that are decoded at a time


class ImageFolder(RowSource):
    """A folder with a folder of images for each class. Classes are numbered in the order of their names.

    Hidden files and files of other kinds are skipped and counted in a note.

    Args:
        path: the folder.
        options: size and colors.

    Raises:
        DataError: If there are no images in folders, or one is a link.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(shown(path), path)
        self._options = options
        folders, files, skipped = _list_files(path)
        if not files:
            suffixes = ", ".join(_SUFFIXES)
            raise DataError(f"{self.label}: has no folders with images, one a class (names that end in {suffixes})")
        numbers = {folder: number for number, folder in enumerate(folders)}
        classes = [numbers[name.partition(os.sep)[0]] for name in files]
        self._files, self._classes, self.rows = files, np.array(classes, np.int32), len(files)
        for number in sorted(set(range(len(folders))) - set(classes)):
            self.notes.append(f"the folder {shown(folders[number])} holds no images")
        if skipped:
            self.notes.append(
                f"{len(skipped):,} files were skipped, such as {shown(skipped[0])}: images are read if they lie in the "
                "folder of a class and are not hidden"
            )
        self._shape = self._decode(0, None).shape
        self._threads = max(1, min(options.threads, _MOST_PIXELS // prod(self._shape[:2])))
        class_names = tuple(os.fsencode(name).decode("utf-8", "backslashreplace") for name in folders)
        self.fields = (Field("x", "|u1", self._shape), Field("y", "<i4", (), class_names))

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield images and classes."""
        with ThreadPoolExecutor(self._threads, "kerasmem-decode") as pool:
            for first in range(self.first, self.first + self.rows, rows):
                numbers = range(first, min(first + rows, self.first + self.rows))
                images = pool.map(lambda number: self._decode(number, self._shape), numbers)
                yield {"x": np.stack(list(images)), "y": self._classes[numbers.start : numbers.stop]}

    def _decode(self, number: int, shape: tuple[int, ...] | None) -> np.ndarray:
        path = os.path.join(self.paths[0], self._files[number])
        return decode_image(path, shown(path), self._options, shape)


def _list_files(path: str) -> tuple[list[str], list[str], list[str]]:
    """Return the folders of classes, the images in them, and other files, as paths within the folder.

    Raises:
        DataError: If a folder is a link, or an image is no file.
        OSError: If a folder cannot be listed.
    """
    classes: list[str] = []
    files, skipped = [], []
    for folder, folders, names in os.walk(path, onerror=_raise):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=os.fsencode)
        classes = classes or folders.copy()
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                raise DataError(f"{shown(os.path.join(folder, name))}: is a link to a folder; put the folder there")
        for name in sorted(names, key=os.fsencode):
            is_image = name.lower().endswith(_SUFFIXES) and not name.startswith(".") and folder != path
            here = os.path.join(folder, name)
            if is_image and not os.path.isfile(here):
                raise DataError(f"{shown(here)}: is called like an image and is no file; remove it")
            (files if is_image else skipped).append(os.path.relpath(here, path))
    return classes, files, skipped


def _raise(error: OSError) -> NoReturn:
    raise error


def decode_image(
    source: str | bytes, where: str, options: ReadOptions, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Return an image as uint8 (height, width, channels), turned as its camera noted.

    The first frame is taken, and transparency is dropped.

    Args:
        source: path of the file, or its content.
        where: its name for messages.
        options: size and colors.
        shape: expected shape. Defaults to any.

    Raises:
        DataError: If it is no image, or damaged, too large, or of another shape.
        MissingExtraError: If Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MissingExtraError("reading images", "convert") from None
    mode, channels = _MODES[options.color]
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise ValueError(f"it has {image.width:,} × {image.height:,} pixels, and {_MOST_PIXELS:,} are allowed")
            if image.mode.startswith(("I", "F")):
                raise ValueError("it has more than 8 bits a value; save the values as .npy")
            ImageOps.exif_transpose(image, in_place=True)  # a copy would take as much memory again
            result = image.convert(mode)
            if options.image_size is not None:
                result = result.resize(options.image_size, Image.Resampling.BILINEAR)
            array = np.asarray(result, np.uint8).reshape(result.height, result.width, channels)
    except Exception as error:  # Pillow raises whatever its decoders meet in damaged files
        reason = one_line(str(error), 200) or type(error).__name__
        raise DataError(f"{where}: cannot be read as an image: {reason}; leave it out") from error
    if shape is not None and array.shape != shape:
        sizes = f"has {array.shape[1]:,} × {array.shape[0]:,} pixels, and the first {shape[1]:,} × {shape[0]:,}"
        raise DataError(f"{where}: {sizes}; pass image_size (--image-size 224x224) to resize them")
    return array
