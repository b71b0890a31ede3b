"""H5ChunkSequence: an HDF5 file as a Keras data set, in place of arrays."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.columns import make_columns, read_dtype, read_scale
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.remote.access import ahead_bytes, read_remote
from kerasmem.hdf5.remote.urls import is_url, name_of
from kerasmem.hdf5.scan import scan_files
from kerasmem.hdf5.selection import read_rows
from kerasmem.hdf5.settings import (
    Access,
    check_transform,
    read_flag,
    read_locking,
    read_parts,
    read_paths,
    read_size,
    read_whole,
)
from kerasmem.streaming.batches import Batches
from kerasmem.streaming.budget import MemoryPlan, check_order, plan_memory
from kerasmem.streaming.dataset import columns_signature
from kerasmem.streaming.engines import attend, check_attended, check_devices
from kerasmem.streaming.live import Live
from kerasmem.streaming.order import Blocks, EpochOrder
from kerasmem.streaming.passes import Passes, called_to_start_anew, called_to_train, find_length, find_reader
from kerasmem.streaming.progress import Progress
from kerasmem.streaming.reports import Reports
from kerasmem.streaming.sharding import Share, read_shard
from kerasmem.streaming.state import make_agreement
from kerasmem.units import parse_size


class H5ChunkSequence(Batches, Progress, Reports, keras.utils.PyDataset):
    """Stream float32 batches from an HDF5 file that need not fit in memory into `fit`, `evaluate`, `predict`.

    Rows are shuffled on two levels: blocks of rows that lie together in the file are read from all over it
    into a window in memory, and the rows of the window are shuffled. Every row comes exactly once an epoch
    and every chunk of the file is read about once. With the same seed the batches are the same, whatever
    `workers`, `use_multiprocessing`, `max_queue_size` and `fit(shuffle=…)` are. `quality()` says how well
    that shuffles. With `fit(steps_per_epoch=…)` one epoch of the data follows the other without a break.
    `ResumeTraining` goes on with the very next batch after the process was killed.

    Inside `fit`, the k-th batch that Keras asks for in an epoch is the k-th batch of the sequence's own
    order, whichever index Keras names: `fit(shuffle=True)`, its default, would otherwise permute the batches
    and read the file back and forth. So `shuffle` here is the one that counts. Everywhere else, in
    `evaluate`, `predict` and `seq[i]`, index `i` is batch `i` of the current epoch, also while a `fit` over
    the same sequence is in progress or was broken off. Only `fit` goes on to another epoch. This rests on
    how Keras reads a `PyDataset`; where it cannot be seen (another version of Keras, a `PyDataset` of yours
    that reads from this one), index `i` is batch `i` for `fit` too: still every row once, but in the order
    that Keras asks for.

    Windows, threads and the open file stay from the first batch to `close()`, and TensorFlow may hold a
    sequence for as long as the process lives: where there are many, one a fold for instance, use each as a
    context manager, `with H5ChunkSequence(…) as train:`, or call `close()`. A closed one can be used again.

    Args:
        path: the HDF5 file, or a URL of one ("s3://bucket/train.h5", "gs://…", "https://…", whatever fsspec knows;
            see `storage_options`); or a list of files, or a pattern ("data/part-*.h5"; part-2 comes before part-10),
            whose rows are counted through in that order. Their datasets have to agree in row shape and type; chunks,
            filters and storage may differ. The number of rows is what it was when the sequence was made: whole
            chunks appended to a file later are left to the next sequence.
        x: dataset name for the features, such as "x" or "train/images"; or a list of names (several inputs;
            comes out as a tuple) or a dict of input name to dataset name (comes out as a dict).
        y: the same for the targets; None where there are none, as for `predict`.
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
        drop_remainder: leave out a last batch that is not full (with `shuffle`, other rows each epoch).
        shard: (index, count), the part of the rows for worker `index` of `count`, or "auto" to take both from
            the distribution in force: the open scope of a `tf.distribute` strategy, `keras.distribution`, or
            the environment's `TF_CONFIG`. The parts are disjoint, complete, of equally many batches, and the
            same in every epoch; each chunk is read by one worker, but for at most `count` - 1 on the borders.
            `batch_size` is then each worker's, in `fit` and `evaluate` under such a distribution too. On JAX, make it
            with `auto_shard_dataset=False`. Without shard every worker reads all rows, and a warning says so.
        scale: factor, or (factor, offset), applied to all features as they are read, such as 1/255; or a
            dict by dataset name. `value * factor + offset`.
        transform: called with each batch's arrays, `transform(x)`, `transform(x, y)` or
            `transform(x, y, sample_weight)`, in the structure given above; returns the same number of
            values. Runs in the workers; with `use_multiprocessing` it must be picklable.
        memory_budget: bytes or text ("512MB") that windows, read buffers and the batches in Keras's queue
            may take together in the training process. A larger one shuffles better; the order of the rows
            depends on it. Default: 256 MiB, with batches on top. What a `transform` allocates is not counted, nor is
            half a MiB for scaling.
        nan_policy: "ignore" passes NaN and infinity on, as Keras does with arrays; "error" raises, naming
            dataset and rows, when the window holding them is needed.
        allow_external: follow external links, external storage and virtual datasets into other files.
        allow_missing_chunks: accept datasets of which parts were never written, and virtual ones whose
            sources are missing; such parts come as the dataset's fill value, most often 0.
        locking: whether files are locked while open, as h5py has it: None leaves it to HDF5 and its
            HDF5_USE_FILE_LOCKING, False is for file systems without locks (NFS), "best-effort" for those that may have.
        storage_options: for URLs, what fsspec's file system is made with: credentials, an endpoint, headers. Only the
            ranges that are needed are fetched, a request a block and up to 64 small ones at a time; each answer is
            proved to be of the version that the sequence was made from. Needs `kerasmem[remote]`, `[s3]` or `[gcs]`.
        cache: for URLs, a folder in which what was fetched is kept for later epochs and other processes.
        cache_size: bytes or text that it may hold ("10GiB", the default); what was out of use longest goes first.
        workers: with 2 or more, as many threads gather and transform batches ahead of training; with 0 or 1
            batches are made when Keras asks (on TensorFlow that is in a background thread already).
        use_multiprocessing: run `transform` in `workers` processes (reading stays in this one).
        max_queue_size: the most batches prepared ahead, where there are workers to do so; fewer where
            `memory_budget` has no room for more.

    The sequence does its own work ahead, because Keras's would neither keep the order nor read each chunk
    once; so Keras is told `workers=1, use_multiprocessing=False`, which is what these attributes say.

    Within `fit`, TensorFlow wraps errors raised here in its own (`InvalidArgumentError`); the text stays.

    Raises:
        DataError: the file or its data cannot be used.
        UsageError: a setting is wrong, or `memory_budget` too small.

    Example:
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
        drop_remainder: bool = False,
        shard: tuple[int, int] | str | None = None,
        scale: Any = None,
        transform: Callable[..., Any] | None = None,
        memory_budget: int | str | None = None,
        nan_policy: str = "ignore",
        allow_external: bool = False,
        allow_missing_chunks: bool = False,
        locking: bool | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_size: int | str | None = None,
        workers: int = 1,
        use_multiprocessing: bool = False,
        max_queue_size: int = 10,
    ) -> None:
        super().__init__(workers=1, use_multiprocessing=False, max_queue_size=max_queue_size)
        self.paths = read_paths(path, read_remote(storage_options, cache, cache_size))
        self.batch_size = read_whole("batch_size", batch_size, 1)
        self.shuffle = read_flag("shuffle", shuffle)
        self.seed = secrets.randbits(32) if seed is None else read_whole("seed", seed, 0)
        self._seed_drawn = seed is None
        self.drop_remainder = read_flag("drop_remainder", drop_remainder)
        self.shard = read_shard(shard)
        if self.shard[1] > 1 and self._seed_drawn and self.shuffle:
            raise UsageError("seed: None draws another seed in every worker; give a number along with shard")
        self.transform = transform
        self._processes = read_flag("use_multiprocessing", use_multiprocessing)
        self._preparers = max(read_whole("workers", workers, 0), int(self._processes))
        self._depth = read_whole("max_queue_size", max_queue_size, 1) if self._works_ahead else 0
        self._access = Access(
            read_flag("allow_external", allow_external),
            read_flag("allow_missing_chunks", allow_missing_chunks),
            read_locking(locking),
            read_remote(storage_options, cache, cache_size, remote=any(map(is_url, self.paths))),
        )
        if nan_policy not in ("ignore", "error"):
            raise UsageError(f"nan_policy: {nan_policy!r} is neither 'ignore' nor 'error'")
        self._check_finite = nan_policy == "error"
        check_transform(transform, self._processes)

        self._parts = read_parts(x, y, sample_weight)
        if y is None and self.shuffle:
            warnings.warn(
                "H5ChunkSequence: without y and with shuffle=True, predict would return its results in shuffled "
                "order; pass shuffle=False to match them with rows",
                stacklevel=2,
            )
        names = list(dict.fromkeys(name for part in self._parts for name in part.names))
        scales, dtypes = read_scale(scale, names), read_dtype(dtype, names)
        self.layout = scan_files(self.paths, names, self._access)
        by_name = {layout.name: layout for layout in self.layout.datasets}
        wanted = [make_columns(part, by_name, dtypes, scales) for part in self._parts]
        self._columns = tuple(dict.fromkeys(column for columns in wanted for column in columns))
        self._uses = [[self._columns.index(column) for column in columns] for columns in wanted]

        selection = read_rows(rows, self.layout.datasets[0].rows, ordered=not self.shuffle)
        heaviest = max(self.layout.datasets, key=lambda layout: layout.row_bytes)
        share = self._share = Share(
            *self.shard, len(selection), self.batch_size, self.drop_remainder, self.layout.chunk_grid(heaviest.name)
        )
        selection = self._selection = share.select(selection, shuffle=self.shuffle)
        self.plan = self._plan(read_size(memory_budget))
        given = None if memory_budget is None else parse_size(read_size(memory_budget), field="memory_budget")
        remote = replace(self._access.remote, ahead_bytes=ahead_bytes(given, self.plan.total_bytes))
        self._access = replace(self._access, remote=remote)
        blocks = Blocks(selection, self.layout.block_grid(self.plan.block_rows))
        self._blocks = share.deal(blocks, self.seed) if self.shuffle else blocks
        self.num_rows = self._blocks.total
        check_order(self._blocks.count, len(self))
        self._warn_of_small_requests()
        self._passes = Passes(len(self))
        self._live: Live | None = None

    # ---- what Keras asks for

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        return self._share.steps

    @property
    def num_batches(self) -> int | None:
        """Number of batches an epoch; None for `fit(steps_per_epoch=…)`, which goes on from epoch to epoch."""
        return find_length(self, self._passes)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return a batch, (x,), (x, y) or (x, y, sample_weight); see the class for what `index` means."""
        reader = find_reader(self, asking=True)
        if not self._passes.goes_on(reader):
            index = self._check_index(index)
        return self._deliver(reader, index)

    def _deliver(self, reader: Any, index: int) -> tuple[Any, ...]:
        live = self._here()
        with live.lock:
            epoch, place, whose = self._passes.find(reader, index)
        if live.ahead is not None and whose is not None:
            return live.ahead.get(whose, epoch, place)
        return self._finish(epoch, place, self._gather(epoch, place, own=whose is not None))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Return the batches of the current epoch in order, once."""
        for place in range(len(self)):
            epoch = self.epoch
            yield self._finish(epoch, place, self._gather(epoch, place))

    def on_epoch_begin(self) -> None:
        """Start an epoch; Keras calls this."""
        reader, trains = find_reader(self, asking=False), called_to_train()
        check_attended(self, reader)
        check_devices(self)
        with self._here().lock:
            self._passes.begin(reader, trains=trains)

    def on_epoch_end(self) -> None:
        """End an epoch; Keras calls this, once before the first epoch too, which changes nothing."""
        live = self._here()
        reader, anew = find_reader(self, asking=False), called_to_start_anew(self)
        with live.lock:
            over = self._passes.end(reader, anew=anew)
        if over is not None and live.ahead is not None:
            live.ahead.stop(over)

    @property
    def workers(self) -> int:
        """What Keras is told: 1, because the sequence prepares batches itself."""
        attend(self, find_reader(self, asking=False))  # Keras asks as it makes an adapter, before anything else
        return 1

    @workers.setter
    def workers(self, value: int) -> None:
        raise UsageError("workers: choose them when making the sequence, H5ChunkSequence(…, workers=…)")

    @property
    def use_multiprocessing(self) -> bool:
        """What Keras is told: False, because the sequence has worker processes of its own."""
        return False

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        raise UsageError("use_multiprocessing: choose it when making the sequence")

    # ---- for people

    @property
    def path(self) -> str:
        """Absolute path of the file, of several the first."""
        return self.paths[0]

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in file order"
        more = f" and {len(self.paths) - 1:,} more" if len(self.paths) > 1 else ""
        return (
            f"<H5ChunkSequence {shown(name_of(self.path))}{more}: {self.num_rows:,} rows in "
            f"{len(self):,} batches of {self.batch_size:,}, {order}>"
        )

    def __enter__(self) -> H5ChunkSequence:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- within

    def _ahead_text(self) -> str:
        kind = "processes" if self._processes and self.transform is not None else "threads"
        return f"{self._preparers} {kind}, {self.plan.ahead} ahead at most" if self._works_ahead else ""

    def _beside(self, name: str, rows: np.ndarray) -> H5ChunkSequence:
        """Return another dataset of the file, as stored and in file order."""
        return H5ChunkSequence(
            self.paths,
            name,
            None,
            rows=rows,
            shuffle=False,
            dtype="stored",
            batch_size=1 << 16,
            allow_external=self._access.allow_external,
            allow_missing_chunks=self._access.allow_missing,
            locking=self._access.locking,
            **self._access.remote.settings(self.paths),
        )

    def _order_within(self, budget: int) -> EpochOrder:
        """Return the order of epoch 0 that another memory budget would give."""
        plan = self._plan(budget)
        blocks = self._share.deal(Blocks(self._selection, self.layout.block_grid(plan.block_rows)), self.seed)
        return EpochOrder(blocks, plan.window_blocks, self.seed, 0)

    def _plan(self, budget: int | str | None) -> MemoryPlan:
        return plan_memory(
            self.layout.datasets,
            self._columns,
            selection=self._share.plan_for(self._selection),
            batch_size=self.batch_size,
            ahead=self._depth,
            workers=self._preparers,
            budget=budget,
            ordered=not self.shuffle,
            grid=self.layout.block_grid,
        )

    def _bounds(self, place: int) -> tuple[int, int]:
        return self._share.bounds(place, self.num_rows)

    def _agreement(self) -> dict[str, Any]:
        return make_agreement(
            layout=self.layout,
            grid=self._blocks.grid,
            selection=self._selection,
            shard=self.shard,
            batch_size=self.batch_size,
            batches=len(self),
            shuffle=self.shuffle,
            drop_remainder=self.drop_remainder,
            windows=-(-self._blocks.count // self.plan.window_blocks),
        )

    def _signature(self) -> tuple[Any, ...]:
        full = self.drop_remainder or self.num_rows == len(self) * self.batch_size
        columns = [[self._columns[use] for use in uses] for uses in self._uses]
        return columns_signature(self._parts, columns, self.batch_size if full else None)
