"""H5ChunkSequence: stream HDF5 files to Keras."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from kerasmem import checks
from kerasmem.compat.keras_reading import Call, attach_reader
from kerasmem.errors import UsageError, warn_user
from kerasmem.hdf5.format.columns import read_dtype, read_parts, read_scale
from kerasmem.hdf5.rows.paths import read_data
from kerasmem.streaming.cursor import Cursor, EvaluationCursor, TrainingCursor
from kerasmem.streaming.sharding import read_shard
from kerasmem.streaming.stream import Stream
from kerasmem.streaming.stream_plan import StreamSettings, dataset_names
from kerasmem.streaming.tf_data import check_devices, for_strategy
from kerasmem.streaming.workers import Batch
from kerasmem.units import parse_size


class H5ChunkSequence(Stream, keras.utils.PyDataset):
    """Stream float32 batches from HDF5 files that need not fit in memory into `fit`, `evaluate` and `predict`.

    Rows are shuffled on two levels: blocks of neighboring rows are read from all over the file into a window in memory,
    and the rows of the window are shuffled. Every epoch delivers every row exactly once and reads every chunk of the
    file about once. With the same seed the batches are the same, whatever `workers`, `use_multiprocessing` and
    `fit(shuffle=…)` are. `describe()` shows how many blocks are shuffled together. With `fit(steps_per_epoch=…)` the
    data's epochs follow one another without a break. `ResumeTraining` resumes a killed process at the very next batch.

    `fit` reads batches in the sequence's own order. `fit(shuffle=True)`, Keras's default, does not permute them,
    because that would read the file back and forth; set `shuffle` here. Each epoch of `fit`, and each `for` loop over
    the sequence, is another epoch of the data. `evaluate`, `predict` and `seq[i]` read batch `i` of the current epoch,
    even if a `fit` on the same sequence is running or was interrupted. Use `transform` to change batches; a subclass
    must not override `__getitem__`.

    This relies on how Keras reads a `PyDataset`. If kerasmem does not recognize the reader (another version of Keras,
    or a `PyDataset` of yours that wraps this one), index `i` is batch `i` for `fit` too. Every row still comes once,
    but in the order of the indices that Keras requests. A map-style `torch.utils.data.DataLoader` also requests
    indices: call `set_epoch` before each of its epochs.

    Windows, threads and the open file live from the first batch until `close()`, and TensorFlow may keep a reference to
    a sequence until the process ends. If you create many sequences, such as one per fold, use each as a context
    manager, `with H5ChunkSequence(…) as train:`, or call `close()`. A closed sequence can be used again.

    Args:
        path: HDF5 file, or its URL ("s3://bucket/train.h5", "gs://…", "https://…", or any scheme of fsspec; see
            `remote`). A list of files or a pattern ("data/part-*.h5", part-2 before part-10) is read as one data set in
            that order. Row shapes and types must agree; chunks, filters and storage may differ. The number of rows is
            read once: rows appended to a file later need a new sequence.
        x: dataset name of the features, such as "train/images". A list of names yields a tuple (several inputs), a dict
            of input name to dataset name yields a dict. Defaults to "x".
        y: the same for the targets; None if there are none, as for `predict`. Defaults to "y".
        sample_weight: the same for weights, one value per row. Defaults to None.
        batch_size: rows per batch; the last batch of an epoch may be smaller. Defaults to 32.
        shuffle: True for a new order in each epoch, False for file order. `predict` needs file order if its results are
            to be matched with rows. Defaults to True.
        seed: seed of the order. If None, one is drawn. Defaults to 0.
        dtype: type of the features: "float32", "float16", "float64", or "stored" to keep integers such as token IDs; or
            a dict by dataset name, which may name targets too. Integers and booleans without `scale` are cast (exact
            below 2**24). Integer and boolean targets keep their stored type; targets and weights that are floats become
            float32. Defaults to "float32".
        rows: rows to use, for train/validation splits: a slice, a range, a (start, stop) tuple or an array of row
            numbers. Defaults to all.
        remainder: handling of a last batch that is not full. "keep" delivers it. "drop" omits it (with `shuffle`, other
            rows in each epoch). "pad" fills it up with rows of `sample_weight` 0, and every batch has weights. Workers
            with unequal numbers of rows then train on the same average as one process, because each divides by the same
            number of rows. Defaults to "keep".
        shard: (index, count), the part of the rows for worker `index` of `count`. "auto" takes both from
            `keras.distribution`, the scope of a `tf.distribute` strategy, JAX's or PyTorch's processes, `TF_CONFIG`, or
            the launcher (torchrun, Open MPI, Slurm). The parts are disjoint and complete, have equally many batches,
            and are the same in every epoch. Each chunk is read by one worker, except for at most `count` - 1 at the
            borders. `batch_size` is then per worker, also in `fit` and `evaluate` under such a distribution. On JAX,
            create the distribution with `auto_shard_dataset=False`. Without `shard` every worker reads all rows, with a
            warning.
        scale: factor, or (factor, offset), applied to all features as they are read, such as 1/255; or a dict by
            dataset name. Values become `value * factor + offset`.
        transform: called with the arrays of each batch, `transform(x)`, `transform(x, y)` or
            `transform(x, y, sample_weight)`, in the structure given above. Must return as many values. Runs in the
            workers; with `use_multiprocessing` it is sent by cloudpickle.
        memory_budget: host memory for windows, read buffers and the batches in Keras's queue, in bytes or as text
            ("512MB"). A larger budget shuffles better, and the order of the rows depends on it. Memory that `transform`
            allocates and 0.5 MiB for scaling are not counted. Defaults to 256 MiB, with batches on top.
        trust_file: read the file without checks against damage and malice. HDF5 then follows links, external storage
            and virtual datasets into other files, and decodes filters that kerasmem cannot (szip, n-bit and others); a
            damaged chunk may crash the process or leak its memory into the data. Parts that were never written, and
            missing sources of virtual datasets, are read as the fill value, most often 0, with a warning. If False,
            each of these cases is an error. Defaults to False.
        remote: options for URLs, a dict with any of "storage_options" (arguments of fsspec's file system: credentials,
            an endpoint, headers), "cache" (a folder that keeps fetched bytes for later epochs and other processes) and
            "cache_size" (bytes or text, 10 GiB by default; least recently used blocks are evicted). Only the needed
            ranges are fetched, one request per block and up to 64 small ones in parallel. If the file changes after the
            sequence was created, reading it is an error. Needs `kerasmem[remote]`, `[s3]` or `[gcs]`.
        workers: if 2 or more, this many threads read and transform batches ahead of training. With 0 or 1, batches are
            made when Keras requests them (on TensorFlow already in a background thread). Defaults to 1.
        use_multiprocessing: run `transform` in `workers` processes (reading stays in this one). Defaults to False.

    Keras sees `workers=1, use_multiprocessing=False`. Its own workers would mix up the order and read chunks several
    times, so the sequence prepares batches itself.

    Within `fit`, TensorFlow wraps errors raised here in its own (`InvalidArgumentError`), with the same text.

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
            raise UsageError(f"{cls.__name__}: fit does not call __getitem__ of a subclass; pass transform= instead")

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
        keras.utils.PyDataset.__init__(self, workers=1, use_multiprocessing=False)
        files, access = read_data(path, trust_file, remote)
        parts = read_parts(x, y, sample_weight)
        names = dataset_names(parts)
        in_processes = checks.flag("use_multiprocessing", use_multiprocessing)
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
            transform=None if transform is None else checks.function("transform", transform),
            workers=max(checks.whole("workers", workers, 0), int(in_processes)),
            in_processes=in_processes,
        )
        if y is None and settings.shuffle:
            warn_user(
                "H5ChunkSequence: predict would return results in shuffled order. If you need them in the order of "
                "the rows, pass shuffle=False"
            )
        Stream.__init__(self, files, parts, settings, access)
        self._keras_reads = False

    @property
    def workers(self) -> int:
        """1 for Keras, because the sequence prepares batches itself."""
        # Keras reads this first when it creates an adapter.
        attach_reader(self, lambda call: KerasReader(self, call))
        return 1

    @property
    def use_multiprocessing(self) -> bool:
        """False for Keras, because the sequence has its own worker processes."""
        return False

    def on_epoch_begin(self) -> None:
        """Begin an epoch. Until `on_epoch_end`, indices are batches of this epoch. Keras calls this."""
        check_devices(self.stream_plan)
        if not self._keras_reads:
            self.progress.direct.begin()

    def on_epoch_end(self) -> None:
        """End the epoch that `on_epoch_begin` began. Keras calls this."""
        if not self._keras_reads and self.progress.direct.end():
            self.open_stream().stop_ahead(self.progress.direct)

    def __getitem__(self, index: Any) -> Batch:
        """Return batch `index` of the current epoch, (x,), (x, y) or (x, y, sample_weight)."""
        position, counts = self.progress.direct.take(self._check_index(index))
        return self.open_stream().batch(position, self.progress.direct if counts else None)

    @contextmanager
    def hooks_of_keras(self) -> Iterator[None]:
        """Mark calls of `on_epoch_begin` and `on_epoch_end` as Keras's."""
        outer, self._keras_reads = self._keras_reads, True  # a hook of a subclass may call `evaluate`
        try:
            yield
        finally:
            self._keras_reads = outer


