"""ResumeTraining: a `fit` that goes on with the very next batch after its process was killed."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import keras
import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.settings import read_flag, read_path, read_whole
from kerasmem.streaming.engines import place_of
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.agreement import agree
from kerasmem.training.place import Place

FORMAT_VERSION = 1
BEFORE = ".before"  # the file before the last, where there are several workers


@dataclass(frozen=True)
class SavedPoint:
    """Where `fit` stood.

    Args:
        epoch: number of Keras's epoch.
        batch: batches of it that were trained on.
        steps: batches it has, as Keras said; None where Keras did not know.
        sequence: what `H5ChunkSequence.state_dict` returned for the next batch.
        logs: what Keras told its callbacks after the last batch.
        variables: type and shape of every variable, by group.
        format_version: of this record.
        more: what else whoever saves it wants back, as JSON has it.
    """

    epoch: int
    batch: int
    steps: int | None
    sequence: dict[str, Any]
    logs: dict[str, float]
    variables: dict[str, list[list[Any]]]
    format_version: int = FORMAT_VERSION
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> int:
        """A number above 0, the larger the later in training."""
        return (self.epoch << 32) + self.batch + 1


class ResumeTraining(keras.callbacks.Callback):
    """Save training every few batches, and go on with the very next batch when the script is started again.

    A run that was killed at any moment and started again ends with the weights of one that never was, bit for
    bit where TensorFlow's operations are deterministic (`tf.config.experimental.enable_op_determinism()`).
    Saved are the model's variables with the states of its random generators (dropout), the optimizer's, those
    of the metrics, Keras's epoch and batch, and the state of the sequence, of the last batch that was trained
    on, whatever was read ahead. The file is written under another name and renamed, so there is always a whole
    one. When `fit` ends by itself the file is removed, unless `keep=True`.

    Not saved is what other callbacks remember (`EarlyStopping`'s best value, `History`: it has the epochs since
    the restart), random numbers that the model draws without a generator of its own, and the state of a
    `transform`. In the epoch that is gone on with, the batches trained on before are counted once more, in no
    time and with the last known logs, so that numbers of batches, progress bar and `steps_per_epoch` are right.

    Under `tf.distribute.MultiWorkerMirroredStrategy` each worker saves its own file, and keeps the one before as
    well (`PATH.before`): a worker may die before it has saved what another one has. Started again, all of them go
    on from the last point that every one has, so all have to be started again, as TensorFlow wants it anyhow.

    Args:
        path: where to save; one file for each worker.
        sequence: the sequence given to `fit`, itself or through `as_tf_dataset()`, made with the settings of the
            first run; with seed=None it takes over that run's seed.
        every: batches from one saving to the next; each epoch's end is saved too.
        keep: leave the file where it is when `fit` ends. The next `fit` then goes on from there, so that one
            with as many epochs has nothing left to do.

    Raises:
        UsageError: settings, `steps_per_epoch` or the model differ from what was saved, the model is not built,
            workers have no point in common, or another backend than TensorFlow is in use.
        DataError: the file cannot be read.

    Example:
        >>> import h5py, keras, numpy as np
        >>> with h5py.File("/tmp/resumed.h5", "w") as f:
        ...     f["x"], f["y"] = np.random.rand(1000, 8), np.random.randint(0, 2, 1000)
        >>> train = H5ChunkSequence("/tmp/resumed.h5", batch_size=100)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, "softmax")])
        >>> model.compile("adam", "sparse_categorical_crossentropy")
        >>> resume = ResumeTraining("/tmp/resumed.resume", train, every=5)
        >>> history = model.fit(train, epochs=2, callbacks=[resume], verbose=0)
    """

    def __init__(
        self, path: str | os.PathLike[str], sequence: H5ChunkSequence, *, every: int = 100, keep: bool = False
    ) -> None:
        super().__init__()
        self.path = read_path(path)
        if not isinstance(sequence, H5ChunkSequence):
            raise UsageError(f"sequence: give the H5ChunkSequence that is trained on, not {type(sequence).__name__}")
        self.sequence = sequence
        self.every = read_whole("every", every, 1)
        self.keep = read_flag("keep", keep)
        self._place = Place(sequence)
        self._epoch = self._skipped = self._done = self._unsaved = 0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore what was saved, if anything was."""
        if keras.backend.backend() != "tensorflow":
            raise UsageError("ResumeTraining: only the TensorFlow backend reads batches in a way it can follow")
        if not self.model.built:
            raise UsageError(
                "ResumeTraining: the model is not built, so nothing can be restored into it; begin it with "
                "keras.Input(shape), or call it on a batch before fit"
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self._given_initial_epoch = self.model._initial_epoch
        _Skip.remove(self.model)
        self._skipped = self._done = self._unsaved = 0
        path = self._file_to_restore()
        if path is not None:
            self._restore(*read_point(path))
        self._place.begin()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Note Keras's epoch."""
        self.model._initial_epoch = self._given_initial_epoch  # Keras would begin there in each later fit too
        self._epoch, self._done = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save, if it is time."""
        done = batch + 1
        if done <= self._skipped:
            return
        self._unsaved += done - max(self._done, self._skipped)
        self._done = done
        if self._unsaved >= self.every:
            trained = done - self._skipped
            self._save(self._epoch, done, self._place.after(trained, self._steps()), logs or {})

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save the start of the next epoch."""
        at = self._place.end_epoch(max(self._done - self._skipped, 0), self._steps())
        self._skipped = self._done = 0
        self._save(epoch + 1, 0, at, {})

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Remove the file, unless it is to be kept."""
        self.model._initial_epoch = self._given_initial_epoch
        for path in () if self.keep else self._files():
            os.unlink(path)

    def _files(self) -> list[str]:
        return [path for path in (self.path, self.path + BEFORE) if os.path.exists(path)]

    def _file_to_restore(self) -> str | None:
        strategy, files = self.model.distribute_strategy, self._files()
        if place_of(strategy)[1] == 1:
            return self.path if self.path in files else None
        keys = {read_record(path).key: path for path in files}
        return keys.get(agree(strategy, list(keys), self.path))

    def _steps(self) -> int | None:
        return (self.params or {}).get("steps")

    def _save(self, epoch: int, batch: int, position: tuple[int, int], logs: Mapping[str, Any]) -> None:
        self._unsaved = 0
        arrays = {
            group: [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
            for group, variables in _variables(self.model).items()
        }
        point = SavedPoint(
            epoch=epoch,
            batch=batch,
            steps=self._steps(),
            sequence=self.sequence.state_dict(epoch=position[0], batch=position[1]),
            logs={name: float(value) for name, value in logs.items() if np.ndim(value) == 0},
            variables={
                group: [[array.dtype.name, list(array.shape)] for array in some] for group, some in arrays.items()
            },
        )
        write_point(self.path, point, arrays, keep_before=place_of(self.model.distribute_strategy)[1] > 1)

    def _restore(self, point: SavedPoint, arrays: dict[str, list[np.ndarray]]) -> None:
        at_once = self.model.steps_per_execution
        if point.batch and point.steps != self._steps():
            raise UsageError(
                f"steps_per_epoch: {shown(self.path)} was saved within an epoch of {point.steps} batches, and fit now "
                f"has {self._steps()}; give fit the same steps_per_epoch, or delete the file to start over"
            )
        if point.batch % at_once:
            raise UsageError(
                f"steps_per_execution: {shown(self.path)} was saved after {point.batch} batches of an epoch, and fit "
                f"now takes {at_once} at a time; compile with the same steps_per_execution"
            )
        build = getattr(self.model, "_symbolic_build", None)
        if point.batch and build is not None:
            build(data_batch=self.sequence.batch(0))  # metrics are made with the first batch; these are needed now
        variables = _variables(self.model)
        for group in ("model", "optimizer"):
            _check_variables(self.path, group, variables[group], point.variables[group])
        self.sequence._resume(point.sequence, skipped=point.batch)
        for group in ("model", "optimizer"):
            _assign(variables[group], arrays[group])
        self.model._initial_epoch = point.epoch
        self._skipped = point.batch
        if point.batch:
            fit = _describe(variables["metrics"]) == point.variables["metrics"]
            metrics = variables["metrics"] if fit else []  # other metrics are no reason not to go on

            def after() -> None:  # not sooner: Keras resets its metrics when an epoch begins
                _assign(metrics, arrays["metrics"][: len(metrics)])

            _Skip(self.model, point.batch, at_once, point.logs, after)


class _Skip:
    """Stands in for a model's training step until `count` batches were counted; asks for none."""

    def __init__(self, model: Any, count: int, at_once: int, logs: dict[str, float], after: Callable[[], None]) -> None:
        self._model, self._left, self._at_once, self._logs, self._after = model, count, at_once, logs, after
        self._train_function = model.train_function
        model.train_function = self

    def __call__(self, iterator: Any) -> dict[str, float]:
        self._left -= self._at_once
        if self._left <= 0:
            self.remove(self._model)
            self._after()
        return dict(self._logs)

    @staticmethod
    def remove(model: Any) -> None:
        """Give the model its own training step back."""
        if isinstance(model.train_function, _Skip):
            model.train_function = model.train_function._train_function


def write_point(
    path: str, point: SavedPoint, arrays: Mapping[str, list[np.ndarray]], *, keep_before: bool = False
) -> None:
    """Write a point so that at any moment there is a whole file, this one or the one before, or both."""
    content = {"point": np.frombuffer(json.dumps(asdict(point)).encode(), np.uint8)}
    for group, some in arrays.items():
        for number, array in enumerate(some):  # as bytes: NumPy's files know no bfloat16
            content[f"{group}{number}"] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".part", "wb") as file:
        np.savez(file, allow_pickle=False, **content)
        file.flush()
        os.fsync(file.fileno())
    if keep_before and os.path.exists(path):
        os.replace(path, path + BEFORE)
    os.replace(path + ".part", path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_point(path: str) -> tuple[SavedPoint, dict[str, list[np.ndarray]]]:
    """Return what `write_point` wrote; the arrays as bytes.

    Raises:
        DataError: the file is none of that kind, or damaged.
    """
    with _opened(path) as (point, content):
        return point, {
            group: [content[f"{group}{number}"] for number in range(len(some))]
            for group, some in point.variables.items()
        }


def read_record(path: str) -> SavedPoint:
    """Return what `write_point` wrote, without the arrays.

    Raises:
        DataError: the file is none of that kind, or damaged.
    """
    with _opened(path) as (point, _):
        return point


@contextmanager
def _opened(path: str) -> Iterator[tuple[SavedPoint, Mapping[str, np.ndarray]]]:
    try:
        with np.load(path, allow_pickle=False) as content:
            record = json.loads(content["point"].tobytes())
            if record.get("format_version") != FORMAT_VERSION:
                raise DataError(
                    f"{shown(path)}: format_version {record.get('format_version')!r} is not known here; resume with "
                    "the version of kerasmem that saved it, or delete the file to start over"
                )
            yield SavedPoint(**record), content
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{shown(path)}: not a file that ResumeTraining saved, or a damaged one ({type(error).__name__}); "
            "delete it to start over"
        ) from error


