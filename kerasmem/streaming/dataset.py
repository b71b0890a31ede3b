"""Batches of a sequence as a `tf.data.Dataset`. TensorFlow is imported when one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kerasmem.streaming.ahead import Batch
from kerasmem.streaming.plan import StreamPlan, build_batch


def make_dataset(epoch: Callable[[], Iterator[Batch]], signature: Batch, *, batches: int | None, prefetch: int) -> Any:
    """Return a data set that delivers the batches of `epoch()` in every iteration.

    Args:
        epoch: called at the start of each iteration.
        signature: a `tf.TensorSpec` for each array of a batch, in the batch's structure.
        batches: batches of each iteration; -1 for no end, None if it is not known.
        prefetch: batches made ahead.
    """
    import tensorflow as tf

    data = tf.data.Dataset.from_generator(lambda: map(_without_lists, epoch()), output_signature=signature)
    if batches is not None:
        data = data.apply(tf.data.experimental.assert_cardinality(batches))  # -1: TensorFlow's INFINITE_CARDINALITY
    options = tf.data.Options()
    # Which rows are whose is said with `shard`; TensorFlow would leave out batches on top.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.prefetch(prefetch).with_options(options)


def plan_signature(plan: StreamPlan) -> Batch:
    """Return the signature of batches as they are read."""
    import tensorflow as tf

    rows = plan.batch_rows if plan.all_full else None
    weights = (tf.TensorSpec((rows,), tf.float32),) if plan.adds_weights else ()
    specs = [tf.TensorSpec((rows, *column.row_shape), tf.as_dtype(column.dtype)) for column in plan.columns]
    return (*build_batch(plan.parts, plan.uses, specs), *weights)


def batches_signature(batches: Sequence[Batch]) -> Batch:
    """Return a signature that fits all `batches`. Lengths that differ, and the number of rows, stay open."""
    import tensorflow as tf

    def spec(*arrays: Any) -> Any:
        tensors = [tf.convert_to_tensor(array) for array in arrays]
        lengths = np.array([tensor.shape for tensor in tensors])
        shape = [int(some[0]) if (some == some[0]).all() else None for some in lengths.T]
        return tf.TensorSpec([None, *shape[1:]] if shape else [], tensors[0].dtype)

    return tf.nest.map_structure(spec, *map(_without_lists, batches))


def _without_lists(value: Any) -> Any:
    """Return a batch with its lists as tuples: tf.data takes a list for an array."""
    if isinstance(value, (list, tuple)):
        return tuple(_without_lists(entry) for entry in value)
    if isinstance(value, dict):
        return {key: _without_lists(entry) for key, entry in value.items()}
    return value
