"""`kerasmem.ResumeTraining`: a callback that resumes a killed `fit` at the very next batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kerasmem import checks
from kerasmem.cluster import ALONE, find_worker, own_path, worker_of
from kerasmem.compat.keras_layers import symbolic_build
from kerasmem.compat.keras_training import initial_epoch, loss_and_metrics_built, set_initial_epoch
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import quote
from kerasmem.models.backend import runs_on_jax
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.streaming.states import read_state as read_position
from kerasmem.training.checkpoint import SAVE_FREQ, Checkpoint, SavedRun, SavingCallback
from kerasmem.training.run_state import WEIGHTS, RunState, load_state, read_state
from kerasmem.training.sources import SequenceSource, Source, StreamSource
from kerasmem.training.steps.batches import without_optionals

BEGINNING = 0
_KEPT = 2  # points of a worker


class ResumeTraining(SavingCallback):
    """Save training every few batches, and resume at the very next batch when the script is started again.

    A run that was killed at any moment and started again ends with the weights of an undisturbed run, bit for bit if
    TensorFlow's operations are deterministic (`tf.config.experimental.enable_op_determinism()`) and the data comes in
    the same order. The file has the variables of model, optimizer and metrics, the states of Keras's random generators,
    and the position in Keras's epochs and in the data; `kerasmem.fit(checkpoint=…)` has the same format. A new file
    replaces the old one in one step, so there is always a complete one. It is removed when `fit` ends, unless
    `keep=True`.

    An `H5ChunkSequence` resumes at once, in the order of the first run. All other data that `fit` takes (arrays, a
    `PyDataset`, tf.data, a generator) is read again from the first epoch up to the position, without training. Its
    order is the same if it is not shuffled, if `shuffle()` of tf.data has a seed, or if the script calls
    `keras.utils.set_random_seed`.

    Not saved are the states of other callbacks (`EarlyStopping`'s best value, the `History` before the restart), of
    other random generators than Keras's, and of a `transform`. In the resumed epoch callbacks and progress bar begin
    with the number of the next batch.

    With several workers (see `shard="auto"` of `H5ChunkSequence`) each saves its own file, with its rank in the name
    unless `path` has it: `run.rank1.resume` for `run.resume`. Under `tf.distribute.MultiWorkerMirroredStrategy`, and in
    several processes of JAX, the file before is kept as well (`PATH.before`), since a worker may die before it has
    saved a point that another one has. All workers resume from the last common point, so restart all workers.

    Args:
        path: path of the file. Workers may share it.
        sequence: the `H5ChunkSequence` given to `fit`, itself or through `as_tf_dataset()`, with the settings of the
            first run; with seed=None it takes over that run's seed. Defaults to None, for other data.
        save_freq: batches between two savings; each epoch's end is saved too. Defaults to 100.
        keep: keep the file when `fit` ends. The next `fit` then resumes from there, so one with as many epochs has
            nothing left to do. Defaults to False.

    Raises:
        UsageError: If settings, `steps_per_epoch` or the model have changed, the model is not built, workers have no
            point in common, or the weights are divided among processes of JAX.
        DataError: If the file cannot be read.

    Examples:
        >>> import h5py, keras, kerasmem, numpy as np
        >>> with h5py.File("/tmp/resumed.h5", "w") as f:
        ...     f["x"], f["y"] = np.random.rand(1000, 8), np.random.randint(0, 2, 1000)
        >>> train = kerasmem.H5ChunkSequence("/tmp/resumed.h5", batch_size=100)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, "softmax")])
        >>> model.compile("adam", "sparse_categorical_crossentropy")
        >>> resume = kerasmem.ResumeTraining("/tmp/resumed.resume", train, save_freq=5)
        >>> history = model.fit(train, epochs=2, callbacks=[resume], verbose=0)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        sequence: H5ChunkSequence | None = None,
        *,
        save_freq: int = SAVE_FREQ,
        keep: bool = False,
    ) -> None:
        self.path = os.path.abspath(checks.path("path", path))
        if sequence is not None and not isinstance(sequence, H5ChunkSequence):
            raise UsageError(
                "sequence must be the H5ChunkSequence of `fit`; leave it out for other data; got "
                f"{type(sequence).__name__}"
            )
        self.sequence = sequence
        self.keep = checks.flag("keep", keep)
        self.checkpoint: Checkpoint
        self.source: Source
        self._restores_metrics = False
        super().__init__(RunState(), None, checks.whole("save_freq", save_freq))

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore the saved state, if there is one."""
        if not self.model.built:
            raise UsageError(
                "ResumeTraining: model must be built; begin it with keras.Input(shape), or call it on a batch"
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self._initial_epoch = initial_epoch(self.model)
        self.skipping.close()  # of a `fit` that failed
        strategy = getattr(self.model, "distribute_strategy", None)  # None on JAX
        together = find_worker() or ALONE if runs_on_jax() else worker_of(strategy)
        several = together.size > 1
        if several and runs_on_jax():
            _refuse_shares(self.model)
        own = str(own_path(Path(self.path), find_worker(strategy)))
        self.source = StreamSource() if self.sequence is None else SequenceSource(self.sequence)
        self.checkpoint = Checkpoint(own, self.source, keeps_before=several)
        path = self._common_file(strategy) if several else own
        saved, self.run = None if path is None else self.checkpoint.read(path), RunState()
        if saved is not None:
            self._restore(saved)
        super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the epoch's batches from 0."""
        set_initial_epoch(self.model, self._initial_epoch)  # else later calls of `fit` would begin there too
        super().on_epoch_begin(epoch, logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Remove the file unless `keep` is set."""
        set_initial_epoch(self.model, self._initial_epoch)
        self.skipping.close()
        if not self.keep:
            self.checkpoint.remove()

    def save(self) -> None:
        """Write the position and the state of the run."""
        self.checkpoint.write(self.run, read_state(self.model))

    def _common_file(self, strategy: Any) -> str | None:
        """Return the file with the last point that all workers have."""
        points = self.checkpoint.points()
        return points.get(find_common_point(strategy, list(points), self.checkpoint.path))

    def _restore(self, saved: SavedRun) -> None:
        """Load the saved weights into the model, and resume."""
        if saved.data == "sequence" and self.sequence is not None:
            read_position(saved.position, self.sequence.stream_plan)  # first, as other data has other steps
        self.run = saved.run
        self.run.resume()
        self._restores_metrics = self.run.batch > 0
        state = self.checkpoint.state_for(self.model, WEIGHTS)
        self.resume(self.checkpoint, on_skip=self._restore_metrics)
        load_state(self.model, state, (*WEIGHTS, "random"))
        set_initial_epoch(self.model, self.run.epoch)

    def _restore_metrics(self, batch: Any) -> None:
        """Load the saved metrics into the model, at the first batch, as Keras resets them before it."""
        if self._restores_metrics:
            self._restores_metrics = False
            if not all(loss_and_metrics_built(self.model)):
                symbolic_build(self.model, data_batch=self.source.peek() if batch is None else without_optionals(batch))
            load_state(self.model, self.checkpoint.state_for(self.model, ("metrics",)), ("metrics",))


def _refuse_shares(model: Any) -> None:
    for variable in (*model.variables, *model.optimizer.variables):
        if not variable.value.is_fully_replicated:
            raise UsageError(
                f"ResumeTraining: {variable.path} is divided among processes; use keras.distribution.DataParallel"
            )


# Workers of a strategy save at the same batches, but one may die before it has saved a point that another has. As each
# step needs all workers, none is ahead by more than one point. So the last two points of each include a common one.


def find_common_point(strategy: Any, points: Sequence[int], path: str) -> int:
    """Return the last point that all workers have. Every worker must call it.

    Args:
        strategy: a `tf.distribute.MultiWorkerMirroredStrategy`.
        points: up to two numbers above 0 that this worker can resume from; later points are larger.
        path: path of this worker's file, for the message.

    Returns:
        One of `points`, or 0 if all workers start at the beginning.

    Raises:
        UsageError: If the workers have no common point.
    """
    common = latest_common(points_of_all(strategy, points))
    if common is None:
        raise UsageError(
            f"{quote(path)}: the workers' files have no common point; give each worker the file that it saved, or "
            "delete all of them to start over"
        )
    return common


def latest_common(points: Sequence[Sequence[int]]) -> int | None:
    """Return the largest common number. A worker with fewer than two points has 0 too."""
    choices = [set(own) | ({BEGINNING} if len(own) < _KEPT else set()) for own in points]
    common = set.intersection(*choices)
    return max(common) if common else None


def points_of_all(strategy: Any, points: Sequence[int]) -> list[list[int]]:
    """Return the points of every worker."""
    if runs_on_jax():
        from jax.experimental.multihost_utils import process_allgather

        mine = np.zeros(_KEPT, np.int64)
        mine[: len(points)] = points
        gathered = np.asarray(process_allgather(mine.view(np.int32))).view(np.int64)  # JAX truncates int64
        return [[int(point) for point in worker if point] for worker in gathered]
    import tensorflow as tf

    index, count = worker_of(strategy)
    own = np.zeros((count, _KEPT), np.int64)
    own[index, : len(points)] = points
    replicas = strategy.num_replicas_in_sync // count

    def exchange() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(own))

    gathered = strategy.experimental_local_results(strategy.run(exchange))[0].numpy() // replicas
    return [[int(point) for point in worker if point] for worker in gathered]
