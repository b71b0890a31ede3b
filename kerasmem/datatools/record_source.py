"""TFRecord files of tf.train.Example as sources, read and parsed by TensorFlow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kerasmem.datatools.fields import Field, Rows
from kerasmem.datatools.image_source import decode_image
from kerasmem.datatools.row_source import RowSource
from kerasmem.datatools.settings import ReadOptions
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import one_line, shown

_IMAGES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")  # how files begin
_MOST_BYTES = 1 << 40  # of a record; file systems seek no further than some TiB


class RecordSource(RowSource):
    """A TFRecord file whose records all have the features of the first.

    Features are numbers, lists of numbers and encoded images. Other bytes are left out.

    Args:
        path: the file.
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
            first = next(iter(tf.data.TFRecordDataset(path))).numpy()
        features = self._example(first, 0).features.feature
        if not features:
            raise DataError(f"{self.label}: its first record has no features; is it a file of tf.train.Example?")
        self._fields: dict[str, Field] = {}
        for name in sorted(features):
            if options.columns.reads(name):
                self._add_field(name, features[name])
        self.fields = tuple(self._fields.values())
        if not self.fields and self.notes:
            raise DataError(f"{self.label}: has no column to read; {'; '.join(self.notes)}")
        if not self.fields:
            options.columns.refuse_empty(self.label)

    def _example(self, record: bytes, number: int) -> Any:
        import tensorflow as tf

        try:
            return tf.train.Example.FromString(record)
        except Exception as error:  # protobuf's errors differ from version to version
            reason = one_line(str(error), 200)
            raise DataError(f"{self.label}: record {number:,} is no tf.train.Example ({reason})") from error

    def _add_field(self, name: str, content: Any) -> None:
        """Add the column that a feature of the first record becomes, or note that it is left out."""
        kind = content.WhichOneof("kind")
        values = getattr(content, kind).value if kind else ()
        shape: tuple[int, ...] = () if len(values) == 1 else (len(values),)
        dtype = {"int64_list": "<i8", "float_list": "<f4"}.get(kind, "|u1")
        if not values or (dtype == "|u1" and (shape or not values[0].startswith(_IMAGES))):
            self.notes.append(f"left out: {shown(name)} (it is no list of numbers and no encoded image)")
            return
        if dtype == "|u1":
            shape = decode_image(values[0], f"{self.label}: {shown(name)} of record 0", self._options).shape
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
                    self._example(record, number)  # TensorFlow's fast parser trusts the lengths in it
                parsed = tf.io.parse_example(batch, spec)
                piece = {}
                for name, field in self._fields.items():
                    values = parsed[name].numpy()
                    if field.dtype == "|u1":
                        labels = [f"{self.label}: {shown(name)} of record {done + k:,}" for k in range(len(values))]
                        images = pool.map(self._decode, values.tolist(), labels, [field.shape] * len(values))
                        values = np.stack(list(images))
                    piece[field.name] = values
                yield piece
                done += len(batch)

    def _decode(self, image: bytes, label: str, shape: tuple[int, ...]) -> np.ndarray:
        return decode_image(image, label, self._options, shape)

    def _count_records(self) -> int:
        """Return the number of records by their lengths. TensorFlow accepts a file that ends within a length."""
        count = 0
        with open(self.paths[0], "rb") as file:
            while head := file.read(12):  # the length and its checksum
                length = min(int.from_bytes(head[:8], "little"), _MOST_BYTES)
                file.seek(length + 3, os.SEEK_CUR)
                if len(head) < 12 or not file.read(1):  # the last byte of the record's checksum
                    raise EOFError(f"it ends within record {count:,}")
                count += 1
        if not count:
            raise EOFError("it holds no records")
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
