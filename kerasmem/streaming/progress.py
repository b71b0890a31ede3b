"""Where training stands in a sequence, and how it goes on from there: epochs, saved states, whole epochs at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kerasmem.errors import UsageError
from kerasmem.hdf5.settings import read_flag, read_whole
from kerasmem.streaming.dataset import batches_signature, make_dataset
from kerasmem.streaming.graph import make_graph_dataset
from kerasmem.streaming.passes import Passes
from kerasmem.streaming.state import make_state, read_state


class _Epoch:
    """Who reads an epoch by itself, without Keras."""

    shuffle = False


class Progress:
    """The part of a sequence that counts epochs; not to be made by itself."""

    batch_size: int
    num_rows: int
    seed: int
    shard: tuple[int, int]
    transform: Any
    _passes: Passes
    _seed_drawn: bool

    if TYPE_CHECKING:  # what the sequence has to have

        def __len__(self) -> Any: ...
        def batch(self, place: int, epoch: int | None = None) -> Any: ...  # noqa: D102
        def close(self) -> Any: ...  # noqa: D102
        def _here(self) -> Any: ...
        def _deliver(self, reader: Any, index: int) -> Any: ...
        def _agreement(self) -> Any: ...
        def _signature(self) -> Any: ...

    @property
    def epoch(self) -> int:
        """Number of the epoch that is, or will next be, delivered; later calls of `fit` count on."""
        return self._passes.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of epoch `epoch`, whose batches are always the same for a seed."""
        self._go_to(read_whole("epoch", epoch, 0), 0)

    def next_epoch(self) -> Iterator[tuple[Any, ...]]:
        """Return the batches of the next epoch, for a training loop of one's own; the epoch counts as used.

        After `load_state_dict` it is the rest of the epoch that the state was saved in. Between two batches
        `state_dict()` says that the second is the next.

        Example:
            >>> import h5py
            >>> with h5py.File("/tmp/epochs.h5", "w") as f:
            ...     f["x"], f["y"] = range(10), range(10)
            >>> from kerasmem import H5ChunkSequence
            >>> train = H5ChunkSequence("/tmp/epochs.h5", batch_size=4)
            >>> [len(y) for x, y in train.next_epoch()], train.epoch
            ([4, 4, 2], 1)
        """
        reader = _Epoch()
        live = self._here()
        with live.lock:
            self._passes.begin(reader)
            left = self._passes.left(reader)
        for index in range(left):
            yield self._deliver(reader, index)
        with live.lock:
            self._passes.end(reader)

    def as_tf_dataset(self, *, endless: bool = False, prefetch: int = 2) -> Any:
        """Return a `tf.data.Dataset` of the same batches in the same order, for `fit`, `map` or a loop of one's own.

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

        Example:
            >>> import h5py, numpy as np
            >>> with h5py.File("/tmp/tensors.h5", "w") as f:
            ...     f["x"], f["y"] = np.zeros((10, 3)), np.zeros(10)
            >>> from kerasmem import H5ChunkSequence
            >>> data = H5ChunkSequence("/tmp/tensors.h5", batch_size=5).as_tf_dataset()
            >>> [x.shape for x, y in data.as_numpy_iterator()]
            [(5, 3), (5, 3)]
        """
        prefetch = read_whole("prefetch", prefetch, 0)
        if self.transform is None:
            signature = self._signature()
        else:
            signature = batches_signature([self.batch(place) for place in sorted({0, len(self) - 1})])
        if read_flag("endless", endless):
            return make_dataset(self._epochs, signature, batches=-1, prefetch=prefetch)
        # Under tf.distribute a worker's share comes in smaller and more batches: Keras must not stop at this number.
        whole = self._passes.position[1] == 0 and self.shard[1] == 1
        return make_dataset(self.next_epoch, signature, batches=len(self) if whole else None, prefetch=prefetch)

    def as_service_dataset(self, *, epochs: int = 1) -> Any:
        """Return a `tf.data.Dataset` of the same rows that workers of the tf.data service can run, wherever they are.

        It reads the file with TensorFlow's own operations alone, so that a worker needs neither this process nor
        kerasmem, only the file at the same path. The data must lie in the file as it is: contiguous or in chunks, not
        compressed. The order is another than the sequence's own: pieces of the file in an order drawn from `seed`,
        and rows shuffled within a worker's window, which holds as many rows as the sequence's.

        With `ShardingPolicy.DYNAMIC` the service hands out each piece once: every row comes exactly once an epoch. A
        piece that a worker was reading when it died is lost, with what lay in its window and its buffers: rows then
        come at most once, none twice. Whoever reads waits, however long, until a worker is started at the address of
        the dead one, as TensorFlow's client does not give it up by itself.

        A worker's last batch may be short: `rebatch` makes even ones of all.

        Args:
            epochs: how often each row comes; each time in another order of pieces.

        Raises:
            DataError: a dataset is compressed, or stored in another way that TensorFlow cannot read.
            UsageError: the sequence has a `transform` or checks for NaN, which takes Python.

        Example:
            >>> import h5py, numpy as np
            >>> with h5py.File("/tmp/served.h5", "w") as f:
            ...     f["x"], f["y"] = np.zeros((10, 3)), np.arange(10)
            >>> from kerasmem import H5ChunkSequence
            >>> data = H5ChunkSequence("/tmp/served.h5", batch_size=4).as_service_dataset()
            >>> sorted(int(row) for x, y in data.as_numpy_iterator() for row in y)
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
            >>> # served = data.apply(tf.data.experimental.service.distribute("dynamic", "grpc://host:5000")).rebatch(4)
        """
        return make_graph_dataset(self, read_whole("epochs", epochs, 1))

    def state_dict(self, *, epoch: int | None = None, batch: int | None = None) -> dict[str, Any]:
        """Return where training stands: less than 1 KB of plain numbers and texts, ready for JSON.

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
        at = self._passes.position
        if epoch is not None and batch is not None:
            at = read_whole("epoch", epoch, 0), read_whole("batch", batch, 0)
            at = at[0] + at[1] // self._passes.batches, at[1] % self._passes.batches
        return make_state(self._agreement(), seed=self.seed, epoch=at[0], batch=at[1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, with the very next batch.

        Args:
            state: what `state_dict` returned, of this sequence or of one made alike. One with seed=None takes
                over the seed.

        Raises:
            DataError: this is no such state.
            UsageError: a setting differs, so that the batches would too; the message names it.
        """
        self._resume(state, skipped=0)

    def _epochs(self) -> Iterator[tuple[Any, ...]]:
        while True:
            yield from self.next_epoch()

    def _resume(self, state: Any, *, skipped: int) -> None:
        """Load a state; `skipped` batches of Keras's first epoch will be counted, not asked for."""
        seed = None if self._seed_drawn else self.seed
        seed, epoch, batch = read_state(state, self._agreement(), seed=seed)
        if seed != self.seed:
            self.close()  # windows in memory are of the other order
            self.seed = seed
        self._go_to(epoch, batch, skipped=skipped)

    def _go_to(self, epoch: int, batch: int, *, skipped: int = 0) -> None:
        live = self._here()
        with live.lock:
            self._passes.restart(epoch, batch, skipped=skipped)
        if live.ahead is not None:
            live.ahead.stop()
