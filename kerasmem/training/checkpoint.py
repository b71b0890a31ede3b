"""The file of a run, replaced at once so that at any moment there is a complete one, and the callback that saves it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kerasmem.errors import DataError, InputError, KerasmemError, UsageError
from kerasmem.files import open_archive, open_plain, read_json, replacing
from kerasmem.hdf5.format.layout import one_line, shown
from kerasmem.records import Record
from kerasmem.training.run_state import GROUPS, ModelState, RunState, as_array, describe, variables
from kerasmem.training.sources import Source

SAVE_FREQ = 100  # batches
_MOST = 1 << 40  # epochs, and batches of one: more than anybody trains
_DELETE = "delete it to start over"
BEFORE = ".before"  # the file before the last, if there are several workers


@dataclass(frozen=True)
class SavedRun(Record, what="checkpoint", version=1):
    """The content of a checkpoint besides the arrays.

    Attributes:
        run: position in Keras's epochs.
        data: kind of the data.
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
        path: of the file.
        source: the run's data.
        keeps_before: whether the file before the last is kept as well.

    Attributes:
        saved: the content that was read last; None before.
    """

    def __init__(self, path: str, source: Source, *, keeps_before: bool = False) -> None:
        self.path, self.source, self._keeps_before = os.path.realpath(path), source, keeps_before
        self.saved: SavedRun | None = None
        self._arrays: ModelState = {}

    def read(self, path: str | None = None) -> SavedRun | None:
        """Read the file if it exists.

        Args:
            path: another file than the one that is written.

        Raises:
            DataError: If the file is no checkpoint, or damaged.
        """
        if not os.path.lexists(path or self.path):
            return None
        with _opened(path or self.path) as (saved, content):
            self._arrays = {
                group: [_decoded(content[f"{group}{number}"], *kind) for number, kind in enumerate(some)]
                for group, some in saved.variables.items()
            }
        self.saved = saved
        return saved

    def points(self) -> dict[int, str]:
        """Return the files that training can resume from by their order, the latest last."""
        found = {}
        for path in (self.path, self.path + BEFORE):
            if os.path.lexists(path):
                with _opened(path) as (saved, _):
                    found[saved.run.order] = path
        return dict(sorted(found.items()))

    def go_to(self, run: RunState) -> None:
        """Move the data to the saved position.

        Raises:
            DataError: If the position makes no sense.
            UsageError: If the data is other than before.
        """
        assert self.saved is not None
        try:
            self.source.go_to(self.saved.position, run)
        except KerasmemError:
            raise
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{shown(self.path)}: its position in the data makes no sense ({one_line(str(error), 100)}); {_DELETE}"
            ) from error

    def check(self, *, steps: int | None, at_once: int) -> None:
        """Refuse to resume with other data or settings than before.

        Args:
            steps: batches of an epoch now; None if unknown.
            at_once: steps in one execution.

        Raises:
            UsageError: If they differ; the message names the setting.
        """
        assert self.saved is not None
        saved, run, path = self.saved, self.saved.run, shown(self.path)
        differences = [("x", f"data of the kind {saved.data}", f"data of the kind {self.source.kind}")]
        if saved.data == self.source.kind:
            now = self.source.describe()
            differences = [(name, repr(saved.agrees.get(name)), repr(value)) for name, value in now.items()]
        if run.batch:
            differences.append(("steps_per_epoch", f"{run.steps} batches", f"{steps} batches"))
        for name, before, after in differences:
            if before != after:
                raise UsageError(f"checkpoint: {name} was {before} in the run of {path} and is {after} now; {_DELETE}")
        if run.steps is not None and run.batch >= run.steps + at_once:
            raise DataError(f"{path}: batch {run.batch:,} of an epoch of {run.steps:,} makes no sense; {_DELETE}")
        if run.batch % at_once:
            raise UsageError(
                f"steps_per_execution: {path} was saved after {run.batch} batches of an epoch, no multiple of {at_once}"
            )

    def restored(self, model: Any, groups: Sequence[str] = GROUPS) -> ModelState:
        """Return the saved arrays for the variables of a model.

        Metrics begin with the epoch, and other ones are no reason not to go on: theirs are then the model's own.

        Raises:
            UsageError: the model is another; the message names the first variable that differs.
        """
        assert self.saved is not None
        own, state = variables(model), dict(self._arrays)
        for group in groups:
            here, saved = describe(own[group]), self.saved.variables.get(group, [])
            if group == "metrics" and (self.saved.run.batch == 0 or here != saved):
                state[group] = [as_array(variable) for variable in own[group]]
            elif here != saved:
                raise UsageError(_difference(self.path, group, own[group], here, saved))
        return state

    def write(self, run: RunState, state: ModelState) -> None:
        """Write the position and the state."""
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
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        before = self.path + BEFORE if self._keeps_before else None
        with replacing(self.path, durable=True, before=before) as file:
            np.savez(file, **content)  # type: ignore[arg-type]
        run.unsaved = 0

    def remove(self) -> None:
        """Remove the files."""
        for path in (self.path, self.path + BEFORE):
            if os.path.lexists(path):
                os.unlink(path)


@contextmanager
def _opened(path: str) -> Iterator[tuple[SavedRun, Mapping[str, np.ndarray]]]:
    try:
        with open(open_plain(path), "rb") as file, open_archive(file) as content:
            saved = SavedRun.from_dict(read_json(content["saved"].tobytes()))
            _refuse_absurd(saved.run)
            yield saved, content
    except InputError as error:
        raise DataError(f"{shown(path)}: {error}; {_DELETE}") from error
    except Exception as error:  # NumPy, zipfile and Python's parser raise many kinds for damaged files
        reason = one_line(str(error), 100)
        raise DataError(f"{shown(path)}: no checkpoint of kerasmem, or a damaged one ({reason}); {_DELETE}") from error


def _refuse_absurd(run: RunState) -> None:
    """Refuse counts that no run has: loops are as long as they say."""
    counts = {"epoch": run.epoch, "batch": run.batch, "steps": run.steps, "micro_batch_rows": run.micro_batch_rows}
    for name, count in counts.items():
        if count is not None and not 0 <= count < _MOST:
            raise ValueError(f"its {name} is {count}")
    if len(set(run.epochs)) != len(run.epochs) or any(not 0 <= epoch <= run.epoch for epoch in run.epochs):
        raise ValueError("its epochs make no sense")


def _decoded(data: np.ndarray, name: str, shape: list[int]) -> np.ndarray:
    import ml_dtypes  # noqa: F401 - Keras's; with it NumPy knows bfloat16

    return np.frombuffer(data.tobytes(), np.dtype(name)).reshape([int(extent) for extent in shape])


def _difference(path: str, group: str, own: list[Any], here: list[Any], saved: list[Any]) -> str:
    what = f"{len(saved)} variables and the one given has {len(here)}"
    for variable, now, before in zip(own, here, saved, strict=False):
        if now != before:
            given = f"{shown(variable.path)}, {now[0]} {tuple(now[1])}"
            what = f"{before[0]} {tuple(before[1])} where the one given has {given}"
            break
    return f"model: the {group} saved in {shown(path)} has {what}; build the model as before, or {_DELETE}"


class SavingCallback(keras.callbacks.Callback):
    """Keeps a run's state up to date, and saves it every few batches and at each epoch's end.

    Args:
        run: the state.
        source: the data; None if nothing is saved.
        save_freq: batches from one saving to the next.
    """

    def __init__(self, run: RunState, source: Source | None, save_freq: int) -> None:
        super().__init__()
        self.run, self.source, self.save_freq = run, source, save_freq

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Note how many batches an epoch has."""
        self.run.steps = (self.params or {}).get("steps")

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count the epoch's batches from 0."""
        self.run.begin_epoch(epoch)
        if self.source is not None:
            self.source.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save, if it is time."""
        if self.run.count(batch + 1) and self.run.unsaved >= self.save_freq and self.can_save():
            self.run.keep_logs(logs)
            self.save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save the start of the next epoch."""
        if self.source is not None:
            self.source.end_epoch(self.run)
        self.run.end_epoch(logs)
        self.save()

    def can_save(self) -> bool:
        """Return whether a run can be resumed here."""
        return True

    def save(self) -> None:
        """Write the position of the run."""
        raise NotImplementedError
