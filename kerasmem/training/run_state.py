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
        batch: batches of the epoch that were trained on.
        steps: batches of an epoch; None if Keras does not know.
        logs: Keras's logs of the last batch.
        history: logs of the finished epochs, by name.
        epochs: numbers of the finished epochs.
        micro_batch_rows: rows of a micro-batch; None for whole batches.
        skipped: batches of the epoch that an earlier process trained on.
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
        """A number above 0 that grows in training."""
        return (self.epoch << 32) + self.batch + 1

    @property
    def trained(self) -> int:
        """Batches of the epoch that this process has trained on."""
        return max(self.batch - self.skipped, 0)

    def resume(self) -> None:
        """Mark the batches so far as those of an earlier process."""
        self.skipped = self.batch

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch of Keras."""
        self.epoch, self.batch = epoch, 0

    def count(self, batch: int) -> None:
        """Note the batches of the epoch that were trained on."""
        self.unsaved += max(batch - max(self.batch, self.skipped), 0)
        self.batch = batch

    def keep_logs(self, logs: Mapping[str, Any] | None) -> None:
        """Keep Keras's logs of the last batch, after waiting for the values."""
        self.logs = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}

    def end_epoch(self, logs: Mapping[str, Any] | None) -> None:
        """End the epoch, with Keras's logs."""
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(plain(value))
        self.epochs.append(self.epoch)
        self.epoch, self.batch, self.skipped, self.logs = self.epoch + 1, 0, 0, {}


def plain(value: Any) -> Any:
    """Return a number or array as a JSON value."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array.tolist()


# group -> arrays, in the order of the variables; "random" is Keras's global seed generator.
ModelState = dict[str, list[np.ndarray]]
WEIGHTS = ("model", "optimizer")
GROUPS = (*WEIGHTS, "metrics")
_ALIGNMENT = 64  # bytes, expected by TensorFlow's kernels
_SMALL = 4096  # bytes, which an allocator always has


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
    """Return a copy of the variables that a step may change."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # on JAX `fit` holds the values, not the variables
    return {group: [as_array(variable) for variable in members] for group, members in variables(model).items()}


def load_state(model: Any, state: ModelState, groups: Sequence[str] = (*GROUPS, "random")) -> None:
    """Assign a state from `read_state`."""
    for group, members in variables(model).items():
        arrays = state.get(group, [])
        if group not in groups or (group == "random" and len(arrays) != len(members)):
            continue
        for variable, array in zip(members, arrays, strict=True):
            _assign(variable, array)


def _assign(variable: Any, array: np.ndarray) -> None:
    """Write an array into a variable without allocating from TensorFlow's CPU allocator.

    `assign` first copies the array into memory of that allocator. If the allocator is full, as after a step that ran
    out of memory, it waits ten seconds and ends the process.
    """
    if array.nbytes < _SMALL or array.dtype.kind != "f" or not isinstance(variable.value, tf.Variable):
        variable.assign(array)
        return
    variable.value[...].assign(lend([array]))  # copies into the buffer; a plain `assign` would adopt NumPy's


def lend(arrays: Sequence[np.ndarray]) -> Any:
    """Return the concatenation of arrays as a host tensor outside of TensorFlow's allocator.

    Args:
        arrays: arrays of one NumPy type; shapes may differ in the first dimension.
    """
    buffer = np.empty(sum(array.nbytes for array in arrays) + _ALIGNMENT, np.uint8)
    begin = -buffer.ctypes.data % _ALIGNMENT
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    joined = buffer[begin : begin + buffer.nbytes - _ALIGNMENT].view(arrays[0].dtype).reshape(shape)
    np.concatenate(arrays, out=joined)
    return tf.experimental.dlpack.from_dlpack(joined.__dlpack__())


def describe(arrays: list[Any]) -> list[list[Any]]:
    """Return type and shape of arrays or variables as JSON values."""
    return [[keras.backend.standardize_dtype(array.dtype), [int(size) for size in array.shape]] for array in arrays]


def as_array(variable: Any) -> np.ndarray:
    """Return a copy of a variable's value."""
    value = getattr(variable, "value", variable)
    return np.asarray(value.numpy()) if hasattr(value, "numpy") else np.array(value)  # JAX returns a view
