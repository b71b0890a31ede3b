"""A sequence's rows as a graph of TensorFlow's own operations, which a process without this one's Python can run.

Workers of the tf.data service run a data set in processes of their own, on machines of their own; a Python generator
cannot follow them there. What can are byte ranges: rows that lie in the file as they are, which is data without
filters, are read by `tf.data.FixedLengthRecordDataset` with all that comes before and after left out.

The rows are dealt with piece by piece; a piece is a run of rows that lie together in the file, in each dataset. The
service hands out pieces to its workers, each to one. The order of pieces is computed from their numbers, the same in
all workers; rows are shuffled within a window of pieces of whichever worker reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.columns import Column
from kerasmem.hdf5.layout import shown

if TYPE_CHECKING:
    from kerasmem.streaming.sequence import H5ChunkSequence

_UNSIGNED = {"uint32": "int32", "uint64": "int64"}  # TensorFlow decodes these only as the others
_KINDS = "fiub"


@dataclass(frozen=True)
class Pieces:
    """Runs of rows that lie together in a file, in every dataset.

    Args:
        files: which file each lies in.
        rows: how many rows each has.
        offsets: where in the file each begins, by dataset.
    """

    files: np.ndarray
    rows: np.ndarray
    offsets: dict[str, np.ndarray]


def make_graph_dataset(sequence: Any, epochs: int) -> Any:
    """Return a `tf.data.Dataset` of a sequence's rows that needs no Python of this process.

    Args:
        sequence: an `H5ChunkSequence`, whose rows, in batches of its size.
        epochs: how often each row comes.

    Raises:
        DataError: a dataset is compressed, or otherwise does not lie in the file as it is.
        UsageError: the sequence does with rows what only Python can do.
    """
    import tensorflow as tf

    if sequence.transform is not None or sequence._check_finite:
        which = "nan_policy" if sequence._check_finite else "transform"
        raise UsageError(f"{which}: another process has no Python to do that; leave it out here, and map the data set")
    columns = sequence._columns
    names = list(dict.fromkeys(column.name for column in columns))
    pieces = find_pieces(sequence, names)
    paths = tf.constant([file.path for file in sequence.layout.files])
    sizes = tf.constant([file.size for file in sequence.layout.files], tf.int64)
    files, counts = tf.constant(pieces.files, tf.int64), tf.constant(pieces.rows, tf.int64)
    offsets = {name: tf.constant(found, tf.int64) for name, found in pieces.offsets.items()}
    row_bytes = {layout.name: layout.row_bytes for layout in sequence.layout.datasets}
    total, window = len(pieces.rows), max(sequence.plan.window_rows, sequence.batch_size)

    def place(number: Any) -> Any:
        if not sequence.shuffle or total == 1:
            return number % total
        seed = tf.stack([tf.constant(sequence.seed % 2**63, tf.int64), number // total])
        return tf.random.experimental.index_shuffle(number % total, seed, tf.constant(total - 1, tf.int64))

    def read(piece: Any) -> Any:
        file, rows = files[piece], counts[piece]
        parts = []
        for column in columns:
            size, start = rows * row_bytes[column.name], offsets[column.name][piece]
            rest = sizes[file] - start - size
            record = tf.data.FixedLengthRecordDataset(paths[file], size, header_bytes=start, footer_bytes=rest)
            parts.append(record.map(lambda text, column=column: decode(text, column)))
        return tf.data.Dataset.zip(tuple(parts))

    def mix(*arrays: Any) -> Any:
        order = tf.random.shuffle(tf.range(tf.shape(arrays[0])[0]))
        return tuple(tf.gather(array, order) for array in arrays)

    def build(*arrays: Any) -> Any:
        used = [[arrays[use] for use in uses] for uses in sequence._uses]
        return tuple(part.build(some) for part, some in zip(sequence._parts, used, strict=True))

    data = tf.data.Dataset.range(total * epochs).map(place).flat_map(read)
    if sequence.shuffle:
        data = data.rebatch(window).map(mix)
    return data.rebatch(sequence.batch_size, drop_remainder=sequence.drop_remainder).map(build).prefetch(2)


def decode(text: Any, column: Column) -> Any:
    """Return the rows of a column, converted, from a string tensor of their bytes."""
    import tensorflow as tf

    stored = np.dtype(column.stored)
    signed = _UNSIGNED.get(stored.newbyteorder("=").name)
    plain = tf.as_dtype(signed or stored.newbyteorder("=").name)
    little = stored.byteorder != ">"
    values = tf.io.decode_raw(text, plain, little_endian=little)
    if signed:
        values = tf.bitcast(values, tf.as_dtype(stored.newbyteorder("=").name))
    values = tf.cast(tf.reshape(values, [-1, *column.row_shape]), tf.as_dtype(column.dtype))
    if column.scale is not None:
        values = values * tf.cast(column.scale, values.dtype) + tf.cast(column.offset, values.dtype)
    return values


def find_pieces(sequence: H5ChunkSequence, names: list[str]) -> Pieces:
    """Return the runs of rows that lie together in each of some datasets, block by block.

    Raises:
        DataError: the rows of one do not lie in the file as they are.
    """
    layouts = {layout.name: layout for layout in sequence.layout.datasets}
    for name in names:
        if np.dtype(layouts[name].dtype).kind not in _KINDS:
            raise DataError(f"{shown(sequence.path)}: dataset {shown(name)} holds {layouts[name].dtype}, not numbers")
    blocks, starts = sequence._blocks, np.asarray(sequence.layout.starts)
    opened = sequence._here().reader.files
    found: list[tuple[int, np.ndarray, dict[str, np.ndarray]]] = []
    for block in range(blocks.count):
        rows = blocks.rows(np.array([block]))
        number = int(np.searchsorted(starts, rows[0], side="right")) - 1
        offsets = {}
        with opened.use(number) as file:
            for name in names:
                there = file.source(name).offsets(rows - starts[number])
                if there is None:
                    raise DataError(
                        f"{shown(sequence.layout.files[number].path)}: dataset {shown(name)} is compressed, or stored "
                        "in another way that only HDF5 reads; TensorFlow alone cannot. Write it anew without: "
                        "kerasmem data repack --compression none"
                    )
                offsets[name] = np.asarray(there, np.int64)
        torn = np.zeros(len(rows) - 1, bool)
        for name, there in offsets.items():
            torn |= np.diff(there) != layouts[name].row_bytes
        begins = np.r_[0, np.flatnonzero(torn) + 1]
        lengths = np.diff(np.r_[begins, len(rows)])
        found.append((number, lengths, {name: there[begins] for name, there in offsets.items()}))
    return Pieces(
        np.concatenate([np.full(len(lengths), number, np.int64) for number, lengths, _ in found]),
        np.concatenate([lengths for _, lengths, _ in found]).astype(np.int64),
        {name: np.concatenate([offsets[name] for _, _, offsets in found]) for name in names},
    )
