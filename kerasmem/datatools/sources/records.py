"""TFRecord files of tf.train.Example as sources, read and parsed by TensorFlow."""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from kerasmem.datatools.fields import Field, Rows, check_name
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.images import decode_image
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import one_line, shown

_IMAGES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")  # how files begin

_MOST_BYTES = 1 << 40  # of a record; file systems seek no further than some TiB


class _Feature(NamedTuple):
    """A feature of all records: its name, "int64", "float" or "bytes", and its column."""

    name: str
    kind: str
    field: Field


class RecordSource(RowSource):
    """A TFRecord file whose records all have the features of the first.

    A feature of bytes becomes an image if the first record's is one; else a row of uint8, if all have one length.

    Args:
        path: the file, gzip or not.
        options: columns to read, size and colors of images.

    Raises:
        DataError: If the file is damaged, or its records are no Examples of one kind.
    """

    starts = (0,)

    def __init__(self, path: str, options: ReadOptions) -> None:
        import tensorflow as tf

        super().__init__(shown(path), path)
        self._options = options
        with self._refuse_damage():
            self.rows = self._count_records()
            first = next(iter(self._records())).numpy()
        try:
            features = tf.train.Example.FromString(first).features.feature
        except Exception as error:  # protobuf's errors differ from version to version
            raise DataError(f"{self.label}: its first record is no tf.train.Example: {one_line(str(error))}") from error
        if not features:
            raise DataError(f"{self.label}: its first record has no features; is it a file of tf.train.Example?")
        read = [name for name in sorted(features) if options.columns.reads(name)]
        if not read:
            options.columns.refuse_empty(self.label)
        self._features = [self._feature(name, features[name]) for name in read]
        self.fields = tuple(feature.field for feature in self._features)

    def pieces(self, rows: int) -> Iterator[Rows]:
        """Yield rows."""
        import tensorflow as tf

        kinds = {"bytes": tf.string, "int64": tf.int64, "float": tf.float32}
        spec = {}
        for feature in self._features:
            shape = () if feature.kind == "bytes" else feature.field.shape
            spec[feature.name] = tf.io.FixedLenFeature(shape, kinds[feature.kind])
        done = 0
        with ThreadPoolExecutor(self._options.threads, "kerasmem-decode") as pool, self._refuse_damage():
            for batch in self._records().batch(rows):
                parsed = tf.io.parse_example(batch, spec)
                piece = {}
                for feature in self._features:
                    piece[feature.field.name] = self._rows(feature, parsed[feature.name].numpy(), done, pool)
                yield piece
                done += len(batch)

    def _rows(self, feature: _Feature, values: np.ndarray, first: int, pool: ThreadPoolExecutor) -> np.ndarray:
        """Return the rows of a feature."""
        shape = feature.field.shape
        if feature.kind != "bytes":
            return values
        texts = values.tolist()
        labels = [f"{self.label}: {shown(feature.name)} of record {first + number:,}" for number in range(len(texts))]
        if len(shape) > 1:
            return np.stack(list(pool.map(lambda *image: decode_image(*image, self._options, shape), texts, labels)))
        for text, label in zip(texts, labels, strict=True):
            if len(text) != shape[0]:
                sizes = f"has {len(text):,} bytes, and that of the first {shape[0]:,}"
                raise DataError(f"{label} {sizes}; leave it out with drop")
        return np.frombuffer(b"".join(texts), np.uint8).reshape(-1, *shape)

    def _feature(self, feature: str, content: Any) -> _Feature:
        """Return a feature of the first record."""
        name, list_name = check_name(feature, self.label), content.WhichOneof("kind")
        values = getattr(content, list_name).value if list_name else ()
        kind, length = (list_name or "").removesuffix("_list"), len(values)
        if not length or (kind == "bytes" and (length > 1 or not values[0])):
            raise DataError(f"{self.label}: the feature {shown(feature)} is empty or a list of texts; drop it")
        if kind != "bytes":
            shape = () if length == 1 else (length,)
            return _Feature(feature, kind, Field(name, "<i8" if kind == "int64" else "<f4", shape))
        if values[0].startswith(_IMAGES):
            shape = decode_image(values[0], f"{self.label}: {shown(feature)} of record 0", self._options).shape
        else:
            shape = (len(values[0]),)
            self.notes.append(f"{shown(name)} holds bytes that are no image; they are written as numbers from 0 to 255")
        return _Feature(feature, kind, Field(name, "|u1", shape))

    def _count_records(self) -> int:
        """Return the number of records by their lengths. TensorFlow accepts a file that ends within a length."""
        count = 0
        with gzip.open(self.paths[0]) if self._is_packed() else open(self.paths[0], "rb") as file:
            while head := file.read(12):  # the length and its checksum
                length = min(int.from_bytes(head[:8], "little"), _MOST_BYTES)
                file.seek(length + 3, os.SEEK_CUR)
                if len(head) < 12 or not file.read(1):  # the last byte of the record's checksum
                    raise EOFError(f"it ends within record {count:,}")
                count += 1
        if not count:
            raise EOFError("it holds no records")
        return count

    def _records(self) -> Any:
        import tensorflow as tf

        return tf.data.TFRecordDataset(list(self.paths), compression_type="GZIP" if self._is_packed() else "")

    def _is_packed(self) -> bool:
        with open(self.paths[0], "rb") as file:
            return file.read(2) == b"\x1f\x8b"

    @contextlib.contextmanager
    def _refuse_damage(self) -> Iterator[None]:
        import tensorflow as tf

        try:
            with tf.device("/CPU:0"):
                yield
        except (tf.errors.OpError, UnicodeDecodeError, OSError, OverflowError, EOFError, zlib.error) as error:
            message = getattr(error, "message", str(error)).rpartition("}} ")[2]  # after the operation's name
            reason = one_line(message.partition(" [Op:")[0], 300)
            raise DataError(f"{self.label}: cannot be read: {reason}; copy or write it again") from error
