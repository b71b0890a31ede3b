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


def replica_parts(leaf: Any) -> tuple[Any, ...]:
    """Return the parts of an array on the replicas of a strategy, or the array itself."""
    return tuple(leaf.values) if isinstance(leaf, tf.distribute.DistributedValues) else (leaf,)


def first_replica(batch: Any) -> Any:
    """Return the part of a batch for a strategy's first replica."""
    return map_arrays(lambda leaf: replica_parts(leaf)[0], batch)


def has_any_rows(iterator: Any) -> bool:
    """Return whether an iterator of TensorFlow's leaves open how many rows its batches have."""
    specs = keras.tree.flatten(getattr(iterator, "element_spec", None))
    return any(isinstance(each, tf.TensorSpec) and each.shape.rank and each.shape[0] is None for each in specs)


def row_count(batch: Any) -> int:
    """Return the number of samples: the first dimension of the first array there is."""
    arrays = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return sum(int(each.shape[0]) for each in replica_parts(arrays[0]))


def signature(batch: Any) -> tuple[Any, ...]:
    """Return shapes and types, which decide how much memory a step takes."""
    leaves = (each for leaf in keras.tree.flatten(batch) if leaf is not None for each in replica_parts(leaf))
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def byte_count(batch: Any) -> int:
    """Return the bytes of the arrays; sparse and ragged ones count as their values."""
    total = 0
    for leaf in (part for each in keras.tree.flatten(batch) for part in replica_parts(each)):
        values = getattr(leaf, "flat_values", getattr(leaf, "values", leaf))
        total += int(getattr(values, "nbytes", 0)) if leaf is not None else 0
    return total


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
