"""Folders of images, a folder a class, and how an image becomes an array."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np

from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.row_source import RowSource
from kerasmem.datatools.settings import ReadOptions
from kerasmem.errors import DataError, MissingExtraError
from kerasmem.hdf5.format.layout import one_line, shown

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")  # Pillow starts other programs for some others
_MODES = {"rgb": ("RGB", 3), "gray": ("L", 1)}
_MOST_PIXELS = 1 << 26  # of one image, and about as many of all that are decoded at a time


class ImageFolder(RowSource):
    """A folder with a folder of images for each class. Classes are numbered in the order of their names.

    Files of other kinds are skipped and counted in a note, hidden ones silently.

    Args:
        path: the folder.
        options: size and colors.

    Raises:
        DataError: If there are no images in folders, or there is a link.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(shown(path), path)
        self._options = options
        folders = [folder for folder in _visible(path) if os.path.isdir(folder)]
        files, classes, skipped = list[str](), list[int](), list[str]()
        for number, folder in enumerate(folders):
            for file in _visible(folder):
                if file.lower().endswith(_SUFFIXES) and os.path.isfile(file):
                    files.append(file)
                    classes.append(number)
                else:
                    skipped.append(file)
        if not files:
            suffixes = ", ".join(_SUFFIXES)
            raise DataError(f"{self.label}: has no folders with images, one a class (names that end in {suffixes})")
        self._files, self._classes, self.rows = files, np.array(classes, np.int32), len(files)
        if skipped:
            self.notes.append(
                f"{len(skipped):,} files and folders that are no images are skipped, such as {shown(skipped[0])}"
            )
        self._shape = self._decode(0, None).shape
        self._threads = max(1, min(options.threads, _MOST_PIXELS // prod(self._shape[:2])))
        names = [os.fsencode(os.path.basename(folder)) for folder in folders]
        class_names = tuple(name.decode("utf-8", "backslashreplace") for name in names)
        self.fields = (Field("x", "|u1", self._shape), Field("y", "<i4", (), class_names))

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield images and classes."""
        stop = self.first + self.rows
        spans = [range(first, min(first + rows, stop)) for first in range(self.first, stop, rows)]
        with ThreadPoolExecutor(self._threads, "kerasmem-decode") as pool:
            batches = (
                (span, pool.map(lambda number: self._decode(number, self._shape), span)) for span in [*spans, range(0)]
            )
            for (span, images), _ in itertools.pairwise(batches):  # the next piece is decoded in the background
                yield {"x": np.stack(list(images)), "y": self._classes[span.start : span.stop]}

    def _decode(self, number: int, shape: tuple[int, ...] | None) -> np.ndarray:
        path = self._files[number]
        return decode_image(path, shown(path), self._options, shape)


def _visible(folder: str) -> list[str]:
    """Return the paths of files and folders that are not hidden, sorted by name.

    Raises:
        DataError: If one is a link, which may lead to any file.
    """
    names = sorted((name for name in os.listdir(folder) if not name.startswith(".")), key=os.fsencode)
    paths = [os.path.join(folder, name) for name in names]
    for path in paths:
        if os.path.islink(path):
            raise DataError(f"{shown(path)}: is a link; put the file or folder itself there")
    return paths


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
