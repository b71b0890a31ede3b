"""Folders of images, a folder a class, and how an image becomes an array."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError, MissingExtraError
from kerasmem.hdf5.format.layout import one_line, shown

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
        _load_pillow()
        super().__init__(shown(path), path)
        self._options, self._skipped = options, list[str]()
        with os.scandir(path) as entries:
            folders = sorted((e.name for e in entries if e.is_dir() and not e.name.startswith(".")), key=os.fsencode)
        if not folders:
            raise DataError(f"{self.label}: holds no folders; a folder of images for each class is needed")
        digest = hashlib.blake2b(digest_size=16)
        self._files: list[str] = []
        for entry in self._images(path, ()):
            name = os.path.relpath(entry.path, path)
            if os.sep in name:
                status = entry.stat()
                digest.update(os.fsencode(name) + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
                self._files.append(name)
            else:
                self._skipped.append(name)
        if not self._files:
            raise DataError(f"{self.label}: holds no images (names that end in {', '.join(SUFFIXES)})")
        self._listed, self.rows = digest.hexdigest(), len(self._files)
        numbers = {name: number for number, name in enumerate(folders)}
        self._classes = np.array([numbers[name.partition(os.sep)[0]] for name in self._files], np.int32)
        empty = set(numbers.values()) - set(np.unique(self._classes).tolist())
        self.notes += [f"the folder {shown(folders[number])} holds no images" for number in sorted(empty)]
        if self._skipped:
            self.notes.append(
                f"{len(self._skipped):,} files were passed over, such as {shown(self._skipped[0])}: images are read if "
                "they lie in the folder of a class and are not hidden"
            )
        self._first: np.ndarray | None = None
        self._first = self._decode(0).array
        class_names = tuple(os.fsencode(name).decode("utf-8", "backslashreplace") for name in folders)
        self.fields = (Field("x", self._first.dtype.str, self._first.shape), Field("y", "<i4", (), class_names))

    def identity(self) -> list[Any]:
        """Return the number of images and a digest of their names, sizes and times of change."""
        return [os.path.abspath(self.paths[0]), self.rows, self._listed]

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield images and classes."""
        stream = in_order(self._decode, range(start, self.rows), self._options.threads)
        for first in range(start, self.rows, rows):
            images = np.empty((min(rows, self.rows - first), *self.fields[0].shape), self.fields[0].dtype)
            for image in images:
                found = next(stream)
                image[...] = found.array
                self._losses.update(LOSSES[loss] for loss in found.losses)
            yield {"x": images, "y": self._classes[first : first + len(images)]}

    def part(self, start: int, stop: int) -> RowSource:
        """Return some of the images, with no more names than theirs."""
        found = copy.copy(self)
        vars(found).update(
            rows=stop - start,
            _losses=Counter(),
            _classes=self._classes[start:stop],
            _files=self._files[start:stop],
        )
        return found

    def _decode(self, number: int) -> DecodedImage:
        path = os.path.join(self.paths[0], self._files[number])
        return decode_image(path, shown(path), self._options, self._first, shown(self._files[0]))

    def _images(self, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[os.DirEntry[str]]:
        """Yield the images of a folder and those below, sorted by name."""
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in above:
            raise DataError(f"{shown(folder)}: a link leads back to a folder above it; remove it")
        if len(above) > _DEPTH:
            raise DataError(f"{shown(folder)}: more than {_DEPTH} folders within one another")
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            is_folder, is_image = entry.is_dir(), entry.name.lower().endswith(SUFFIXES)
            if entry.name.startswith(".") or not (is_folder or is_image):
                if is_folder or is_image or above:
                    self._skipped.append(entry.name)
                continue
            if entry.is_symlink() and not self._options.follow_links:
                kind = "is a link to a folder" if is_folder else "is a link"
                raise DataError(f"{shown(entry.path)}: {kind}; pass follow_links=True (--follow-links) if you trust it")
            if is_folder:
                yield from self._images(entry.path, (*above, (here.st_dev, here.st_ino)))
            elif not entry.is_file():
                raise DataError(f"{shown(entry.path)}: is called like an image and is no file")
            else:
                yield entry


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


FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Formats that are decoded. Others that Pillow knows are not tried: some start other programs."""

SUFFIXES = tuple(".jpg .jpeg .jpe .jfif .png .bmp .dib .gif .webp .tif .tiff .ppm .pgm .pbm".split())
"""Ends of names of images. A file's content decides its format."""

_MODES = {"rgb": ("RGB", 3), "rgba": ("RGBA", 4), "gray": ("L", 1)}
_MOST_PIXELS = 1 << 26  # of one image, and of all that are decoded at a time; more is taken for an attack
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N", "I")
LOSSES = {
    "alpha": "images have transparency, which is dropped; color='rgba' (--color rgba) keeps it",
    "bits": "images have 16 bits a value, of which the upper 8 are kept",
    "frames": "images have several frames or pages, of which the first is taken",
}
"""What an image may lose, and the note about it after a number."""


class _Decoding:
    """Limit the pixels of the images that threads decode at a time."""

    def __init__(self) -> None:
        self._pixels = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserved(self, pixels: int) -> Iterator[None]:
        """Wait until an image of so many pixels can be decoded beside the others."""
        with self._changed:
            self._changed.wait_for(lambda: self._pixels + pixels <= _MOST_PIXELS)
            self._pixels += pixels
        try:
            yield
        finally:
            with self._changed:
                self._pixels -= pixels
                self._changed.notify_all()


_DECODING = _Decoding()


class DecodedImage(NamedTuple):
    """An image (height, width, channels) of uint8 or uint16, and its losses: keys of `LOSSES`."""

    array: np.ndarray
    losses: tuple[str, ...] = ()


def _load_pillow() -> Any:
    """Return PIL.Image, or raise a `MissingExtraError`."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("reading images", "convert") from None
    return Image


def decode_image(
    source: str | bytes,
    where: str,
    options: ReadOptions,
    like: np.ndarray | None = None,
    first: str = "the first",
) -> DecodedImage:
    """Decode an image, and note its losses.

    Orientation noted by a camera is applied; of several frames the first is taken; transparency is dropped unless
    `color` is "rgba". Grey images of 16 bits stay so as uint16, unless the first image has 8; colours of 16 bits come
    with their upper 8.

    Args:
        source: path of the file, or its content.
        where: its name, for messages.
        options: what is wanted.
        like: the first image, whose shape it has to have and whose type it gets; None for any.
        first: what messages call that one.

    Raises:
        DataError: it is no image, cut off, too large, or of another shape.
    """
    pillow = _load_pillow()
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pillow.open(source if isinstance(source, str) else io.BytesIO(source), formats=FORMATS) as image:
                pixels = image.width * image.height
                if pixels > _MOST_PIXELS:
                    raise DataError(_too_many(where, f"{image.width:,} × {image.height:,} pixels"))
                with _DECODING.reserved(pixels):
                    found = _decoded(ImageOps, pillow, image, where, options, None if like is None else like.dtype)
    except UnidentifiedImageError:
        raise DataError(f"{where}: is no image in a format that is read ({', '.join(FORMATS)}); leave it out") from None
    except DataError:
        raise
    except pillow.DecompressionBombError:
        raise DataError(_too_many(where, "far more pixels than a picture has")) from None
    except MemoryError:
        raise DataError(f"{where}: does not fit in memory once unpacked") from None
    except Exception as error:  # Pillow raises whatever its decoders meet in damaged files
        reason = one_line(str(error), 200) or type(error).__name__
        raise DataError(f"{where}: the image is cut off or damaged: {reason}; leave it out") from error
    if like is not None and found.array.shape != like.shape:
        own, wanted = found.array.shape, like.shape
        sizes = f"has {own[1]:,} × {own[0]:,} pixels, and {first} has {wanted[1]:,} × {wanted[0]:,}"
        raise DataError(f"{where}: {sizes}; pass image_size (--image-size 224x224) to resize them")
    return found


def _too_many(where: str, size: str) -> str:
    return f"{where}: has {size}, and {_MOST_PIXELS:,} are allowed; leave it out, or make it smaller"


def _decoded(
    ops: Any, pillow: Any, image: Any, where: str, options: ReadOptions, dtype: np.dtype[Any] | None
) -> DecodedImage:
    mode, channels = _MODES[options.color]
    is_cut = ";16" in str(image.tile) and image.mode not in _SIXTEEN_BITS  # Pillow has no colours of 16 bits
    losses = ["frames"] if _has_frames(image) else []
    ops.exif_transpose(image, in_place=True)  # a copy would take as much again
    upright = image
    if upright.mode == "F":
        raise DataError(f"{where}: holds floating-point values, no colours; save it as .npy")
    if options.color != "rgba" and _is_transparent(upright):
        losses.append("alpha")
    if upright.mode in _SIXTEEN_BITS:
        if upright.mode == "I" and not 0 <= min(upright.getextrema()) <= max(upright.getextrema()) <= 65535:
            raise DataError(f"{where}: has values beyond 16 bits; convert it first")
        if dtype != np.uint8:
            return DecodedImage(_with_channels(_sixteen_bits(pillow, upright, options), channels), tuple(losses))
        upright, is_cut = pillow.fromarray((np.asarray(upright) >> 8).astype(np.uint8)), True
    if upright.mode != mode:
        if upright.mode in ("P", "PA") and mode != "RGBA":
            upright = upright.convert("RGBA")
        upright = upright.convert(mode)
    if options.image_size is not None and upright.size != options.image_size:
        upright = upright.resize(options.image_size, pillow.Resampling.BILINEAR)
    array: np.ndarray = np.asarray(upright, np.uint8)
    array = array.reshape(array.shape[0], array.shape[1], channels)
    if dtype == np.uint16:
        array = array.astype(np.uint16) * 257  # white stays white
    return DecodedImage(array, (*losses, "bits") if is_cut else tuple(losses))


def _sixteen_bits(pillow: Any, image: Any, options: ReadOptions) -> np.ndarray:
    """Return grey values of 16 bits, resized if requested."""
    if options.image_size in (None, image.size):
        return np.asarray(image).astype(np.uint16)
    # Pillow resizes no 16 bits.
    resized = image.convert("F").resize(options.image_size, pillow.Resampling.BILINEAR)
    return np.rint(np.asarray(resized)).astype(np.uint16)


def _with_channels(grey: np.ndarray, channels: int) -> np.ndarray:
    array = np.repeat(grey[:, :, None], channels, axis=2)
    array[:, :, 3:] = 65535  # opaque
    return array


def _has_frames(image: Any) -> bool:
    with contextlib.suppress(Exception):  # what is wrong with a later frame does not matter to the first
        return bool(getattr(image, "is_animated", False))
    return False


def _is_transparent(image: Any) -> bool:
    if image.mode not in ("RGBA", "LA", "PA", "RGBa", "La") and "transparency" not in image.info:
        return False
    if image.mode in _SIXTEEN_BITS:
        return True
    return bool(image.convert("RGBA").getchannel("A").getextrema()[0] < 255)
