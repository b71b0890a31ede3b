"""Functions of a batch: its rows and bytes, a part of it, a copy on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def map_arrays(function: Callable[[Any], Any], nested: Any) -> Any:
    """Apply a function to each array of a structure, except None."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), nested)


def without_optionals(batch: Any) -> Any:
    """Replace the empty optionals of Keras's pipeline by None."""
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)


def has_any_rows(iterator: Any) -> bool:
    """Return whether the number of rows is open in the specs of a TensorFlow iterator."""
    specs = keras.tree.flatten(getattr(iterator, "element_spec", None))
    return any(isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None for spec in specs)


def _arrays(batch: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]


def row_count(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first array."""
    return int(_arrays(batch)[0].shape[0])


def byte_count(batch: Any) -> int:
    """Return the bytes of the arrays, counting only the values of sparse and ragged ones."""
    values = (getattr(leaf, "flat_values", getattr(leaf, "values", leaf)) for leaf in _arrays(batch))
    return sum(int(getattr(value, "nbytes", 0)) for value in values)


def part(batch: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` to `stop`. Dense ones are views on the host."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            row_shape = leaf.dense_shape[1:]
            begin = tf.concat([[tf.constant(start, tf.int64)], tf.zeros_like(row_shape)], 0)
            return tf.sparse.slice(leaf, begin, tf.concat([[tf.constant(stop - start, tf.int64)], row_shape], 0))
        return leaf[start:stop]

    with tf.device("CPU:0"):
        return map_arrays(cut, batch)


def on_host(batch: Any) -> Any:
    """Return a copy as NumPy arrays, outside of TensorFlow's allocators."""
    return keras.tree.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, batch)
