"""All that a training step changes, as NumPy arrays, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmem.compat.keras_state import global_seed_state
from kerasmem.models.own_step import optimizer_variables

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
