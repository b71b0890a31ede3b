"""A stream of batches, its position of training, and its open files and threads in one process."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasmem import checks
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.columns import Part
from kerasmem.hdf5.io.access import ahead_bytes
from kerasmem.hdf5.rows.paths import Access
from kerasmem.hdf5.rows.scan import scan_files
from kerasmem.streaming.cursor import Cursor, Progress, TrainingCursor
from kerasmem.streaming.order import Position
from kerasmem.streaming.reader import RowReader
from kerasmem.streaming.states import make_state, read_state
from kerasmem.streaming.stream_plan import (
    StreamPlan,
    StreamSettings,
    build_batch,
    dataset_names,
    describe_plan,
    make_plan,
)
from kerasmem.streaming.tf_data import make_dataset
from kerasmem.streaming.window import WindowRing
from kerasmem.streaming.workers import Batch, BatchesAhead, ForkLocal, TransformFailure, TransformPool, apply_transform
from kerasmem.units import format_count

if TYPE_CHECKING:
    from typing_extensions import Self


class Stream:
    """Batches of HDF5 files, epoch by epoch, and the position of training among them.

    Args:
        files: the files, or an index.
        parts: x, y and sample_weight.
        settings: checked settings.
        access: trust in the files, and access to URLs.
    """

    def __init__(self, files: Sequence[str], parts: tuple[Part, ...], settings: StreamSettings, access: Access) -> None:
        self.paths = tuple(files)
        self.stream_plan = make_plan(scan_files(files, dataset_names(parts), access), parts, settings)
        ahead = ahead_bytes(settings.memory_budget, self.stream_plan.memory.total_bytes)
        self._access = replace(access, remote=replace(access.remote, ahead_bytes=ahead))
        self.progress = Progress(len(self))
        self._opened: ForkLocal[OpenStream] = ForkLocal()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.stream_plan.num_batches

    @property
    def batch_size(self) -> int:
        """Rows per batch."""
        return self.stream_plan.settings.batch_size

    @property
    def num_rows(self) -> int:
        """Rows of this worker in an epoch."""
        return self.stream_plan.num_rows

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self.stream_plan.settings.seed

    @property
    def shard(self) -> tuple[int, int]:
        """This worker's part of the rows, (index, count)."""
        return self.stream_plan.settings.shard

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches of the next epoch, as `next_epoch` does."""
        return self.next_epoch()

    def next_epoch(self) -> Iterator[Batch]:
        """Return the batches of the next epoch for a custom training loop.

        The epoch counts as used from its first batch. After `load_state_dict` it is the rest of the epoch in which the
        state was saved. Between two batches, `state_dict()` returns the position of the second.

        Examples:
            >>> import h5py
            >>> with h5py.File("/tmp/epochs.h5", "w") as f:
            ...     f["x"], f["y"] = range(10), range(10)
            >>> from kerasmem import H5ChunkSequence
            >>> train = H5ChunkSequence("/tmp/epochs.h5", batch_size=4)
            >>> [len(y) for x, y in train.next_epoch()], train.epoch
            ([4, 4, 2], 1)
        """
        cursor = TrainingCursor(self.progress)
        cursor.begin()
        yield from self.read(cursor)
        cursor.end()

    def read(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the batches of the epoch that a cursor has begun."""
        process, stream = 0, None
        for position, counts in cursor.positions():
            if stream is None or process != os.getpid():
                process, stream = os.getpid(), self.open_stream()
            yield stream.batch(position, cursor if counts else None)  # refuses after `close`

    def batch(self, index: int, epoch: int | None = None) -> Batch:
        """Return one batch of an epoch without changing the position of training.

        Args:
            index: number of the batch, 0 to `len(self) - 1`.
            epoch: number of the epoch. Defaults to the current one.
        """
        return self.open_stream().batch(self._position(index, epoch))

    def batch_rows(self, index: int, epoch: int | None = None) -> np.ndarray:
        """Return the row numbers of a batch, int64, in the order of delivery and counted across all files."""
        return self.open_stream().batch_rows(self._position(index, epoch))

    def as_tf_dataset(self, *, endless: bool = False, prefetch: int = 2) -> Any:
        """Return a `tf.data.Dataset` of the same batches in the same order, for `fit`, `map` or a custom loop.

        Every iteration delivers the next epoch, so `fit` and `repeat` see a new order each time. The epoch counts as
        used from its first batch, as with `next_epoch`. After `load_state_dict` in the middle of an epoch, the first
        iteration is the rest of it, and the cardinality is unknown; in `fit`, leave loading to `ResumeTraining`.

        With `shard` the cardinality is unknown too, because `tf.distribute` may split batches among its workers. Pass
        the sequence itself to such a strategy, or this data set through `strategy.distribute_datasets_from_function`,
        which leaves batches as they are.

        Args:
            endless: continue from epoch to epoch within one iteration, for `fit(steps_per_epoch=…)`. Defaults to False.
            prefetch: number of batches prepared ahead. `memory_budget` covers the default of 2.

        Returns:
            The data set. The first axis of its `element_spec` is `batch_size` if every batch is full, else None.

        Examples:
            >>> import h5py, numpy as np
            >>> with h5py.File("/tmp/tensors.h5", "w") as f:
            ...     f["x"], f["y"] = np.zeros((10, 3)), np.zeros(10)
            >>> from kerasmem import H5ChunkSequence
            >>> data = H5ChunkSequence("/tmp/tensors.h5", batch_size=5).as_tf_dataset()
            >>> [x.shape for x, y in data.as_numpy_iterator()]
            [(5, 3), (5, 3)]
        """
        return make_dataset(
            self, endless=checks.flag("endless", endless), prefetch=checks.whole("prefetch", prefetch, 0)
        )

    # ---- position of training
    @property
    def epoch(self) -> int:
        """Number of the current epoch, or of the next one between epochs. It increases across calls of `fit`."""
        return self.progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch. Its batches depend only on the seed and its number."""
        self._go_to(Position(checks.whole("epoch", epoch, 0), 0))

    def state_dict(self, *, epoch: int | None = None, batch: int | None = None) -> dict[str, Any]:
        """Return the position of training as less than 1 KB of numbers and strings, ready for JSON.

        `fit` and `as_tf_dataset` request batches ahead of training. Use `ResumeTraining` there: it saves the state that
        belongs to the weights.

        Args:
            epoch: epoch of the next training batch. Defaults to that of the batch that is requested next.
            batch: number of that batch in its epoch. Pass both or neither.

        Returns:
            The position, the seed, and the settings that must agree for the batches to be the same. The path is not
            included, so the file may be moved.
        """
        if (epoch is None) != (batch is None):
            raise UsageError("state_dict: pass both epoch and batch, or neither")
        position = self.progress.position
        if epoch is not None and batch is not None:
            start = Position(checks.whole("epoch", epoch, 0), 0)
            position = self.progress.after(start, checks.whole("batch", batch, 0))
        return make_state(self.stream_plan, position)

    def load_state_dict(self, state: Mapping[str, Any], *, skipped: int = 0) -> None:
        """Resume at the batch that was next when `state_dict` was called.

        Args:
            state: result of `state_dict` of this sequence, or of one with the same settings. A sequence with seed=None
                adopts the seed of the state.
            skipped: number of batches of Keras's next epoch that Keras counts without requesting them. Defaults to 0.

        Raises:
            DataError: If this is not such a state.
            UsageError: If a setting differs, so that the batches would differ too. The message names it.
        """
        seed, position = read_state(state, self.stream_plan)
        if seed != self.seed:
            self.close()  # windows in memory are of the old order
            # The seed was drawn, so shards do not depend on it.
            settings = replace(self.stream_plan.settings, seed=seed)
            self.stream_plan = replace(self.stream_plan, settings=settings)
        self._go_to(position, skipped=checks.whole("skipped", skipped, 0))

    # ---- descriptions
    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.stream_plan.settings.shuffle else "in file order"
        rows, batches = format_count(self.num_rows, "row"), format_count(len(self), "batch")
        title = self.stream_plan.layout.title
        return f"<{type(self).__name__} {title}: {rows} in {batches} of {self.batch_size:,}, {order}>"

    def describe(self) -> str:
        """Describe rows, batches, types, blocks, windows and memory in a few lines."""
        return describe_plan(self.stream_plan)

    @property
    def read_bytes(self) -> int:
        """Bytes read from files or received from stores since the last `close()`.

        To get the read amplification, divide them by the bytes of the files and by the number of epochs.
        """
        stream = self._opened.peek()
        return 0 if stream is None else stream.reader.files.bytes_read

    # ---- opening and closing
    def open_stream(self) -> OpenStream:
        """Return the open stream of this process. A forked or unpickled copy opens its own."""
        return self._opened.get(lambda: OpenStream(self.stream_plan, self._access))

    def close(self) -> None:
        """Close the files, stop the workers and free the windows. The sequence can be used again.

        If an iteration is in progress, even in another thread's `fit`, it ends with a `UsageError`.
        """
        stream = self._opened.take()
        if stream is not None:
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- private
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


class OpenStream:
    """Locks, open files, windows and threads of a stream in one process. Thread-safe and never pickled.

    Args:
        plan: rows, batches and order.
        access: trust in the files, and access to URLs.
    """

    def __init__(self, plan: StreamPlan, access: Access) -> None:
        memory, settings = plan.memory, plan.settings
        self._plan = plan
        self._transform = settings.transform
        self.order = functools.lru_cache(2)(plan.order)
        self.reader = RowReader(plan.layout, plan.columns, resident=memory.cache_bytes, access=access)
        self.windows = WindowRing(self.reader, plan.columns, memory, plan.settings.batch_size)
        self.ahead: BatchesAhead | None = None
        self._pool: TransformPool | None = None
        if settings.works_ahead:
            self.ahead = BatchesAhead(
                self._gather, self._finish, settings.workers, depth=memory.ahead, batches=plan.num_batches
            )
        if settings.in_processes and settings.transform is not None:
            self._pool = TransformPool(settings.transform, settings.workers)

    def batch(self, position: Position, cursor: Cursor | None = None) -> Batch:
        """Return a batch.

        Args:
            position: position of the batch.
            cursor: the reader that has reached this batch in order. None for a batch out of turn.
        """
        if self.ahead is not None and cursor is not None:
            return self.ahead.get(cursor, position)
        return self._finish(position, self._gather(position, own=cursor is not None))

    def batch_rows(self, position: Position) -> np.ndarray:
        """Return the row numbers of a batch in the order of delivery."""
        return self.order(position.epoch).rows(*self._plan.bounds(position.batch))

    def stop_ahead(self, cursor: Cursor | None = None) -> None:
        """Drop prepared batches, all or only those of one reader."""
        if self.ahead is not None:
            self.ahead.stop(cursor)

    def close(self) -> None:
        """Close the files, stop the workers and free the windows."""
        if self.ahead is not None:
            self.ahead.close()
        if self._pool is not None:
            self._pool.close()
        self.windows.close()
        if self.ahead is not None and self._transform is None:  # a transform may take long
            self.ahead.join()

    def _gather(self, position: Position, own: bool = True) -> Batch:
        """Return the batch before `transform`. See `WindowRing.batch` for `own`."""
        order = self.order(position.epoch)
        arrays = self.windows.batch(order, *self._plan.bounds(position.batch), own=own)
        if self._plan.settings.remainder == "pad":
            arrays = self._plan.padded(arrays)
        return build_batch(
            self._plan.parts, self._plan.uses, arrays, again=np.copy
        )  # a transform may write to an array

    def _finish(self, position: Position, values: Batch) -> Batch:
        try:
            if self._pool is not None:
                values = self._pool.run(values)
            elif self._transform is not None:
                values = apply_transform(self._transform, values)
        except RuntimeError:
            self.windows.refuse_if_closed()  # and the pool with it
            raise
        except TransformFailure as failure:
            epoch, batch = position
            raise DataError(f"transform, on batch {batch:,} of epoch {epoch:,}, {failure}") from failure.__cause__
        if self._plan.adds_weights:
            start, stop = self._plan.bounds(position.batch)
            values = (*values, (np.arange(self._plan.settings.batch_size) < stop - start).astype(np.float32))
        return values
