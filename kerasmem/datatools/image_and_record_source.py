"""Folders of images and TFRecord files as sources, and the decoding of their images."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np

from kerasmem.datatools.conversion_settings import ReadOptions
from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.row_source import RowSource
from kerasmem.errors import DataError, MissingExtraError
from kerasmem.hdf5.format.layout import one_line, quote

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")  # for some others Pillow starts external programs
_MODES = {"rgb": ("RGB", 3), "gray": ("L", 1)}
_MOST_PIXELS = 1 << 26  # of one image, and of all images that are decoded together
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
_MOST_BYTES = 1 << 40  # of a record, because seeking fails beyond some TiB


class ImageFolder(RowSource):
    """A folder with one folder of images per class. Classes are numbered in the order of their names.

    Other files are skipped and counted in a note. Hidden files are skipped silently.

    Args:
        path: the folder.
        options: size and color of the images.

    Raises:
        DataError: If no folder contains images, or there is a symbolic link.
    """

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(quote(path), path)
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
            raise DataError(f"{self.label}: needs one folder of images per class, with names that end in {suffixes}")
        self._files, self._classes, self.rows = files, np.array(classes, np.int32), len(files)
        if skipped:
            self.notes.append(
                f"{len(skipped):,} files and folders that are not images are skipped, such as {quote(skipped[0])}"
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
        return decode_image(path, quote(path), self._options, shape)


def _visible(folder: str) -> list[str]:
    """Return the paths of files and folders that are not hidden, sorted by name.

    Raises:
        DataError: If one is a symbolic link, because it may lead to any file.
    """
    names = sorted((name for name in os.listdir(folder) if not name.startswith(".")), key=os.fsencode)
    paths = [os.path.join(folder, name) for name in names]
    for path in paths:
        if os.path.islink(path):
            raise DataError(f"{quote(path)}: is a symbolic link; replace it with the file or folder itself")
    return paths


def decode_image(
    source: str | bytes, label: str, options: ReadOptions, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Decode the first frame of an image, without transparency and rotated by its EXIF orientation.

    Args:
        source: path of the file, or its content.
        label: name for messages.
        options: size and color.
        shape: expected shape. Defaults to any.

    Returns:
        uint8 array (height, width, channels).

    Raises:
        DataError: If the image is damaged, too large, or has another shape.
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
                raise ValueError(f"it has {image.width:,} × {image.height:,} pixels; {_MOST_PIXELS:,} are allowed")
            if image.mode.startswith(("I", "F")):
                raise ValueError("it has more than 8 bits per channel; save it as .npy")
            ImageOps.exif_transpose(image, in_place=True)  # a copy would double the memory
            result = image.convert(mode)
            if options.image_size is not None:
                result = result.resize(options.image_size, Image.Resampling.BILINEAR)
            array = np.asarray(result, np.uint8).reshape(result.height, result.width, channels)
    except Exception as error:  # Pillow raises errors of any type for damaged files
        reason = one_line(str(error), 200) or type(error).__name__
        raise DataError(f"{label}: cannot be read as an image: {reason}; leave it out") from error
    if shape is not None and array.shape != shape:
        sizes = (
            f"must have {shape[1]:,} × {shape[0]:,} pixels as the first; got {array.shape[1]:,} × {array.shape[0]:,}"
        )
        raise DataError(f"{label}: {sizes}. Pass image_size (--image-size 224x224) to resize images")
    return array


class RecordSource(RowSource):
    """A TFRecord file of `tf.train.Example`.

    The columns are the features of the first record that are numbers, lists of numbers or encoded images. Other
    features of the first record are left out with a note, those of later records without one.

    Args:
        path: the file.
        options: columns to read, size and color of images.

    Raises:
        DataError: If the file is damaged, or a record has no features like those of the first.
    """

    starts = (0,)

    def __init__(self, path: str, options: ReadOptions) -> None:
        import tensorflow as tf

        super().__init__(quote(path), path)
        self._options = options
        with self._refuse_damage():
            self.rows = self._count_records()
            first = next(iter(tf.data.TFRecordDataset(path))).numpy()
        features = self._example(first, 0).features.feature
        if not features:
            raise DataError(f"{self.label}: the first record must be a tf.train.Example; got one without features")
        self._fields: dict[str, Field] = {}
        for name in sorted(features):
            if options.columns.reads(name):
                self._add_field(name, features[name])
        self.fields = tuple(self._fields.values())
        if not self.fields and self.notes:
            raise DataError(f"{self.label}: no feature can be read; {'; '.join(self.notes)}")
        if not self.fields:
            options.columns.refuse_empty(self.label)

    def _example(self, record: bytes, number: int) -> Any:
        import tensorflow as tf

        try:
            return tf.train.Example.FromString(record)
        except Exception as error:  # the type depends on the version of protobuf
            reason = one_line(str(error), 200)
            raise DataError(f"{self.label}: record {number:,} must be a tf.train.Example ({reason})") from error

    def _add_field(self, name: str, content: Any) -> None:
        """Add the column of a feature of the first record, or a note that it is left out."""
        kind = content.WhichOneof("kind")
        values = getattr(content, kind).value if kind else ()
        shape: tuple[int, ...] = () if len(values) == 1 else (len(values),)
        dtype = {"int64_list": "<i8", "float_list": "<f4"}.get(kind, "|u1")
        if not values or (dtype == "|u1" and (shape or not values[0].startswith(_SIGNATURES))):
            self.notes.append(f"left out: {quote(name)} (not numbers or an encoded image)")
            return
        if dtype == "|u1":
            shape = decode_image(values[0], f"{self.label}: {quote(name)} of record 0", self._options).shape
        self._fields[name] = Field(name, dtype, shape)

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows."""
        import tensorflow as tf

        spec = {}
        for name, field in self._fields.items():
            is_image = field.dtype == "|u1"
            spec[name] = tf.io.FixedLenFeature(
                () if is_image else field.shape, tf.string if is_image else tf.as_dtype(np.dtype(field.dtype))
            )
        done = 0
        with ThreadPoolExecutor(self._options.threads, "kerasmem-decode") as pool, self._refuse_damage():
            for batch in tf.data.TFRecordDataset(self.paths[0]).batch(rows):
                for number, record in enumerate(batch.numpy().tolist(), start=done):
                    self._example(record, number)  # because TensorFlow's fast parser does not check lengths
                parsed = tf.io.parse_example(batch, spec)
                piece = {}
                for name, field in self._fields.items():
                    values = parsed[name].numpy()
                    if field.dtype == "|u1":
                        labels = [f"{self.label}: {quote(name)} of record {done + k:,}" for k in range(len(values))]
                        images = pool.map(self._decode, values.tolist(), labels, [field.shape] * len(values))
                        values = np.stack(list(images))
                    piece[field.name] = values
                yield piece
                done += len(batch)

    def _decode(self, image: bytes, label: str, shape: tuple[int, ...]) -> np.ndarray:
        return decode_image(image, label, self._options, shape)

    def _count_records(self) -> int:
        """Count the records by their lengths. TensorFlow would not notice a file that ends within a length."""
        count = 0
        with open(self.paths[0], "rb") as file:
            while header := file.read(12):  # the length and its checksum
                length = min(int.from_bytes(header[:8], "little"), _MOST_BYTES)
                file.seek(length + 3, os.SEEK_CUR)
                if len(header) < 12 or not file.read(1):  # the last byte of the record's checksum
                    raise EOFError(f"it ends within record {count:,}")
                count += 1
        if not count:
            raise EOFError("it has no records")
        return count

    @contextlib.contextmanager
    def _refuse_damage(self) -> Iterator[None]:
        import tensorflow as tf

        try:
            with tf.device("/CPU:0"):
                yield
        except (tf.errors.OpError, UnicodeDecodeError, OSError, EOFError) as error:
            message = getattr(error, "message", str(error)).rpartition("}} ")[2]  # after the operation's name
            reason = one_line(message.partition(" [Op:")[0], 300)
            raise DataError(f"{self.label}: cannot be read: {reason}; copy or write it again") from error
