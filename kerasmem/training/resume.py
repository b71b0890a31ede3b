"""ResumeTraining: a `fit` that goes on with the very next batch after its process was killed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kerasmem import checks
from kerasmem.cluster import ALONE, find_worker, own_path, worker_of
from kerasmem.compat.keras_layers import symbolic_build
from kerasmem.compat.keras_training import initial_epoch, set_initial_epoch
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import shown
from kerasmem.models.backend import runs_on_jax
from kerasmem.streaming.cursor import read_state as read_position
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.checkpoint import SAVE_FREQ, Checkpoint, SavingCallback
from kerasmem.training.run_state import WEIGHTS, ModelState, RunState, load_state, read_state
from kerasmem.training.sources import SequenceSource

BEGINNING = 0
_KEPT = 2  # points of a worker's


class ResumeTraining(SavingCallback):
    """Save training every few batches, and resume at the very next batch when the script is started again.

    A run that was killed at any moment and started again ends with the weights of an undisturbed run, bit for bit if
    TensorFlow's operations are deterministic (`tf.config.experimental.enable_op_determinism()`). The file has the
    variables of model, optimizer and metrics, the states of Keras's random generators, Keras's epoch and batch, and the
    state of the sequence after the last batch of training. It is written under another name and renamed, so there is
    always a complete one. It is removed when `fit` ends, unless `keep=True`.

    Not saved are the states of other callbacks (`EarlyStopping`'s best value, the `History` before the restart), of
    other random generators than Keras's, and of a `transform`. In the resumed epoch the earlier batches are counted
    again, in no time and with the last known logs, so that batch numbers, progress bar and `steps_per_epoch` are right.

    With several workers (see `shard="auto"` of `H5ChunkSequence`) each saves its own file, with its rank in the name
    unless `path` has it: `run.rank1.resume` for `run.resume`. Under `tf.distribute.MultiWorkerMirroredStrategy`, and in
    several processes of JAX, the file before is kept as well (`PATH.before`), since a worker may die before it has
    saved a point that another one has. All workers resume from the last common point, so start all of them again.

    Args:
        path: path of the file. Workers may share it.
        sequence: the sequence given to `fit`, itself or through `as_tf_dataset()`, with the settings of the first run;
            with seed=None it takes over that run's seed.
        save_freq: batches between two savings; each epoch's end is saved too. Defaults to 100.
        keep: keep the file when `fit` ends. The next `fit` then resumes from there, so one with as many epochs has
            nothing left to do. Defaults to False.

    Raises:
        UsageError: If settings, `steps_per_epoch` or the model differ from the saved ones, the model is not built,
            workers have no point in common, or processes of JAX have shares of the weights.
        DataError: If the file cannot be read.

    Examples:
        >>> import h5py, keras, numpy as np
        >>> with h5py.File("/tmp/resumed.h5", "w") as f:
        ...     f["x"], f["y"] = np.random.rand(1000, 8), np.random.randint(0, 2, 1000)
        >>> train = H5ChunkSequence("/tmp/resumed.h5", batch_size=100)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, "softmax")])
        >>> model.compile("adam", "sparse_categorical_crossentropy")
        >>> resume = ResumeTraining("/tmp/resumed.resume", train, save_freq=5)
        >>> history = model.fit(train, epochs=2, callbacks=[resume], verbose=0)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        sequence: H5ChunkSequence,
        *,
        save_freq: int = SAVE_FREQ,
        keep: bool = False,
    ) -> None:
        self.path = os.path.abspath(checks.path("path", path))
        if not isinstance(sequence, H5ChunkSequence):
            raise UsageError(f"sequence: give the H5ChunkSequence that is trained on, not {type(sequence).__name__}")
        self.sequence = sequence
        self.keep = checks.flag("keep", keep)
        self.checkpoint: Checkpoint
        super().__init__(RunState(), None, checks.whole("save_freq", save_freq))

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore the saved state, if there is one."""
        if not self.model.built:
            raise UsageError(
                "ResumeTraining: the model is not built; begin it with keras.Input(shape), or call it on a batch"
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self._initial_epoch = initial_epoch(self.model)
        _SkippedSteps.remove(self.model)
        strategy = getattr(self.model, "distribute_strategy", None)  # None on JAX
        together = find_worker() or ALONE if runs_on_jax() else worker_of(strategy)
        several = together.size > 1
        if several and runs_on_jax():
            _refuse_shares(self.model)
        own = str(own_path(Path(self.path), find_worker(strategy)))
        self.source = source = SequenceSource(self.sequence)
        self.checkpoint = Checkpoint(own, source, keeps_before=several)
        path = self._common_file(strategy) if several else own
        self.run = self._restored(source, path) or RunState()
        super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the epoch's batches from 0."""
        set_initial_epoch(self.model, self._initial_epoch)  # Keras would begin there in each later fit too
        super().on_epoch_begin(epoch, logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Remove the file, unless it is to be kept."""
        set_initial_epoch(self.model, self._initial_epoch)
        if not self.keep:
            self.checkpoint.remove()

    def save(self) -> None:
        """Write the position and the state of the run."""
        self.checkpoint.write(self.run, read_state(self.model))

    def _common_file(self, strategy: Any) -> str | None:
        """Return the file that says the last point that all workers have."""
        points = self.checkpoint.points()
        return points.get(find_common_point(strategy, list(points), self.checkpoint.path))

    def _restored(self, source: SequenceSource, path: str | None) -> RunState | None:
        """Return the state of the run that a file says, with its weights in the model."""
        saved = None if path is None else self.checkpoint.read(path)
        if saved is None:
            return None
        run, at_once = saved.run, self.model.steps_per_execution
        if saved.data == source.kind:
            read_position(saved.position, self.sequence.stream_plan)  # first of all: other data has other steps
        self.checkpoint.check(steps=(self.params or {}).get("steps"), at_once=at_once)
        run.resume()
        if run.batch:
            symbolic_build(self.model, data_batch=self.sequence.batch(0))  # metrics are made with the first batch
        state = self.checkpoint.restored(self.model)
        self.checkpoint.go_to(run)
        load_state(self.model, state, (*WEIGHTS, "random"))
        set_initial_epoch(self.model, run.epoch)
        if run.batch:  # not sooner than the first batch: Keras resets its metrics when an epoch begins
            _SkippedSteps(self.model, run.batch, at_once, run.logs, state)
        return run


def _refuse_shares(model: Any) -> None:
    for variable in (*model.variables, *model.optimizer.variables):
        if not variable.value.is_fully_replicated:
            raise UsageError(
                f"ResumeTraining: {variable.path} is divided among processes; use keras.distribution.DataParallel"
            )


class _SkippedSteps:
    """Replaces the training step of a model until `count` batches were counted."""

    def __init__(self, model: Any, count: int, at_once: int, logs: dict[str, float], state: ModelState) -> None:
        self._model, self._left, self._at_once, self._logs, self._state = model, count, at_once, logs, state
        self.train_function = model.train_function
        model.train_function = self

    def __call__(self, *given: Any) -> Any:
        self._left -= self._at_once
        is_last, logs = self._left <= 0, dict(self._logs)
        if is_last:
            self.remove(self._model)
        if len(given) == 1:  # the iterator alone
            if is_last:
                load_state(self._model, self._state, ("metrics",))
            return logs
        state, _ = given  # on JAX a step is given the state and returns the next one
        metrics = [keras.ops.convert_to_tensor(each) for each in self._state["metrics"]] if is_last else state[-1]
        return logs, (*state[:-1], metrics)

    @staticmethod
    def remove(model: Any) -> None:
        """Give the model its own training step back."""
        if isinstance(model.train_function, _SkippedSteps):
            model.train_function = model.train_function.train_function


# Workers of a strategy save at the same batches, but one may die before it has saved what another has. As each step
# takes all of them, none is ahead by more than one point: with the last two of each there is one that all have.


def find_common_point(strategy: Any, points: Sequence[int], path: str) -> int:
    """Return the last point that all workers have. Every worker must call it.

    Args:
        strategy: a `tf.distribute.MultiWorkerMirroredStrategy`.
        points: numbers above 0 that this worker can go on from, two at most, the larger the later.
        path: of this worker's file, for the message.

    Returns:
        One of `points`, or 0 if all have to start at the beginning.

    Raises:
        UsageError: there is none that all have.
    """
    common = latest_common(points_of_all(strategy, points))
    if common is None:
        raise UsageError(
            f"{shown(path)}: the workers' files have no point in common; give each worker the file that it saved, or "
            "delete all of them to start over"
        )
    return common


def latest_common(points: Sequence[Sequence[int]]) -> int | None:
    """Return the largest common number; a worker with fewer than two has 0, too."""
    each = [set(some) | ({BEGINNING} if len(some) < _KEPT else set()) for some in points]
    common = set.intersection(*each)
    return max(common) if common else None


def points_of_all(strategy: Any, points: Sequence[int]) -> list[list[int]]:
    """Return the points of every worker."""
    if runs_on_jax():
        from jax.experimental.multihost_utils import process_allgather

        mine = np.zeros(_KEPT, np.int64)
        mine[: len(points)] = points
        every = np.asarray(process_allgather(mine.view(np.int32))).view(np.int64)  # JAX makes int64 shorter
        return [[int(point) for point in some if point] for some in every]
    import tensorflow as tf

    index, count = worker_of(strategy)
    own = np.zeros((count, _KEPT), np.int64)
    own[index, : len(points)] = points
    replicas = strategy.num_replicas_in_sync // count

    def exchange() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(own))

    found = strategy.experimental_local_results(strategy.run(exchange))[0].numpy() // replicas
    return [[int(point) for point in some if point] for some in found]
