"""TFRecord files of tf.train.Example as sources, parsed and verified by TensorFlow."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kerasmem.datatools.fields import Field, Rows, check_name
from kerasmem.datatools.settings import ReadOptions
from kerasmem.datatools.sources.images import LOSSES, DecodedImage, decode_image, in_order
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import one_line, shown
from kerasmem.units import GIB

_MOST_RECORD = GIB


class _Feature(NamedTuple):
    """What the records have under a name: "int64", "float" or "bytes", how many of them, and whether it is an image."""

    name: str
    kind: str
    length: int
    is_image: bool


class RecordSource(RowSource):
    """A TFRecord file whose records all have the features of the first.

    A feature of bytes becomes an image where the first record's is one, and else, where all have one length, a row of
    uint8.

    Args:
        path: the file, gzip or not.
        options: how images become arrays, and which features matter.

    Raises:
        DataError: the file is damaged, or its records are no Examples of one kind.
    """

    starts = (0,)

    def __init__(self, path: str, options: ReadOptions) -> None:
        super().__init__(shown(path), path)
        self._options = options
        with open(path, "rb") as file:
            self._packed = file.read(2) == b"\x1f\x8b"
        self.rows, first = self._count()
        self._features: dict[str, _Feature] = {}
        self.fields = self._look(first)

    def pieces(self, start: int, rows: int) -> Iterator[Rows]:
        """Yield rows."""
        import tensorflow as tf

        kinds = {"bytes": tf.string, "int64": tf.int64, "float": tf.float32}
        spec = {}
        for name, kind, length, _ in (self._features[field.name] for field in self.fields):
            spec[name] = tf.io.FixedLenFeature([1 if kind == "bytes" else length], kinds[kind])
        done = start
        try:
            with tf.device("/CPU:0"):
                data = tf.data.TFRecordDataset(list(self.paths), compression_type="GZIP" if self._packed else "")
                for batch in data.skip(start).batch(rows):
                    for number, record in enumerate(batch.numpy().tolist(), start=done):
                        self._example(record, number)  # TensorFlow's fast parser trusts the lengths in it
                    parsed = tf.io.parse_example(batch, spec)
                    values = {field: parsed[self._features[field.name].name].numpy() for field in self.fields}
                    yield {field.name: self._values(field, found, done) for field, found in values.items()}
                    done += len(batch)
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            # how TensorFlow puts it names the feature, or the place in the file; it may quote bytes that are no text
            said = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else error.message
            reason = one_line(said, 300)
            last = min(done + rows, self.rows)
            raise DataError(f"{self.label}: records {done:,} to {last:,} cannot be read: {reason}") from error

    def _values(self, field: Field, values: np.ndarray, first: int) -> np.ndarray:
        feature = self._features[field.name]
        if feature.kind != "bytes":
            return values.reshape(len(values), *field.shape)
        texts = values.reshape(-1).tolist()

        def decode(number: int) -> DecodedImage:
            where = f"{self.label}: {shown(field.name)} of record {first + number:,}"
            if feature.is_image:
                return decode_image(texts[number], where, self._options, like=np.empty(field.shape, field.dtype))
            if len(texts[number]) != feature.length:
                sizes = f"has {len(texts[number]):,} bytes, and that of the first {feature.length:,}"
                raise DataError(f"{where} {sizes}; leave it out with drop, or store it as numbers")
            return DecodedImage(np.frombuffer(texts[number], np.uint8))

        numbers = range(len(texts))
        decoded = in_order(decode, numbers, self._options.threads) if feature.is_image else map(decode, numbers)
        out = np.empty((len(texts), *field.shape), field.dtype)
        for number, found in enumerate(decoded):
            out[number] = found.array
            self._losses.update(LOSSES[loss] for loss in found.losses)
        return out

    def _example(self, record: bytes, number: int) -> Any:
        import tensorflow as tf

        try:
            return tf.train.Example.FromString(record)
        except Exception as error:  # protobuf's errors differ from version to version
            reason = one_line(str(error), 200)
            raise DataError(f"{self.label}: record {number:,} is no tf.train.Example ({reason})") from error

    def _look(self, first: bytes) -> tuple[Field, ...]:
        """Return the fields that the features of the first record become."""
        features = self._example(first, 0).features.feature
        fields = []
        for name in sorted(features):
            if not self._options.columns.reads(name):
                continue
            kind = features[name].WhichOneof("kind")
            if kind is None or not getattr(features[name], kind).value:
                raise DataError(f"{self.label}: the feature {shown(name)} is empty in the first record; drop it")
            fields.append(self._field(name, kind.removesuffix("_list"), getattr(features[name], kind).value))
        if not fields:
            if features:
                self._options.columns.check()
            raise DataError(f"{self.label}: its first record has no features; is it a file of tf.train.Example?")
        return tuple(fields)

    def _field(self, feature: str, kind: str, content: Any) -> Field:
        name = check_name(feature, self.label)
        length, is_image = len(content), False
        if kind == "bytes":
            if len(content) != 1 or not content[0]:
                raise DataError(
                    f"{self.label}: the feature {shown(feature)} has {len(content)} texts a record; drop it"
                )
            length, is_image = len(content[0]), _is_encoded_image(content[0])
        self._features[name] = _Feature(feature, kind, length, is_image)
        if is_image:
            image = decode_image(content[0], f"{self.label}: {shown(name)} of record 0", self._options).array
            return Field(name, image.dtype.str, image.shape)
        if kind == "bytes":
            self.notes.append(f"{shown(name)} holds bytes that are no image; they are written as numbers from 0 to 255")
            return Field(name, "|u1", (length,))
        return Field(name, "<i8" if kind == "int64" else "<f4", () if length == 1 else (length,))

    def _count(self) -> tuple[int, bytes]:
        """Count records by their lengths, and return the first record."""
        path = self.paths[0]
        records, first = 0, b""
        try:
            with gzip.open(path, "rb") if self._packed else open(path, "rb") as file:
                while head := file.read(12):  # the length, and its checksum
                    if len(head) < 12:
                        raise EOFError("it ends within the length of a record")
                    length = int.from_bytes(head[:8], "little")
                    if length > _MOST_RECORD:
                        raise EOFError(f"a record of {length:,} bytes is too long to be true")
                    end = file.tell() + length + 4  # the record, and its checksum
                    if not records:
                        first = file.read(length)
                    file.seek(end - 1)
                    if not file.read(1):
                        raise EOFError("it ends within a record")
                    records += 1
        except (OSError, EOFError, zlib.error) as error:
            reason = one_line(str(error))
            raise DataError(
                f"{self.label}: the TFRecord file is damaged after {records:,} records: {reason}"
            ) from error
        if not records:
            raise DataError(f"{self.label}: the file holds no records")
        return records, first


def _is_encoded_image(data: bytes) -> bool:
    """Return whether bytes begin as an image file does."""
    starts = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
    return data.startswith(starts) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")
