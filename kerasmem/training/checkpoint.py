"""The checkpoint of a run, and the callback that saves and resumes it.

A new file replaces the old one in one step, so a complete one always exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kerasmem.compat.keras_training import steps_skipped
from kerasmem.errors import DataError, InputError, KerasmemError, UsageError
from kerasmem.files import open_archive, open_plain, read_json, replace_file
from kerasmem.hdf5.format.layout import one_line, quote
from kerasmem.records import Record
from kerasmem.training.run_state import GROUPS, ModelState, RunState, as_array, describe, variables
from kerasmem.training.sources import Source, pass_batches

SAVE_FREQ = 100  # batches
_MOST = 1 << 40  # epochs of a run, and batches of an epoch
_DELETE = "delete it to start over"
BEFORE = ".before"  # the file before the last, if there are several workers


@dataclass(frozen=True)
class SavedRun(Record, what="checkpoint", version=1):
    """The content of a checkpoint besides the arrays.

    Attributes:
        run: position in Keras's epochs.
        data: kind of the data, as in `Source.kind`.
        agrees: settings that must be the same when the run is resumed.
        position: position in the data.
        variables: type and shape of every variable, by group.
    """

    run: RunState
    data: str
    agrees: dict[str, Any]
    position: dict[str, Any]
    variables: dict[str, list[list[Any]]]


class Checkpoint:
    """The position and the state of a run, on disk.

    Args:
        path: path of the file.
        source: data of the run.
        keeps_before: whether the second-last file is kept too.

    Attributes:
        saved: content of the file that was read last; None if none was.
    """

    def __init__(self, path: str, source: Source, *, keeps_before: bool = False) -> None:
        self.path, self.source, self._keeps_before = os.path.realpath(path), source, keeps_before
        self.saved: SavedRun | None = None
        self._arrays: ModelState = {}

    def read(self, path: str | None = None) -> SavedRun | None:
        """Read the file if it exists.

        Args:
            path: another file to read. Defaults to the file that is written.

        Raises:
            DataError: If the file is not a checkpoint, or damaged.
        """
        if not os.path.lexists(path or self.path):
            return None
        with _open_checkpoint(path or self.path) as (saved, content):
            self._arrays = {
                group: [_decode(content[f"{group}{number}"], *kind) for number, kind in enumerate(some)]
                for group, some in saved.variables.items()
            }
        self.saved = saved
        return saved

    def points(self) -> dict[int, str]:
        """Return the files that training can resume from by `RunState.order`, the latest last."""
        paths = {}
        for path in (self.path, self.path + BEFORE):
            if os.path.lexists(path):
                with _open_checkpoint(path) as (saved, _):
                    paths[saved.run.order] = path
        return dict(sorted(paths.items()))

    def go_to(self, run: RunState, epochs: int) -> None:
        """Move the data to the saved position.

        Args:
            run: position in Keras's epochs.
            epochs: whole epochs that earlier processes have trained on.

        Raises:
            DataError: If the position is not valid.
            UsageError: If the data has changed.
        """
        assert self.saved is not None
        try:
            self.source.go_to(self.saved.position, run, epochs)
        except KerasmemError:
            raise
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{quote(self.path)}: the position in the data is not valid ({one_line(str(error), 100)}); {_DELETE}"
            ) from error

    def check(self, *, steps: int | None, at_once: int) -> None:
        """Refuse to resume if data or settings have changed.

        Args:
            steps: batches of an epoch now; None if unknown.
            at_once: steps in one execution.

        Raises:
            UsageError: If they have changed; the message names the setting.
        """
        assert self.saved is not None
        saved, run, path = self.saved, self.saved.run, quote(self.path)
        differences = [("x", f"data of the kind {saved.data}", f"data of the kind {self.source.kind}")]
        if saved.data == self.source.kind:
            now = self.source.describe()
            differences = [(name, repr(saved.agrees.get(name)), repr(value)) for name, value in now.items()]
        if run.batch or (self.source.reads_skipped and run.steps is not None):
            differences.append(("steps_per_epoch", f"{run.steps} batches", f"{steps} batches"))
        for name, before, after in differences:
            if before != after:
                raise UsageError(f"checkpoint: {name} was {before} in the run of {path} and is {after} now; {_DELETE}")
        if run.steps is not None and run.batch >= run.steps + at_once:
            raise DataError(f"{path}: batch {run.batch:,} of an epoch of {run.steps:,} is not valid; {_DELETE}")
        if run.batch % at_once:
            raise UsageError(
                f"steps_per_execution must divide the {run.batch} batches after which {path} was saved; got {at_once}"
            )

    def state_for(self, model: Any, groups: Sequence[str] = GROUPS) -> ModelState:
        """Return the saved arrays for the variables of a model.

        Metrics begin with each epoch and may have changed. If so, their arrays are the model's.

        Raises:
            UsageError: If the model has changed; the message names the first variable that differs.
        """
        assert self.saved is not None
        own, state = variables(model), dict(self._arrays)
        for group in groups:
            here, saved = describe(own[group]), self.saved.variables.get(group, [])
            if group == "metrics" and (self.saved.run.skipped == 0 or here != saved):
                state[group] = [as_array(variable) for variable in own[group]]
            elif here != saved:
                raise UsageError(_difference(self.path, group, own[group], here, saved))
        return state

    def write(self, run: RunState, state: ModelState) -> None:
        """Write the position and the state.

        Raises:
            DataError: If the file cannot be written. The earlier one stays.
        """
        saved = SavedRun(
            run=run,
            data=self.source.kind,
            agrees=self.source.describe(),
            position=self.source.position(run),
            variables={group: describe(some) for group, some in state.items()},
        )
        content = {"saved": np.frombuffer(json.dumps(saved.to_dict()).encode(), np.uint8)}
        for group, some in state.items():
            for number, array in enumerate(some):  # as bytes: NumPy's files know no bfloat16
                content[f"{group}{number}"] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        before = self.path + BEFORE if self._keeps_before else None
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with replace_file(self.path, durable=True, before=before) as file:
                np.savez(file, **content)  # type: ignore[arg-type]
        except OSError as error:
            reason = f"cannot be written: {error.strerror}; free space, or choose another path"
            raise DataError(f"checkpoint: {quote(self.path)} {reason}") from error
        run.unsaved = 0

    def remove(self) -> None:
        """Remove the files."""
        for path in (self.path, self.path + BEFORE):
            if os.path.lexists(path):
                os.unlink(path)


@contextmanager
def _open_checkpoint(path: str) -> Iterator[tuple[SavedRun, Mapping[str, np.ndarray]]]:
    try:
        with open(open_plain(path), "rb") as file, open_archive(file) as content:
            saved = SavedRun.from_dict(read_json(content["saved"].tobytes()))
            _refuse_absurd(saved.run)
            yield saved, content
    except InputError as error:
        raise DataError(f"{quote(path)}: {error}; {_DELETE}") from error
    except MemoryError:
        raise
    except PermissionError as error:
        raise DataError(f"checkpoint: {quote(path)} cannot be read: {error.strerror}; make it readable") from error
    except Exception as error:  # NumPy, zipfile and Python's parser raise many kinds for damaged files
        reason = one_line(str(error), 100)
        raise DataError(f"{quote(path)}: not a checkpoint of kerasmem, or damaged ({reason}); {_DELETE}") from error


def _refuse_absurd(run: RunState) -> None:
    """Refuse impossible counts of a damaged file, as they set the length of loops."""
    counts = {"epoch": run.epoch, "batch": run.batch, "steps": run.steps, "micro_batch_rows": run.micro_batch_rows}
    for name, count in counts.items():
        if count is not None and not 0 <= count < _MOST:
            raise ValueError(f"{name} is {count}")
    if len(set(run.epochs)) != len(run.epochs) or any(not 0 <= epoch <= run.epoch for epoch in run.epochs):
        raise ValueError("epochs are not valid")


def _decode(data: np.ndarray, name: str, shape: list[int]) -> np.ndarray:
    import ml_dtypes  # noqa: F401 - a dependency of Keras; it adds bfloat16 to NumPy

    return np.frombuffer(data.tobytes(), np.dtype(name)).reshape([int(extent) for extent in shape])


def _difference(path: str, group: str, own: list[Any], here: list[Any], saved: list[Any]) -> str:
    change = f"{len(saved)} variables, now {len(here)}"
    for variable, now, before in zip(own, here, saved, strict=False):
        if now != before:
            change = f"{before[0]} {tuple(before[1])}, now {quote(variable.path)}, {now[0]} {tuple(now[1])}"
            break
    return f"model: the {group} saved in {quote(path)} has {change}; build the same model, or {_DELETE}"


class SavingCallback(keras.callbacks.Callback):
    """Updates a run's state, and saves it every few batches and at each epoch's end.

    Args:
        run: position of the run.
        source: data of the run; None if nothing is saved.
        save_freq: batches between two checkpoints.

    Attributes:
        skipping: context of skipped steps; close it when `fit` ends.
    """

    def __init__(self, run: RunState, source: Source | None, save_freq: int) -> None:
        super().__init__()
        self.run, self.source, self.save_freq = run, source, save_freq
        self.skipping = ExitStack()

    def resume(
        self, checkpoint: Checkpoint, first_epoch: int = 0, on_skip: Callable[[Any], object] = lambda batch: None
    ) -> None:
        """Move the data to the saved position, and have the `fit` that begins skip the steps before it.

        Args:
            checkpoint: the file, read.
            first_epoch: Keras's first epoch of the whole run.
            on_skip: called at each skipped execution of steps, with its first batch; None if batches are not read.
        """
        run, source, at_once = self.run, checkpoint.source, self.model.steps_per_execution
        checkpoint.check(steps=(self.params or {}).get("steps"), at_once=at_once)
        epochs = sum(epoch >= first_epoch for epoch in run.epochs)
        checkpoint.go_to(run, epochs)

        def skip(iterator: Any) -> None:
            batch = pass_batches(iterator, at_once) if source.reads_skipped else None
            source.check_first(batch)
            on_skip(batch)

        self.skipping.enter_context(steps_skipped(epochs if source.reads_skipped else 0, run.skipped, skip))

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Note how many batches an epoch has."""
        self.run.steps = (self.params or {}).get("steps")

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the epoch's batches from 0."""
        self.run.begin_epoch(epoch)
        if self.source is not None:
            self.source.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save every few batches, except after an epoch's last batch, as `on_epoch_end` saves too."""
        run = self.run
        run.count(batch + 1)
        if run.unsaved >= self.save_freq and (run.steps is None or run.batch < run.steps):
            run.keep_logs(logs)
            self.save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save the start of the next epoch."""
        if self.source is not None:
            self.source.end_epoch(self.run)
        self.run.end_epoch({**self.run.logs, **(logs or {})})
        self.save()

    def save(self) -> None:
        """Write the position of the run."""
        raise NotImplementedError