def _variables(model: Any) -> dict[str, list[Any]]:
    return {
        "model": list(model.variables),
        "optimizer": list(model.optimizer.variables),
        "metrics": list(model.metrics_variables),
    }


def _describe(variables: list[Any]) -> list[list[Any]]:
    return [[keras.backend.standardize_dtype(v.dtype), list(v.shape)] for v in variables]


def _check_variables(path: str, group: str, variables: list[Any], saved: list[list[Any]]) -> None:
    here = _describe(variables)
    if here == saved:
        return
    what = f"{len(saved)} variables and the one given has {len(here)}"
    for variable, now, before in zip(variables, here, saved, strict=False):
        if now != before:
            given = f"{shown(variable.path)}, {now[0]} {tuple(now[1])}"
            what = f"{before[0]} {tuple(before[1])} where the one given has {given}"
            break
    raise UsageError(
        f"model: the {group} saved in {shown(path)} has {what}; build and compile the model as before, "
        "or delete the file to start over"
    )


def _assign(variables: list[Any], arrays: list[np.ndarray]) -> None:
    for variable, data in zip(variables, arrays, strict=True):
        value = np.asarray(keras.ops.convert_to_numpy(variable))
        variable.assign(np.frombuffer(data.tobytes(), value.dtype).reshape(value.shape))
