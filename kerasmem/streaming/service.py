"""A sequence's rows as a `tf.data.Dataset` of TensorFlow's own operations, for the readers of a tf.data service.

Workers of the tf.data service run a data set in processes of their own, on machines of their own; a Python generator
cannot follow them there. What can are byte ranges: rows that lie in the file as they are, which is data without
filters, are read by `tf.data.FixedLengthRecordDataset` with all that comes before and after left out. Of data packed by
gzip a whole chunk is read so, and unpacked.

The rows are dealt with piece by piece; a piece is a run of rows that lie together in the file, in each dataset. The
service hands out pieces to its workers, each to one. The order of pieces is computed from their numbers, the same in
all workers; rows are shuffled within a window of pieces of whichever worker reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.columns import Column
from kerasmem.hdf5.direct.delivery import Packed
from kerasmem.hdf5.layout import shown
from kerasmem.streaming.plan import StreamPlan

if TYPE_CHECKING:
    from kerasmem.hdf5.files import OpenFiles

_UNSIGNED = {"uint32": "int32", "uint64": "int64"}  # TensorFlow decodes these only as the others


@dataclass(frozen=True)
class Pieces:
    """Runs of rows that lie together in a file, in every dataset.

    Args:
        files: which file each lies in.
        rows: how many rows each has.
        offsets: where in the file the bytes begin that each lies in, by dataset.
        sizes: how many bytes these are.
        skipped: rows of them that come before the piece: of a packed chunk.
        elements: by dataset, bytes of an element where chunks are packed and shuffled, 0 where they are packed only.
    """

    files: np.ndarray
    rows: np.ndarray
    offsets: dict[str, np.ndarray]
    sizes: dict[str, np.ndarray]
    skipped: dict[str, np.ndarray]
    elements: dict[str, int]


def make_graph_dataset(plan: StreamPlan, opened: OpenFiles, epochs: int) -> Any:
    """Return a `tf.data.Dataset` of a plan's rows, in batches of its size, that needs no Python of this process.

    Args:
        plan: the rows.
        opened: the files that they lie in.
        epochs: how often each row comes.

    Raises:
        DataError: a dataset is compressed, or otherwise does not lie in the file as it is.
    """
    import tensorflow as tf

    settings = plan.settings
    pieces = find_pieces(plan, opened)
    paths = tf.constant([file.path for file in plan.layout.files])
    sizes = tf.constant([file.size for file in plan.layout.files], tf.int64)
    files, counts = tf.constant(pieces.files, tf.int64), tf.constant(pieces.rows, tf.int64)
    offsets, lengths, skipped = (
        {name: tf.constant(found, tf.int64) for name, found in each.items()}
        for each in (pieces.offsets, pieces.sizes, pieces.skipped)
    )
    row_bytes = {layout.name: layout.row_bytes for layout in plan.layout.datasets}
    total, window = len(pieces.rows), max(plan.memory.window_rows, settings.batch_size)

    def place(number: Any) -> Any:
        if not settings.shuffle or total == 1:
            return number % total
        seed = tf.stack([tf.constant(settings.seed % 2**63, tf.int64), number // total])
        return tf.random.experimental.index_shuffle(number % total, seed, tf.constant(total - 1, tf.int64))

    def read(piece: Any) -> Any:
        file, rows = files[piece], counts[piece]
        parts = []
        for column in plan.columns:
            name = column.name
            size, start = lengths[name][piece], offsets[name][piece]
            rest = sizes[file] - start - size
            record = tf.data.FixedLengthRecordDataset(paths[file], size, header_bytes=start, footer_bytes=rest)
            if name in pieces.elements:
                record = record.map(lambda text: tf.io.decode_compressed(text, "ZLIB"))
            first, stop = skipped[name][piece] * row_bytes[name], (skipped[name][piece] + rows) * row_bytes[name]

            def values(text: Any, column: Column = column, first: Any = first, stop: Any = stop) -> Any:
                element = pieces.elements.get(column.name, 0)
                return decode(unshuffled(text, element) if element > 1 else text, column, first, stop)

            parts.append(record.map(values))
        return tf.data.Dataset.zip(tuple(parts))

    def mix(*arrays: Any) -> Any:
        order = tf.random.shuffle(tf.range(tf.shape(arrays[0])[0]))
        return tuple(tf.gather(array, order) for array in arrays)

    data = tf.data.Dataset.range(total * epochs).map(place).flat_map(read)
    if settings.shuffle:
        data = data.rebatch(window).map(mix)
    batches = data.rebatch(settings.batch_size, drop_remainder=settings.remainder == "drop")
    return batches.map(lambda *arrays: plan.build(arrays)).prefetch(2)


def unshuffled(text: Any, element: int) -> Any:
    """Return bytes in their order, (elements, bytes of each), that HDF5 has put first bytes first."""
    import tensorflow as tf

    return tf.transpose(tf.reshape(tf.io.decode_raw(text, tf.uint8), [element, -1]))


def decode(data: Any, column: Column, first: Any = 0, stop: Any = None) -> Any:
    """Return the rows of a column, converted.

    Args:
        data: a string tensor of their bytes, or what `unshuffled` makes of one.
        column: the column.
        first: the first byte of theirs.
        stop: the byte after the last; None for all.
    """
    import tensorflow as tf

    stored = np.dtype(column.stored)
    signed = _UNSIGNED.get(stored.newbyteorder("=").name)
    plain = tf.as_dtype(signed or stored.newbyteorder("=").name)
    little = stored.byteorder != ">"
    if data.dtype == tf.string:
        text = data if stop is None else tf.strings.substr(data, first, stop - first)
        values = tf.io.decode_raw(text, plain, little_endian=little)
    else:
        size = stored.itemsize
        values = tf.bitcast(data[first // size : stop // size, :: 1 if little else -1], plain)
    if signed:
        values = tf.bitcast(values, tf.as_dtype(stored.newbyteorder("=").name))
    values = tf.cast(tf.reshape(values, [-1, *column.row_shape]), tf.as_dtype(column.dtype))
    if column.scale is not None:
        values = values * tf.cast(column.scale, values.dtype) + tf.cast(column.offset, values.dtype)
    return values


def find_pieces(plan: StreamPlan, opened: OpenFiles) -> Pieces:
    """Return the runs of rows that lie together in each of the datasets, block by block.

    Raises:
        DataError: the rows of one do not lie in the file as they are.
        UsageError: datasets lie in different files.
    """
    row_bytes = {layout.name: layout.row_bytes for layout in plan.layout.datasets}
    if any(len(file.lies_in) > 1 for file in plan.layout.files):
        raise UsageError("path: TensorFlow alone reads the datasets of one file, not of several beside one another")
    blocks, starts = plan.blocks, np.asarray(plan.layout.starts)
    found: list[Pieces] = []
    for block in range(blocks.count):
        rows = blocks.rows(np.array([block]))
        number = int(np.searchsorted(starts, rows[0], side="right")) - 1
        places = {}
        for name in row_bytes:
            with opened.use(number, name) as file:
                places[name] = _places(file.source(name), rows - starts[number])
            if places[name] is None:
                raise DataError(
                    f"{shown(plan.layout.files[number].path)}: dataset {shown(name)} is compressed by another filter "
                    "than gzip, or stored in another way that TensorFlow alone cannot read. Write it again without: "
                    "kerasmem data repack --compression none"
                )
        found.append(_cut(number, rows, places, row_bytes))
    if any(some.elements != found[0].elements for some in found):
        raise DataError(f"{plan.layout.title}: files are compressed in unlike ways; repack them all alike")

    def joined(what: str) -> dict[str, np.ndarray]:
        return {
            name: np.concatenate([getattr(some, what)[name] for some in found]).astype(np.int64) for name in row_bytes
        }

    return Pieces(
        np.concatenate([some.files for some in found]),
        np.concatenate([some.rows for some in found]),
        joined("offsets"),
        joined("sizes"),
        joined("skipped"),
        found[0].elements,
    )


def _places(source: Any, rows: np.ndarray) -> Packed | None:
    """Return where rows lie: those that lie there as they are have no size."""
    offsets = source.offsets(rows)
    if offsets is not None:
        return Packed(np.asarray(offsets), np.zeros(len(rows), np.int64), np.arange(len(rows)), -1)
    found: Packed | None = source.packed(rows)
    return found


def _cut(number: int, rows: np.ndarray, places: Mapping[str, Any], row_bytes: Mapping[str, int]) -> Pieces:
    """Return the pieces of a block: their rows lie one after another in each dataset, and in one packed chunk."""
    torn = np.zeros(len(rows) - 1, bool)
    for name, there in places.items():
        plain = there.element < 0
        torn |= np.diff(there.places) != 1
        torn |= np.diff(there.offsets) != (row_bytes[name] if plain else 0)
    begins = np.r_[0, np.flatnonzero(torn) + 1]
    lengths = np.diff(np.r_[begins, len(rows)])
    return Pieces(
        np.full(len(lengths), number, np.int64),
        lengths.astype(np.int64),
        {name: there.offsets[begins] for name, there in places.items()},
        {
            name: lengths * row_bytes[name] if there.element < 0 else there.sizes[begins]
            for name, there in places.items()
        },
        {name: there.places[begins] * (there.element >= 0) for name, there in places.items()},
        {name: there.element for name, there in places.items() if there.element >= 0},
    )
