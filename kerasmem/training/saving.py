"""The checkpoint of a run: the file of `ResumeTraining`, with the run's data, history and micro-batches beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.training.resume import SavedPoint, read_point, write_point
from kerasmem.training.sources import Source
from kerasmem.training.steps.state import GROUPS, State, as_array, describe, variables


class Checkpoint:
    """Where a run stands, on disk.

    Args:
        path: of the file.
        every: batches from one writing to the next; each epoch's end is written too.
        source: the run's data.
    """

    def __init__(self, path: str, every: int, source: Source) -> None:
        self.path, self.every, self.source = path, every, source
        self.point: SavedPoint | None = None
        self.arrays: State = {}
        if os.path.exists(path):
            self.point, self.arrays = self._read()

    @property
    def more(self) -> dict[str, Any]:
        """What else was saved: `history`, `epochs`, `size`, `done`."""
        return {} if self.point is None else self.point.more

    def check(self, *, steps: int | None, at_once: int) -> None:
        """Refuse to go on with other data or settings than before.

        Raises:
            UsageError: the message names what differs.
        """
        point, kind = self.point, self.source.kind
        if point is None:
            return
        if point.sequence["kind"] != kind:
            raise UsageError(f"checkpoint: {self.path} is of a run on {point.sequence['kind']}, and x is now {kind}")
        for name, now in self.source.describe().items():
            before = point.sequence["agrees"].get(name)
            if before != now:
                raise UsageError(
                    f"checkpoint: {name} was {before!r} in the run that {self.path} was saved in and is {now!r} now; "
                    "give fit the data and settings of that run, or delete the file to start over"
                )
        if point.batch and point.steps != steps:
            raise UsageError(
                f"steps_per_epoch: {self.path} was saved within an epoch of {point.steps} batches, and fit now has "
                f"{steps}; give fit the same data and steps_per_epoch, or delete the file to start over"
            )
        if point.batch % at_once:
            raise UsageError(
                f"steps_per_execution: {self.path} was saved after {point.batch} batches of an epoch, and fit now "
                f"takes {at_once} at a time; compile with the same steps_per_execution"
            )

    def restored(self, model: Any, *, groups: tuple[str, ...] = GROUPS) -> State:
        """Return what was saved as arrays for a model's variables.

        Raises:
            UsageError: the model is another; the message names the first variable that differs.
        """
        assert self.point is not None
        own = variables(model)
        for group in groups:
            here, saved = describe(own[group]), self.point.variables.get(group)
            if group == "metrics" and (self.point.batch == 0 or here != saved):
                continue  # begun anew with the epoch, and other ones are no reason not to go on
            if here != saved:
                raise UsageError(_difference(self.path, group, own[group], here, saved or []))
        state = {group: self.arrays.get(group, []) for group in (*groups, "random")}
        if self.point.batch == 0 or describe(own["metrics"]) != self.point.variables.get("metrics"):
            state["metrics"] = [as_array(variable) for variable in own["metrics"]]
        return state

    def write(
        self, state: State, *, epoch: int, done: int, steps: int | None, logs: Mapping[str, Any], more: dict[str, Any]
    ) -> None:
        """Write where training stands, by way of another name."""
        point = SavedPoint(
            epoch=epoch,
            batch=done,
            steps=steps,
            sequence={
                "kind": self.source.kind,
                "agrees": self.source.describe(),
                "at": self.source.position(epoch, done, steps),
            },
            logs={name: float(value) for name, value in logs.items() if np.ndim(value) == 0},
            variables={group: describe(some) for group, some in state.items()},
            more=more,
        )
        write_point(self.path, point, state)

    def remove(self) -> None:
        """Remove the file, if there is one."""
        if os.path.exists(self.path):
            os.unlink(self.path)

    def _read(self) -> tuple[SavedPoint, State]:
        point, raw = read_point(self.path)
        try:
            for name in ("epoch", "batch"):
                value = getattr(point, name)
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ValueError(f"{name} {value!r}")
            if not isinstance(point.sequence["agrees"], dict) or not isinstance(point.sequence["at"], dict):
                raise ValueError("sequence")
            if not isinstance(point.more, dict) or not isinstance(point.logs, dict):
                raise ValueError("more")
            state = {
                group: [_decoded(data, *kind) for data, kind in zip(raw[group], some, strict=True)]
                for group, some in point.variables.items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"checkpoint: {self.path} is not a file that kerasmem.fit saved, or a damaged one ({error}); delete it "
                "to start over"
            ) from error
        return point, state


def _decoded(data: np.ndarray, name: str, shape: list[int]) -> np.ndarray:
    import tensorflow as tf

    kind = tf.as_dtype("bool" if name == "bool" else name).as_numpy_dtype
    return np.frombuffer(data.tobytes(), kind).reshape(shape)


def _difference(path: str, group: str, own: list[Any], here: list[Any], saved: list[Any]) -> str:
    what = f"{len(saved)} variables and the one given has {len(here)}"
    for variable, now, before in zip(own, here, saved, strict=False):
        if now != before:
            what = f"{before[0]} {tuple(before[1])} where the one given has {variable.path}, {now[0]} {tuple(now[1])}"
            break
    return (
        f"model: the {group} saved in {path} has {what}; build and compile the model as before, or delete the file to "
        "start over"
    )
