"""TFRecord files of tf.train.Example as sources, parsed by TensorFlow, which also checks their checksums."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kerasmem.datatools.converting.fields import ColumnFilter, Field, Piece, check_name
from kerasmem.datatools.converting.sources.image_decoding import (
    ImageOptions,
    decode_alike,
    decode_image,
    is_encoded_image,
)
from kerasmem.datatools.converting.sources.images import in_order
from kerasmem.datatools.converting.sources.protocol import RowSource
from kerasmem.errors import DataError
from kerasmem.hdf5.layout import one_line, shown
from kerasmem.units import GIB

_FRAME = 16  # bytes around a record: length, its checksum, the record's checksum
_MOST_RECORD = GIB
_AHEAD = 4


class RecordSource(RowSource):
    """A TFRecord file whose records all have the features of the first.

    A feature of bytes becomes an image where the first record's is one, and else, where all have one length, a row of
    uint8.

    Args:
        path: the file, gzip or not.
        images: how images become arrays.
        wanted: which features matter.
        threads: that decode images.

    Raises:
        DataError: the file is damaged, or its records are no Examples of one kind.
    """

    def __init__(self, path: str, images: ImageOptions, wanted: ColumnFilter, threads: int) -> None:
        super().__init__(shown(path), path)
        self._path, self._options, self._threads = path, images, threads
        with open(path, "rb") as file:
            self._packed = file.read(2) == b"\x1f\x8b"
        self._first = b""
        self.rows = self._count()
        self._kinds: dict[str, tuple[str, int]] = {}
        self._features: dict[str, str] = {}
        self._images: set[str] = set()
        self.fields = self._look(wanted)

    def pieces(self, start: int, rows: int, names: Sequence[str] | None = None) -> Iterator[Piece]:
        """Yield rows."""
        import tensorflow as tf

        wanted = [field for field in self.fields if names is None or field.name in names]
        spec = {}
        for field in wanted:
            kind, length = self._kinds[field.name]
            dtype = {"bytes": tf.string, "int": tf.int64, "float": tf.float32}[kind]
            spec[self._features[field.name]] = tf.io.FixedLenFeature([1 if kind == "bytes" else length], dtype)
        done = start
        try:
            with tf.device("/CPU:0"), ThreadPoolExecutor(self._threads, "kerasmem-decode") as pool:
                data = tf.data.TFRecordDataset([self._path], compression_type="GZIP" if self._packed else "")
                for batch in data.skip(start).batch(rows):
                    parsed = tf.io.parse_example(batch, spec)
                    values = {field.name: parsed[self._features[field.name]].numpy() for field in wanted}
                    yield {field.name: self._values(field, values[field.name], done, pool) for field in wanted}
                    done += len(batch)
        except tf.errors.OpError as error:
            # how TensorFlow puts it names the feature, or the place in the file
            reason = one_line(error.message, 300)
            raise DataError(
                f"{self.label}: records {done:,} to {min(done + rows, self.rows):,} cannot be read: {reason}"
            ) from error

    def _values(self, field: Field, values: np.ndarray, first: int, pool: ThreadPoolExecutor) -> np.ndarray:
        kind, length = self._kinds[field.name]
        if kind != "bytes":
            return values.reshape(len(values), *field.shape)
        texts = values.reshape(-1).tolist()
        out = np.empty((len(texts), *field.shape), np.uint8)
        if field.name in self._images:

            def decode(number: int) -> np.ndarray:
                where = f"{self.label}: {shown(field.name)} of record {first + number:,}"
                return decode_alike(texts[number], where, self._options, "", field.shape, "the first")

            for number, image in enumerate(in_order(pool, decode, range(len(texts)), self._threads * _AHEAD)):
                out[number] = image
            return out
        for number, text in enumerate(texts):
            if len(text) != length:
                raise DataError(
                    f"{self.label}: {shown(field.name)} of record {first + number:,} has {len(text):,} bytes, and "
                    f"that of the first {length:,}; leave it out with drop, or store it as numbers"
                )
            out[number] = np.frombuffer(text, np.uint8)
        return out

    def _look(self, wanted: ColumnFilter) -> tuple[Field, ...]:
        import tensorflow as tf

        try:
            example = tf.train.Example.FromString(self._first)
        except Exception as error:  # protobuf's errors differ from version to version
            raise DataError(
                f"{self.label}: its records are no tf.train.Example ({one_line(str(error), 200)})"
            ) from error
        self._first = b""
        fields = []
        for feature in sorted(example.features.feature):
            if not wanted.keeps(feature):
                continue
            value = example.features.feature[feature]
            kind = value.WhichOneof("kind")
            if kind is None:
                raise DataError(
                    f"{self.label}: the feature {shown(feature)} is empty in the first record; leave it out with drop"
                )
            content = getattr(value, kind).value
            fields.append(self._field(feature, kind.removesuffix("_list").replace("int64", "int"), content))
        if not fields:
            if example.features.feature:
                wanted.check()
            raise DataError(f"{self.label}: its first record has no features; is it a file of tf.train.Example?")
        return tuple(fields)

    def _field(self, feature: str, kind: str, content: Any) -> Field:
        name = check_name(feature, self.label)
        self._features[name] = feature
        if kind != "bytes":
            self._kinds[name] = (kind, len(content))
            dtype = "<i8" if kind == "int" else "<f4"
            return Field(name, dtype, () if len(content) == 1 else (len(content),))
        if len(content) != 1 or not content[0]:
            raise DataError(
                f"{self.label}: the feature {shown(feature)} has {len(content)} texts a record; leave it out with drop"
            )
        self._kinds[name] = (kind, len(content[0]))
        if is_encoded_image(content[0]):
            self._images.add(name)
            shape = decode_image(content[0], f"{self.label}: {shown(name)} of record 0", self._options).shape
            return Field(name, "|u1", shape)
        self.notes.append(f"{shown(name)} holds bytes that are no image; they are written as numbers from 0 to 255")
        return Field(name, "|u1", (len(content[0]),))

    def _count(self) -> int:
        """Count records by their lengths alone; a file that ends within one is found before anything is written."""
        size = os.path.getsize(self._path)
        records = at = 0
        try:
            with gzip.open(self._path, "rb") if self._packed else open(self._path, "rb") as file:
                while head := file.read(12):
                    if len(head) < 12:
                        raise EOFError("it ends within the length of a record")
                    length = struct.unpack("<Q", head[:8])[0]
                    if length > _MOST_RECORD:
                        raise EOFError(f"a record of {length:,} bytes is too long to be true")
                    at += _FRAME + length
                    if not records:
                        self._first = file.read(length)
                        length -= len(self._first)
                    if self._packed:
                        if len(file.read(length + 4)) != length + 4:
                            raise EOFError("it ends within a record")
                    elif at > size:
                        raise EOFError("it ends within a record")
                    else:
                        file.seek(length + 4, os.SEEK_CUR)
                    records += 1
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{self.label}: the TFRecord file is damaged after {records:,} records: {one_line(str(error))}; copy "
                "or write it again"
            ) from error
        if not records:
            raise DataError(f"{self.label}: the file holds no records")
        return records
