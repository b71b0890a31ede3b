"""A sequence's batches as a `tf.data.Dataset`; TensorFlow is imported when one is made.

`make_dataset` hands on the batches of this process. `make_graph_dataset` is a graph of TensorFlow's own operations.
Workers of the tf.data service run a data set in processes of their own, on machines of their own; a Python generator
cannot follow them there. What can are byte ranges: rows that lie in the file as they are, which is data without
filters, are read by `tf.data.FixedLengthRecordDataset` with all that comes before and after left out. Of data packed by
gzip a whole chunk is read so, and unpacked.

The rows are dealt with piece by piece; a piece is a run of rows that lie together in the file, in each dataset. The
service hands out pieces to its workers, each to one. The order of pieces is computed from their numbers, the same in
all workers; rows are shuffled within a window of pieces of whichever worker reads them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.columns import Column
from kerasmem.hdf5.direct.delivery import Packed
from kerasmem.hdf5.layout import JoinedLayout, shown
from kerasmem.streaming.plan import StreamPlan, dataset_names

if TYPE_CHECKING:
    from kerasmem.hdf5.files import OpenFiles

Batch = tuple[Any, ...]
_UNSIGNED = {"uint32": "int32", "uint64": "int64"}  # TensorFlow decodes these only as the others
_KINDS = "fiub"


def make_dataset(epoch: Callable[[], Iterator[Batch]], signature: Batch, *, batches: int | None, prefetch: int) -> Any:
    """Return a data set. Every iteration of it delivers what `epoch()` does.

    Args:
        epoch: called at the start of each iteration.
        signature: a `tf.TensorSpec` for each array of a batch, in the batch's structure.
        batches: batches of each iteration; -1 for no end, None where it is not known.
        prefetch: batches made ahead.
    """
    import tensorflow as tf

    data = tf.data.Dataset.from_generator(lambda: map(_without_lists, epoch()), output_signature=signature)
    if batches is not None:
        data = data.apply(tf.data.experimental.assert_cardinality(batches))  # -1: TensorFlow's INFINITE_CARDINALITY
    options = tf.data.Options()
    # Which rows are whose is said with `shard`; TensorFlow would leave out batches on top.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.prefetch(prefetch).with_options(options)


def plan_signature(plan: StreamPlan) -> Batch:
    """Return the signature of batches as they are read."""
    import tensorflow as tf

    rows = plan.batch_rows if plan.all_full else None
    weights = (tf.TensorSpec((rows,), tf.float32),) if plan.adds_weights else ()
    specs = [tf.TensorSpec((rows, *column.row_shape), tf.as_dtype(column.dtype)) for column in plan.columns]
    return (*plan.build(specs), *weights)


def batches_signature(batches: Sequence[Batch]) -> Batch:
    """Return a signature that fits all `batches`; lengths that differ among them, and the number of rows, stay open."""
    import tensorflow as tf

    def spec(*arrays: Any) -> Any:
        tensors = [tf.convert_to_tensor(array) for array in arrays]
        lengths = np.array([tensor.shape for tensor in tensors])
        shape = [int(some[0]) if (some == some[0]).all() else None for some in lengths.T]
        return tf.TensorSpec([None, *shape[1:]] if shape else [], tensors[0].dtype)

    return tf.nest.map_structure(spec, *map(_without_lists, batches))


def _without_lists(value: Any) -> Any:
    """Return a batch with its lists as tuples: tf.data takes a list for an array."""
    if isinstance(value, (list, tuple)):
        return tuple(_without_lists(entry) for entry in value)
    if isinstance(value, dict):
        return {key: _without_lists(entry) for key, entry in value.items()}
    return value


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
    batches = data.rebatch(settings.batch_size, drop_remainder=settings.drop_remainder)
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
    layouts = {layout.name: layout for layout in plan.layout.datasets}
    names = dataset_names(plan.parts)
    for name in names:
        if np.dtype(layouts[name].dtype).kind not in _KINDS:
            path = plan.layout.files[0].path
            raise DataError(f"{shown(path)}: dataset {shown(name)} holds {layouts[name].dtype}, not numbers")
    if any(isinstance(file, JoinedLayout) for file in plan.layout.files):
        raise UsageError("path: TensorFlow alone reads the datasets of one file, not of several beside one another")
    blocks, starts = plan.blocks, np.asarray(plan.layout.starts)
    found: list[Pieces] = []
    for block in range(blocks.count):
        rows = blocks.rows(np.array([block]))
        number = int(np.searchsorted(starts, rows[0], side="right")) - 1
        places = {}
        for name in names:
            with opened.use(number, name) as file:
                places[name] = _places(file.source(name), rows - starts[number])
            if places[name] is None:
                raise DataError(
                    f"{shown(plan.layout.files[number].path)}: dataset {shown(name)} is compressed by another filter "
                    "than gzip, or stored in another way that TensorFlow alone cannot read. Write it again without: "
                    "kerasmem data repack --compression none"
                )
        found.append(_cut(number, rows, places, {name: layouts[name].row_bytes for name in names}))
    elements: dict[str, set[int]] = {name: {some.elements.get(name, -1) for some in found} for name in names}
    if any(len(each) > 1 for each in elements.values()):
        raise DataError(f"{plan.layout.title}: files are compressed in unlike ways; repack them all alike")

    def joined(what: str) -> dict[str, np.ndarray]:
        return {name: np.concatenate([getattr(some, what)[name] for some in found]).astype(np.int64) for name in names}

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


def served(data: Any, service: str, batch_size: int, timeout: float) -> Any:
    """Return what the readers of a tf.data service send, in even batches.

    Args:
        data: what they read.
        service: the dispatcher's address, "grpc://host:port".
        batch_size: rows a batch.
        timeout: seconds after which waiting for a batch is an error.
    """
    import tensorflow as tf

    way = tf.data.experimental.service
    sent = data.apply(way.distribute(way.ShardingPolicy.DYNAMIC, service)).rebatch(batch_size)
    return within(sent, timeout, f"the readers of the tf.data service at {service}")


def within(data: Any, timeout: float, who: str) -> Any:
    """Return a data set whose batches are waited for only so long; TensorFlow waits for a dead reader without end.

    Args:
        data: the data set.
        timeout: seconds.
        who: sends the batches, for the message.
    """
    import tensorflow as tf

    def batches() -> Iterator[Any]:
        ready: _Queue = queue.Queue(2)
        over = threading.Event()
        threading.Thread(target=_fetch, args=(data, ready, over), name="kerasmem-service", daemon=True).start()
        try:
            while True:
                try:
                    batch, error = ready.get(timeout=timeout)
                except queue.Empty:
                    raise DataError(
                        f"no batch came from {who} for {timeout:g} s: one has most likely died; start a reader again "
                        "at its address, or all of them, or wait longer with `timeout`"
                    ) from None
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield batch
        finally:
            over.set()

    return tf.data.Dataset.from_generator(batches, output_signature=data.element_spec)


_Queue = queue.Queue[tuple[Any, BaseException | None]]
_LOOK = 1.0  # seconds from one look at whether anybody wants batches to the next


def _fetch(data: Any, ready: _Queue, over: threading.Event) -> None:
    def put(batch: Any, error: BaseException | None = None) -> None:
        while not over.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((batch, error), timeout=_LOOK)
                return

    try:
        for batch in data:
            put(batch)
            if over.is_set():
                return
        put(None, StopIteration())
    except BaseException as error:  # whoever waits gets it
        put(None, error)
