"""The state of a run: its position in Keras's epochs, and everything that a training step changes, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.compat.keras_state import global_seed_state
from kerasmem.models.own_step import optimizer_variables
from kerasmem.records import Record


@dataclass
class RunState(Record, what="run"):
    """The position of a run.

    Attributes:
        epoch: Keras's epoch, from 0.
        batch: batches of it that were trained on.
        steps: batches that it has; None if Keras does not know.
        logs: the numbers that Keras told its callbacks after the last batch.
        history: logs of the epochs that are over, by name.
        epochs: the numbers of those epochs.
        micro_batch_rows: rows of a micro-batch; None for whole batches.
        skipped: batches of the epoch that an earlier process trained on, and that Keras counts once more.
        unsaved: batches trained on since the last saving.
    """

    epoch: int = 0
    batch: int = 0
    steps: int | None = None
    logs: dict[str, float] = field(default_factory=dict)
    history: dict[str, list[Any]] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    micro_batch_rows: int | None = None
    skipped: int = field(default=0, init=False)
    unsaved: int = field(default=0, init=False)

    @property
    def order(self) -> int:
        """A number above 0, the larger the later in training."""
        return (self.epoch << 32) + self.batch + 1

    @property
    def trained(self) -> int:
        """Batches of the epoch that this process has trained on."""
        return max(self.batch - self.skipped, 0)

    def resume(self) -> None:
        """Note that another process resumes here."""
        self.skipped = self.batch

    def begin_epoch(self, epoch: int) -> None:
        """Note that Keras begins an epoch."""
        self.epoch, self.batch = epoch, 0

    def count(self, batch: int) -> bool:
        """Count the batches of the epoch, and return whether this process trained on the last."""
        before, self.batch = max(self.batch, self.skipped), batch
        self.unsaved += max(batch - before, 0)
        return batch > self.skipped

    def keep_logs(self, logs: Mapping[str, Any] | None) -> None:
        """Keep Keras's logs of the last batch. This waits for the values."""
        self.logs = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}

    def end_epoch(self, logs: Mapping[str, Any] | None) -> None:
        """Note the end of the epoch, with Keras's logs."""
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(plain(value))
        self.epochs.append(self.epoch)
        self.epoch, self.batch, self.skipped, self.logs = self.epoch + 1, 0, 0, {}


def plain(value: Any) -> Any:
    """Return a number, or lists of them, as JSON has it."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array.tolist()


# group -> arrays, in the order of the variables; "random" is Keras's generator for those who name none.
ModelState = dict[str, list[np.ndarray]]
WEIGHTS = ("model", "optimizer")
GROUPS = (*WEIGHTS, "metrics")
_ALIGNMENT = 64  # bytes: what TensorFlow's kernels expect
_SMALL = 4096  # bytes, for which there is always a place


def variables(model: Any) -> dict[str, list[Any]]:
    """Return the variables that a step may change, by group."""
    seed = global_seed_state()
    return {
        "model": list(model.variables),
        "optimizer": optimizer_variables(model),
        "metrics": list(model.metrics_variables),
        "random": [] if seed is None else [seed],
    }


def read_state(model: Any) -> ModelState:
    """Return a copy of everything a step may change."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # within `fit` on JAX variables have no value of their own
    return {group: [as_array(variable) for variable in some] for group, some in variables(model).items()}


def load_state(model: Any, state: ModelState, groups: Sequence[str] = (*GROUPS, "random")) -> None:
    """Assign a state from `read_state`."""
    for group, some in variables(model).items():
        arrays = state.get(group, [])
        if group not in groups or (group == "random" and len(arrays) != len(some)):
            continue
        for variable, array in zip(some, arrays, strict=True):
            _assign(variable, array)


def _assign(variable: Any, array: np.ndarray) -> None:
    """Write an array into a variable, on the host without memory of the allocator's.

    `assign` has TensorFlow copy the array into the memory of its CPU allocator first. If that has no room left, as
    after a step that ran out, it waits ten seconds and ends the process.
    """
    if array.nbytes < _SMALL or array.dtype.kind != "f" or not isinstance(variable.value, tf.Variable):
        variable.assign(array)
        return
    variable.value[...].assign(lend([array]))  # into its own buffer; a plain `assign` would take NumPy's in its place


def lend(arrays: Sequence[np.ndarray]) -> Any:
    """Return arrays one after another as a tensor on the host that takes nothing of TensorFlow's allocator.

    Args:
        arrays: of one type of NumPy's own; they differ in their first dimension at most.
    """
    room = np.empty(sum(each.nbytes for each in arrays) + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    placed = room[begin : begin + room.nbytes - _ALIGNMENT].view(arrays[0].dtype).reshape(shape)
    np.concatenate(arrays, out=placed)
    return tf.experimental.dlpack.from_dlpack(placed.__dlpack__())


def describe(arrays: list[Any]) -> list[list[Any]]:
    """Return type and shape of arrays or variables, ready for JSON."""
    return [[keras.backend.standardize_dtype(each.dtype), [int(size) for size in each.shape]] for each in arrays]


def as_array(variable: Any) -> np.ndarray:
    """Return a variable's value as an array of its own."""
    value = getattr(variable, "value", variable)
    return np.asarray(value.numpy()) if hasattr(value, "numpy") else np.array(value)  # JAX gives a view of its own
