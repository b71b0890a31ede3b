"""A batch as a training step takes it: its rows, its shapes, a part of it, a copy of it on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def map_arrays(function: Callable[[Any], Any], nested: Any) -> Any:
    """Apply a function to each array of a structure but None."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), nested)


def without_optionals(batch: Any) -> Any:
    """Return a batch with None if Keras's pipeline carries an empty optional."""
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)


def has_any_rows(iterator: Any) -> bool:
    """Return whether an iterator of TensorFlow's leaves open how many rows its batches have."""
    specs = keras.tree.flatten(getattr(iterator, "element_spec", None))
    return any(isinstance(each, tf.TensorSpec) and each.shape.rank and each.shape[0] is None for each in specs)


def _arrays(batch: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]


def row_count(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first array."""
    return int(_arrays(batch)[0].shape[0])


def byte_count(batch: Any) -> int:
    """Return the bytes of the arrays; sparse and ragged ones count as their values."""
    values = (getattr(leaf, "flat_values", getattr(leaf, "values", leaf)) for leaf in _arrays(batch))
    return sum(int(getattr(value, "nbytes", 0)) for value in values)


def part(batch: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` to `stop`. Dense ones are views on the host."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            begin = tf.concat([[tf.constant(start, tf.int64)], tf.zeros_like(rest)], 0)
            return tf.sparse.slice(leaf, begin, tf.concat([[tf.constant(stop - start, tf.int64)], rest], 0))
        return leaf[start:stop]

    with tf.device("CPU:0"):
        return map_arrays(cut, batch)


def on_host(batch: Any) -> Any:
    """Return a copy as NumPy arrays, outside of TensorFlow's allocators."""
    return keras.tree.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, batch)