# How Keras reads a PyDataset:
#
# - `fit`, `evaluate` and `predict` create an adapter, which reads `workers` first. `attach_reader` recognizes that
#   access and replaces the sequence with a `KerasReader`, one per call, so that calls do not disturb each other.
# - With `fit(shuffle=True)` an adapter requests indices in random order. A reader yields batches in its own order.
# - `fit` peeks at one or two batches to build the model before it begins. These do not count.
# - TensorFlow prefetches in a thread, and may request batches of an epoch that is never finished.
# - With `steps_per_epoch`, Keras's epochs are not the data's: the reader continues from one epoch to the next.
# - Keras calls `on_epoch_begin` and `on_epoch_end` through the reader, for subclasses that override them. If they are
#   called without a reader, batches are requested by index, and `Progress.direct` counts the epochs.
class KerasReader:
    """The sequence in its own order, read by Keras in one call of `fit`, `evaluate` or `predict`.

    Args:
        sequence: the sequence.
        call: the call that reads it.
    """

    workers = 1
    use_multiprocessing = False

    def __init__(self, sequence: H5ChunkSequence, call: Call) -> None:
        self.max_queue_size = sequence.max_queue_size
        self._sequence = sequence
        self._call = call
        # `fit` and `evaluate` may peek at batches before an epoch, and end an epoch that they did not begin.
        peeks = call.name in ("fit", "validate", "evaluate")
        trains = call.name in ("fit", "")
        self._cursor: Cursor = EvaluationCursor(sequence.progress, peeks=peeks)
        if trains:
            self._cursor = TrainingCursor(sequence.progress, steps=call.steps, peeks=peeks)
        # With `fit(steps_per_epoch=…)` the data's epochs continue without end.
        self.num_batches = None if trains and call.steps else len(sequence)

    def __getitem__(self, index: int) -> Batch:
        """Return a batch for Keras to peek at."""
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
            self._sequence.open_stream().stop_ahead(self._cursor)
        with self._sequence.hooks_of_keras():
            self._sequence.on_epoch_end()

    def for_tensorflow(self, data: Any, peek: Callable[[], Iterator[Any]]) -> Any:
        """Return a `tf.data.Dataset` of the batches in the form that the active strategy needs."""
        return for_strategy(self._sequence.stream_plan, self._call, data, peek, lambda: self._cursor.is_peeking)
