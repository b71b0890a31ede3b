"""H5ChunkSequence: an HDF5 file as a Keras data set, in place of arrays."""

from __future__ import annotations

import operator
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from kerasmem import checks
from kerasmem.compat.keras_reading import Call, attach_reader
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import read_dtype, read_scale
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.format.urls import name_of
from kerasmem.hdf5.io.access import ahead_bytes
from kerasmem.hdf5.rows.scan import scan_files
from kerasmem.hdf5.rows.settings import check_transform, read_data, read_parts
from kerasmem.streaming.cursor import Cursor, Position, Progress
from kerasmem.streaming.fork_local import ForkLocal
from kerasmem.streaming.opened import OpenStream
from kerasmem.streaming.plan import StreamSettings, dataset_names, describe_plan, make_plan
from kerasmem.streaming.sharding import read_shard
from kerasmem.streaming.state import make_state, read_state
from kerasmem.streaming.tf_data import (
    batches_signature,
    check_devices,
    check_reader,
    for_strategy,
    make_dataset,
    plan_signature,
)
from kerasmem.streaming.transforms import Batch
from kerasmem.units import format_count, parse_size


class H5ChunkSequence(keras.utils.PyDataset):
    """Stream float32 batches from an HDF5 file that need not fit in memory into `fit`, `evaluate`, `predict`.

    Rows are shuffled on two levels: blocks of rows that lie together in the file are read from all over it
    into a window in memory, and the rows of the window are shuffled. Every row comes exactly once an epoch
    and every chunk of the file is read about once. With the same seed the batches are the same, whatever
    `workers`, `use_multiprocessing` and `fit(shuffle=…)` are. `describe()` says how many
    blocks are shuffled together. With `fit(steps_per_epoch=…)` one epoch of the data follows the other without a break.
    `ResumeTraining` goes on with the very next batch after the process was killed.

    Within `fit` batches come in the sequence's own order: `fit(shuffle=True)`, Keras's default, would otherwise
    permute them and read the file back and forth. So `shuffle` here is the one that counts. Each epoch of `fit` is
    another epoch of the data, and so is each loop over the sequence, `for x, y in train: …`. `evaluate`, `predict`
    and `seq[i]` give batch `i` of the current epoch, also while a `fit` over the same sequence is in progress or was
    broken off. `transform` changes batches; a subclass must not override `__getitem__`.

    All this rests on how Keras reads a `PyDataset`. If that is not recognized (another version of Keras, a `PyDataset`
    of yours that reads from this one), index `i` is batch `i` for `fit` too: still every row once, but in the order
    that Keras asks for. A map-style `torch.utils.data.DataLoader` asks for indices too: call `set_epoch` before each of
    its epochs.

    Windows, threads and the open file stay from the first batch to `close()`, and TensorFlow may hold a
    sequence for as long as the process lives: if there are many, one a fold for instance, use each as a
    context manager, `with H5ChunkSequence(…) as train:`, or call `close()`. A closed one can be used again.

    Args:
        path: the HDF5 file, or a URL of one ("s3://bucket/train.h5", "gs://…", "https://…", whatever fsspec knows;
            see `remote`); or a list of files, or a pattern ("data/part-*.h5"; part-2 comes before part-10),
            whose rows are counted through in that order. Their datasets have to agree in row shape and type; chunks,
            filters and storage may differ. The number of rows is what it was when the sequence was made: whole chunks
            appended to a file later are left to the next sequence.
        x: dataset name for the features, such as "x" or "train/images"; or a list of names (several inputs;
            comes out as a tuple) or a dict of input name to dataset name (comes out as a dict).
        y: the same for the targets; None if there are none, as for `predict`.
        sample_weight: the same for weights, one value a row.
        batch_size: rows a batch; the last batch of an epoch may be smaller.
        shuffle: True for a new order each epoch; False for file order, which `predict` needs if results are
            to be matched with rows.
        seed: seed of the order; with None one is drawn.
        dtype: type of the features: "float32" (default), "float16", "float64", or "stored" to keep integers
            such as token numbers as they are; or a dict by dataset name, which may name targets too.
            Integers and booleans without `scale` are cast as they are (exact below 2**24). Targets that are
            integers or booleans keep their stored type; targets and weights that are floats become float32.
        rows: which rows to use: a slice, a range, a (start, stop) tuple or an array of row numbers; for
            train/validation splits.
        remainder: treatment of a last batch that is not full. "keep" delivers it as it is. "drop" leaves it out
            (with `shuffle`, other rows each epoch). "pad" fills it up with rows whose `sample_weight` is 0, and every
            batch has weights: workers whose ends are uneven then add up to what one process trains on, for each
            divides by equally many rows. Defaults to "keep".
        shard: (index, count), the part of the rows for worker `index` of `count`, or "auto" to take both from
            `keras.distribution`, the open scope of a `tf.distribute` strategy, JAX's or PyTorch's processes,
            `TF_CONFIG`, or the launcher (torchrun, Horovod, MPI, Slurm). The parts are disjoint, complete, of
            equally many batches, and the same in every epoch; each chunk is read by one worker, but for at most
            `count` - 1 on the borders. `batch_size` is then each worker's, in `fit` and `evaluate` under such a
            distribution too. On JAX, make it with `auto_shard_dataset=False`. Without shard every worker reads all
            rows, and a warning says so.
        scale: factor, or (factor, offset), applied to all features as they are read, such as 1/255; or a
            dict by dataset name. `value * factor + offset`.
        transform: called with each batch's arrays, `transform(x)`, `transform(x, y)` or
            `transform(x, y, sample_weight)`, in the structure given above; returns the same number of
            values. Runs in the workers; with `use_multiprocessing` cloudpickle sends it.
        memory_budget: bytes or text ("512MB") that windows, read buffers and the batches in Keras's queue
            may take together in the training process. A larger one shuffles better; the order of the rows
            depends on it. Default: 256 MiB, with batches on top. What a `transform` allocates is not counted, nor is
            half a MiB for scaling.
        trust_file: read the file without checks against damage and malice. HDF5 then follows links, external storage
            and virtual datasets into other files, and undoes filters that kerasmem cannot (szip, n-bit and others): a
            damaged chunk may end the process or bring its memory into the data. Parts that were never written, and
            virtual datasets whose sources are missing, are read as the fill value, most often 0, with a warning.
            Defaults to False: all of these are errors.
        remote: for URLs, a dict with any of "storage_options" (arguments of fsspec's file system: credentials, an
            endpoint, headers), "cache" (a folder that keeps fetched bytes for later epochs and other processes) and
            "cache_size" (bytes or text, "10GiB" by default; the least recently used are evicted). Only the ranges
            needed are fetched, a request a block and up to 64 small ones at a time; each answer is proved to be of
            the version that the sequence was made from. Needs `kerasmem[remote]`, `[s3]` or `[gcs]`.
        workers: with 2 or more, as many threads gather and transform batches ahead of training; with 0 or 1
            batches are made when Keras asks (on TensorFlow that is in a background thread already).
        use_multiprocessing: run `transform` in `workers` processes (reading stays in this one).

    The sequence does its own work ahead, because Keras's would neither keep the order nor read each chunk
    once; so Keras is told `workers=1, use_multiprocessing=False`, which is what these attributes say.

    Within `fit`, TensorFlow wraps errors raised here in its own (`InvalidArgumentError`); the text stays.

    Raises:
        DataError: If the file or its data cannot be used.
        UsageError: If a setting is wrong, or `memory_budget` too small.

    Examples:
        >>> import h5py, keras, numpy as np
        >>> with h5py.File("/tmp/example.h5", "w") as f:
        ...     f["x"] = np.random.rand(1000, 8)
        ...     f["y"] = np.random.randint(0, 2, 1000)
        >>> train = H5ChunkSequence("/tmp/example.h5", batch_size=100, rows=(0, 800))
        >>> valid = H5ChunkSequence("/tmp/example.h5", batch_size=100, rows=(800, 1000), shuffle=False)
        >>> model = keras.Sequential([keras.layers.Dense(2, "softmax")])
        >>> model.compile("adam", "sparse_categorical_crossentropy")
        >>> history = model.fit(train, validation_data=valid, epochs=2, verbose=0)
        >>> len(train), len(valid)
        (8, 2)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__getitem__" in cls.__dict__:
            raise UsageError(f"{cls.__name__}: fit would pass by its __getitem__; change batches with transform=")

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        x: Any = "x",
        y: Any = "y",
        *,
        sample_weight: Any = None,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = 0,
        dtype: Any = "float32",
        rows: Any = None,
        remainder: str = "keep",
        shard: tuple[int, int] | str | None = None,
        scale: Any = None,
        transform: Callable[..., Any] | None = None,
        memory_budget: int | str | None = None,
        trust_file: bool = False,
        remote: Mapping[str, Any] | None = None,
        workers: int = 1,
        use_multiprocessing: bool = False,
    ) -> None:
        super().__init__(workers=1, use_multiprocessing=False)
        self._files, access = read_data(path, trust_file, remote)
        self.paths = tuple(self._files)
        in_processes = checks.flag("use_multiprocessing", use_multiprocessing)
        parts = read_parts(x, y, sample_weight)
        names = dataset_names(parts)
        settings = StreamSettings(
            batch_size=checks.whole("batch_size", batch_size, 1),
            shuffle=checks.flag("shuffle", shuffle),
            seed=secrets.randbits(32) if seed is None else checks.whole("seed", seed, 0),
            seed_drawn=seed is None,
            remainder=checks.choice("remainder", remainder, ("keep", "drop", "pad")),
            shard=read_shard(shard),
            dtype=read_dtype(dtype, names),
            scale=read_scale(scale, names),
            rows=rows,
            memory_budget=None if memory_budget is None else parse_size(memory_budget, field="memory_budget"),
            transform=transform,
            workers=max(checks.whole("workers", workers, 0), int(in_processes)),
            in_processes=in_processes,
        )
        check_transform(transform, in_processes)
        if y is None and settings.shuffle:
            warnings.warn(
                "H5ChunkSequence: without y and with shuffle=True, predict would return its results in shuffled "
                "order; pass shuffle=False to match them with rows",
                stacklevel=2,
            )
        self.stream_plan = make_plan(scan_files(self._files, names, access), parts, settings)
        ahead = ahead_bytes(settings.memory_budget, self.stream_plan.memory.total_bytes)
        self._access = replace(access, remote=replace(access.remote, ahead_bytes=ahead))
        self.progress = Progress(len(self))
        self._opened: ForkLocal[OpenStream] = ForkLocal()
        self._keras_reads = False

    # ---- what it was made with

    @property
    def batch_size(self) -> int:
        """Rows a batch."""
        return self.stream_plan.settings.batch_size

    @property
    def num_rows(self) -> int:
        """Rows an epoch, of this worker."""
        return self.stream_plan.num_rows

    @property
    def shuffle(self) -> bool:
        """Whether rows come in a new order each epoch."""
        return self.stream_plan.settings.shuffle

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self.stream_plan.settings.seed

    @property
    def shard(self) -> tuple[int, int]:
        """The part of the rows, (index, count)."""
        return self.stream_plan.settings.shard

    # ---- what Keras asks for

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        return self.stream_plan.num_batches

    @property
    def num_batches(self) -> int:
        """Number of batches an epoch."""
        return self.stream_plan.num_batches

    @property
    def workers(self) -> int:
        """1 for Keras, because the sequence prepares batches itself."""
        # Keras asks as it makes an adapter, before anything else.
        attach_reader(self, lambda call: KerasReader(self, call))
        return 1

    @property
    def use_multiprocessing(self) -> bool:
        """False for Keras, because the sequence has its own worker processes."""
        return False

    def on_epoch_begin(self) -> None:
        """Begin an epoch: indices mean its batches until `on_epoch_end`. Keras calls this."""
        check_devices(self.stream_plan)
        if not self._keras_reads:
            check_reader(self.stream_plan)
            self.progress.direct.begin()

    def on_epoch_end(self) -> None:
        """End an epoch that `on_epoch_begin` began. Keras calls this."""
        if not self._keras_reads and self.progress.direct.end():
            self.opened().stop_ahead(self.progress.direct)

    # ---- batches

    def __getitem__(self, index: Any) -> Batch:
        """Return batch `index` of the current epoch, (x,), (x, y) or (x, y, sample_weight)."""
        position, counts = self.progress.direct.named(self._check_index(index))
        return self.opened().batch(position, self.progress.direct if counts else None)

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches of the next epoch, as `next_epoch` does: each loop over the sequence is another epoch."""
        return self.next_epoch()

    def next_epoch(self) -> Iterator[Batch]:
        """Return the batches of the next epoch for a custom loop. The epoch counts as used.

        After `load_state_dict` it is the rest of the epoch that the state was saved in. Between two batches
        `state_dict()` says that the second is the next.

        Examples:
            >>> import h5py
            >>> with h5py.File("/tmp/epochs.h5", "w") as f:
            ...     f["x"], f["y"] = range(10), range(10)
            >>> from kerasmem import H5ChunkSequence
            >>> train = H5ChunkSequence("/tmp/epochs.h5", batch_size=4)
            >>> [len(y) for x, y in train.next_epoch()], train.epoch
            ([4, 4, 2], 1)
        """
        cursor = Cursor(self.progress)
        cursor.begin()
        yield from self.read(cursor)
        cursor.end()

    def read(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the batches of the epoch that a cursor has begun."""
        process, stream = 0, None
        for position, counts in cursor.positions():
            if stream is None or process != os.getpid():
                process, stream = os.getpid(), self.opened()
            yield stream.batch(position, cursor if counts else None)  # refuses after `close`

    @contextmanager
    def hooks_of_keras(self) -> Iterator[None]:
        """Mark calls of `on_epoch_begin` and `on_epoch_end` as Keras's."""
        self._keras_reads = True
        try:
            yield
        finally:
            self._keras_reads = False

    def batch(self, place: int, epoch: int | None = None) -> Batch:
        """Return batch number `place` of an epoch, out of turn.

        Args:
            place: 0 to `len(self) - 1`.
            epoch: which epoch; the current one by default.
        """
        return self.opened().batch(self._position(place, epoch))

    def batch_rows(self, place: int, epoch: int | None = None) -> np.ndarray:
        """Return the row numbers of batch number `place`, int64, in the order delivered, counted through all files."""
        return self.opened().batch_rows(self._position(place, epoch))

    def as_tf_dataset(self, *, endless: bool = False, prefetch: int = 2) -> Any:
        """Return a `tf.data.Dataset` of the same batches in the same order, for `fit`, `map` or a loop of your own.

        Every iteration delivers the next epoch, so `fit` and `repeat` see a new order each time; the epoch
        counts as used from its first batch, as with `next_epoch`. After `load_state_dict` in the middle of an
        epoch the first iteration is the rest of it, and the number of batches is then not known beforehand;
        in `fit` leave loading to `ResumeTraining`. With `shard` it is not told either: `tf.distribute` may cut
        the batches up among its workers. Give such a strategy the sequence itself, or this data set from
        `strategy.distribute_datasets_from_function`, which leaves batches as they are.

        Args:
            endless: go on from epoch to epoch within one iteration, for `fit(steps_per_epoch=…)`.
            prefetch: batches made ahead, each of which takes memory; 2 are within `memory_budget`.

        Returns:
            The data set. Its `element_spec` has `batch_size` rows where every batch is full, else None.

        Examples:
            >>> import h5py, numpy as np
            >>> with h5py.File("/tmp/tensors.h5", "w") as f:
            ...     f["x"], f["y"] = np.zeros((10, 3)), np.zeros(10)
            >>> from kerasmem import H5ChunkSequence
            >>> data = H5ChunkSequence("/tmp/tensors.h5", batch_size=5).as_tf_dataset()
            >>> [x.shape for x, y in data.as_numpy_iterator()]
            [(5, 3), (5, 3)]
        """
        prefetch = checks.whole("prefetch", prefetch, 0)
        if self.stream_plan.settings.transform is None:
            signature = plan_signature(self.stream_plan)
        else:
            signature = batches_signature([self.batch(place) for place in sorted({0, len(self) - 1})])
        if checks.flag("endless", endless):
            return make_dataset(self._epochs, signature, batches=-1, prefetch=prefetch)
        # Under tf.distribute a worker's share comes in smaller and more batches: Keras must not stop at this number.
        whole = self.progress.position.batch == 0 and self.shard[1] == 1
        return make_dataset(self.next_epoch, signature, batches=len(self) if whole else None, prefetch=prefetch)

    # ---- where training stands

    @property
    def epoch(self) -> int:
        """Number of the epoch in progress or the next one. Later calls of `fit` count on."""
        return self.progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of epoch `epoch`. Its batches depend on the seed alone."""
        self._go_to(Position(checks.whole("epoch", epoch, 0), 0))

    def state_dict(self, *, epoch: int | None = None, batch: int | None = None) -> dict[str, Any]:
        """Return the position of training: less than 1 KB of numbers and texts, ready for JSON.

        Args:
            epoch: epoch of the next batch to be trained on.
            batch: its number in that epoch. By default both are of the batch that will be asked for next. In
                `fit` and with `as_tf_dataset` batches are asked for ahead of training; there `ResumeTraining`
                saves the state that belongs to the weights.

        Returns:
            The position, the seed, and what has to agree for the batches to be the same. The file's path is
            no part of it, so the file may be moved.
        """
        if (epoch is None) != (batch is None):
            raise UsageError("state_dict: give both epoch and batch, or neither")
        position = self.progress.position
        if epoch is not None and batch is not None:
            start = Position(checks.whole("epoch", epoch, 0), 0)
            position = self.progress.after(start, checks.whole("batch", batch, 0))
        return make_state(self.stream_plan, position)

    def load_state_dict(self, state: Mapping[str, Any], *, skipped: int = 0) -> None:
        """Resume at the very next batch after `state_dict` was called.

        Args:
            state: what `state_dict` returned, of this sequence or of one made alike. One with seed=None takes
                over the seed.
            skipped: batches of Keras's next epoch that will be counted without being asked for.

        Raises:
            DataError: If this is no such state.
            UsageError: If a setting differs, so that the batches would too; the message names it.
        """
        seed, position = read_state(state, self.stream_plan)
        if seed != self.seed:
            self.close()  # windows in memory are of the other order
            # The seed was drawn, so the rows are not shared out by it.
            settings = replace(self.stream_plan.settings, seed=seed)
            self.stream_plan = replace(self.stream_plan, settings=settings)
        self._go_to(position, skipped=checks.whole("skipped", skipped, 0))

    # ---- for people

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in file order"
        more = f" and {len(self.paths) - 1:,} more" if len(self.paths) > 1 else ""
        return (
            f"<H5ChunkSequence {shown(name_of(self.paths[0]))}{more}: {format_count(self.num_rows, 'row')} in "
            f"{format_count(len(self), 'batch')} of {self.batch_size:,}, {order}>"
        )

    def describe(self) -> str:
        """Return a few lines on rows, batches, types, blocks, windows and memory."""
        return describe_plan(self.stream_plan)

    @property
    def read_bytes(self) -> int:
        """Bytes read from files or received from stores so far. `close()` resets it to 0.

        Divided by the bytes of the files and by the epochs delivered it is the read amplification.
        """
        stream = self._opened.peek()
        return 0 if stream is None else stream.reader.bytes_read

    # ---- open and closed

    def opened(self) -> OpenStream:
        """Return the open stream of this process. A forked or unpickled copy opens its own."""
        return self._opened.get(lambda: OpenStream(self.stream_plan, self._access))

    def close(self) -> None:
        """Close the file, end the workers and free the windows. The sequence can be used again.

        An iteration in progress, also one of `fit` in another thread, ends with a `UsageError`.
        """
        stream = self._opened.take()
        if stream is not None:
            stream.close()

    def __enter__(self) -> H5ChunkSequence:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- within

    def _epochs(self) -> Iterator[Batch]:
        while True:
            yield from self.next_epoch()

    def _position(self, batch: int, epoch: int | None) -> Position:
        batch = self._check_index(batch)
        return Position(self.epoch if epoch is None else checks.whole("epoch", epoch, 0), batch)

    def _check_index(self, index: int) -> int:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} does not exist; there are {len(self)} batches, 0 to {len(self) - 1}")
        return index

    def _go_to(self, position: Position, *, skipped: int = 0) -> None:
        self.progress.go_to(*position, skipped=skipped)
        stream = self._opened.peek()
        if stream is not None:
            stream.stop_ahead()


class KerasReader:
    """The sequence in its own order, read by Keras in one call of `fit`, `evaluate` or `predict`.

    Args:
        sequence: the sequence.
        call: what reads it.
    """

    workers = 1
    use_multiprocessing = False

    def __init__(self, sequence: H5ChunkSequence, call: Call) -> None:
        self.max_queue_size = sequence.max_queue_size
        self._sequence = sequence
        self._call = call
        # `fit` and `evaluate` may look at batches before an epoch, and end an epoch that they did not begin.
        looks = call.name in ("fit", "validate", "evaluate")
        self._cursor = Cursor(sequence.progress, trains=call.name in ("fit", ""), steps=call.steps, looks=looks)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, or None if `fit(steps_per_epoch=…)` continues across epochs."""
        return self._cursor.num_batches

    def __getitem__(self, index: int) -> Batch:
        """Return a batch to look at."""
        return self._sequence.batch(index % len(self._sequence))

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        return self._sequence.read(self._cursor)

    def on_epoch_begin(self) -> None:
        """Begin an epoch."""
        self._cursor.begin()
        with self._sequence.hooks_of_keras():
            self._sequence.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """End an epoch."""
        if self._cursor.end():
            self._sequence.opened().stop_ahead(self._cursor)
        with self._sequence.hooks_of_keras():
            self._sequence.on_epoch_end()

    def for_tensorflow(self, data: Any, look: Callable[[], Iterator[Any]]) -> Any:
        """Return a `tf.data.Dataset` of the batches as the strategy in force has to be given it."""
        return for_strategy(self._sequence.stream_plan, self._call, data, look, lambda: self._cursor.looking)
