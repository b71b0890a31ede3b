"""H5ChunkSequence: an HDF5 file as a Keras data set, in place of arrays."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from kerasmem import checks
from kerasmem.compat.keras_reading import Call, attach_reader
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import read_dtype, read_parts, read_scale
from kerasmem.hdf5.rows.paths import read_data
from kerasmem.streaming.cursor import Cursor
from kerasmem.streaming.sharding import read_shard
from kerasmem.streaming.stream import Stream
from kerasmem.streaming.stream_plan import StreamSettings, dataset_names
from kerasmem.streaming.tf_data import check_devices, for_strategy
from kerasmem.streaming.workers import Batch
from kerasmem.units import parse_size


class H5ChunkSequence(Stream, keras.utils.PyDataset):
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
            `TF_CONFIG`, or the launcher (torchrun, Open MPI, Slurm). The parts are disjoint, complete, of
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
            warnings.warn(
                "H5ChunkSequence: without y and with shuffle=True, predict would return its results in shuffled "
                "order; pass shuffle=False to match them with rows",
                stacklevel=2,
            )
        Stream.__init__(self, files, parts, settings, access)
        self._keras_reads = False

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
            self.progress.direct.begin()

    def on_epoch_end(self) -> None:
        """End an epoch that `on_epoch_begin` began. Keras calls this."""
        if not self._keras_reads and self.progress.direct.end():
            self.opened().stop_ahead(self.progress.direct)

    def __getitem__(self, index: Any) -> Batch:
        """Return batch `index` of the current epoch, (x,), (x, y) or (x, y, sample_weight)."""
        position, counts = self.progress.direct.named(self._check_index(index))
        return self.opened().batch(position, self.progress.direct if counts else None)

    @contextmanager
    def hooks_of_keras(self) -> Iterator[None]:
        """Mark calls of `on_epoch_begin` and `on_epoch_end` as Keras's."""
        self._keras_reads = True
        try:
            yield
        finally:
            self._keras_reads = False


# How Keras reads a PyDataset:
#
# - `fit`, `evaluate` and `predict` make an adapter, which asks for `workers` first of all. `attach_reader` recognizes
#   that call, and replaces the sequence by a `KerasReader`: one for each call, so that none disturbs another.
# - With `fit(shuffle=True)` an adapter asks for indices in random order. A reader yields batches in its own order.
# - `fit` looks at a batch or two before it begins, to build the model: these do not count.
# - TensorFlow asks ahead in a thread, and may ask for batches of an epoch that is never finished.
# - With `steps_per_epoch`, Keras's epochs are not the data's: the reader goes on from one epoch to the next.
# - `on_epoch_begin` and `on_epoch_end` come from Keras through the reader, for subclasses that override them. Called
#   without a reader, they mean that somebody asks for indices, and `Progress.direct` counts the epochs.
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
