"""A stream of batches, the position of training in it, and what one process holds open for it."""

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
from kerasmem.streaming.cursor import Cursor, Progress, make_state, read_state
from kerasmem.streaming.order import Position
from kerasmem.streaming.reader import RowReader
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
        access: what may be read.
    """

    def __init__(self, files: Sequence[str], parts: tuple[Part, ...], settings: StreamSettings, access: Access) -> None:
        self.paths = tuple(files)
        self.stream_plan = make_plan(scan_files(files, dataset_names(parts), access), parts, settings)
        ahead = ahead_bytes(settings.memory_budget, self.stream_plan.memory.total_bytes)
        self._access = replace(access, remote=replace(access.remote, ahead_bytes=ahead))
        self.progress = Progress(len(self))
        self._opened: ForkLocal[OpenStream] = ForkLocal()

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        return self.stream_plan.num_batches

    @property
    def batch_size(self) -> int:
        """Rows a batch."""
        return self.stream_plan.settings.batch_size

    @property
    def num_rows(self) -> int:
        """Rows an epoch, of this worker."""
        return self.stream_plan.num_rows

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self.stream_plan.settings.seed

    @property
    def shard(self) -> tuple[int, int]:
        """The part of the rows, (index, count)."""
        return self.stream_plan.settings.shard

    # ---- batches

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
        return make_dataset(
            self, endless=checks.flag("endless", endless), prefetch=checks.whole("prefetch", prefetch, 0)
        )

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
        order = f"shuffled with seed {self.seed}" if self.stream_plan.settings.shuffle else "in file order"
        rows, batches = format_count(self.num_rows, "row"), format_count(len(self), "batch")
        title = self.stream_plan.layout.title
        return f"<{type(self).__name__} {title}: {rows} in {batches} of {self.batch_size:,}, {order}>"

    def describe(self) -> str:
        """Return a few lines on rows, batches, types, blocks, windows and memory."""
        return describe_plan(self.stream_plan)

    @property
    def read_bytes(self) -> int:
        """Bytes read from files or received from stores so far. `close()` resets it to 0.

        Divided by the bytes of the files and by the epochs delivered it is the read amplification.
        """
        stream = self._opened.peek()
        return 0 if stream is None else stream.reader.files.bytes_read

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- within

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
    """State of one process, never pickled: locks, open files, windows, threads. Any thread may use it.

    Args:
        plan: what is delivered.
        access: what may be read.
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
            position: which.
            cursor: the reader that goes through the epoch and has come to this batch; None for a batch out of turn.
        """
        if self.ahead is not None and cursor is not None:
            return self.ahead.get(cursor, position)
        return self._finish(position, self._gather(position, own=cursor is not None))

    def batch_rows(self, position: Position) -> np.ndarray:
        """Return the row numbers of a batch."""
        return self.order(position.epoch).rows(*self._plan.bounds(position.batch))

    def stop_ahead(self, cursor: Cursor | None = None) -> None:
        """Drop the batches that are prepared, all or only those for one reader."""
        if self.ahead is not None:
            self.ahead.stop(cursor)

    def close(self) -> None:
        """Close the files, end the workers and free the windows."""
        if self.ahead is not None:
            self.ahead.close()
        if self._pool is not None:
            self._pool.close()
        self.windows.close()
        if self.ahead is not None and self._transform is None:  # a transform may take long
            self.ahead.join()

    def _gather(self, position: Position, own: bool = True) -> Batch:
        """Return the batch as read, before `transform`. See `WindowRing.batch` for `own`."""
        order = self.order(position.epoch)
        arrays = self.windows.batch(order, *self._plan.bounds(position.batch), own=own)
        if self._plan.settings.remainder == "pad":
            arrays = self._plan.padded(arrays)
        return build_batch(self._plan.parts, self._plan.uses, arrays, again=np.copy)  # a transform may write to one

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
