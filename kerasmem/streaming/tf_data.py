"""Batches of a sequence as a `tf.data.Dataset`, also for the workers of a `tf.distribute` strategy.

TensorFlow is imported when a data set is made.

Keras hands a `PyDataset` to `strategy.experimental_distribute_dataset`, which takes every worker's data for the same
and its batches for those of all workers together: it cuts each batch into one piece a replica, and leaves a worker
its own pieces. Of a sequence whose rows are already a worker's share, all but one piece in `count` would be lost.
So the data set that Keras asks for is given in the form in which batches are per worker.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kerasmem.cluster import worker_of
from kerasmem.compat.keras_reading import Call
from kerasmem.errors import UsageError
from kerasmem.streaming.stream_plan import StreamPlan, build_batch
from kerasmem.streaming.workers import Batch

_SCOPE = "make the sequence with shard='auto' in the strategy's scope"


def check_devices(plan: StreamPlan) -> None:
    """Refuse batches that `keras.distribution` on JAX cannot lay out over its devices, before it fails on the last one.

    Raises:
        UsageError: If a batch cannot be shared out evenly.
    """
    keras = sys.modules.get("keras")
    if keras is None or keras.backend.backend() != "jax":
        return
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.batch_dim_name is None:
        return
    settings = plan.settings
    mesh, processes = distribution.device_mesh, distribution.num_processes
    replicas = mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)]
    count = min(processes, replicas)
    if count > 1 and settings.shard[1] == 1:
        warnings.warn(
            f"H5ChunkSequence: without shard all {count:,} processes deliver the same rows, unless their files differ; "
            "make the sequence with shard='auto' after the distribution is set",
            stacklevel=3,
        )
    here = max(1, replicas // processes)
    rows = settings.batch_size
    even = settings.remainder != "keep"
    last = plan.num_rows - (plan.num_batches - 1) * rows
    full = even or plan.share.rows % (settings.batch_size * settings.shard[1]) == 0
    if rows % here or (not even and last % here) or (processes > 1 and not full):
        raise UsageError(
            f"batch_size: JAX lays out every batch evenly over {here:,} devices of each of {processes:,} processes, "
            f"which batches of {rows:,} with a last one of other size do not allow; take a multiple of "
            f"{here:,}, and remainder='drop' or remainder='pad'"
        )


def for_strategy(
    plan: StreamPlan, call: Call, data: Any, look: Callable[[], Iterator[Any]], looking: Callable[[], bool]
) -> Any:
    """Return a sequence's `tf.data.Dataset` as Keras has to be given it under a strategy.

    Args:
        plan: whose batches they are.
        call: what reads them.
        data: the data set that Keras made of it.
        look: yields batches to look at, and reads none ahead.
        looking: whether Keras only looks.

    Returns:
        `data` itself if there is one worker, also with several devices: there Keras shares out each batch among
        them, and loses nothing. Else a `tf.distribute.DistributedDataset`.

    Raises:
        UsageError: If the workers would read other rows than they should.
    """
    import tensorflow as tf

    strategy: Any = getattr(call.model, "distribute_strategy", None)
    if strategy is None and tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    worker = worker_of(strategy)
    if worker.size == 1:
        return data
    if call.model is not None:
        make_logs_reducible(call.model)
    if plan.settings.shard[1] == 1:
        _check_whole_rows(plan, worker.size)
        return looked_at(look, looking, strategy.experimental_distribute_dataset(data))
    if tuple(plan.settings.shard) != worker:
        index, count = plan.settings.shard
        raise UsageError(
            f"shard: this sequence has part {index} of {count:,}, but the process is worker {worker.rank} of "
            f"{worker.size:,}; {_SCOPE}"
        )
    if call.name == "predict":
        raise UsageError(
            "shard: predict puts the results of all workers together batch by batch, which is no order of the file's "
            "rows when each worker has its own; give predict a sequence without shard, with shuffle=False"
        )
    replicas = strategy.num_replicas_in_sync // worker.size
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    mine = (data if replicas == 1 else share_batches(data, replicas)).with_options(options)
    return looked_at(look, looking, strategy.distribute_datasets_from_function(lambda context: mine))


def _check_whole_rows(plan: StreamPlan, workers: int) -> None:
    if plan.settings.shuffle and plan.settings.seed_drawn:
        raise UsageError(
            f"seed: None draws another seed in each of the {workers:,} workers, whose batches are pieces of the same "
            "ones; give a number"
        )
    warnings.warn(
        f"H5ChunkSequence: without shard every one of the {workers:,} workers reads all rows of its file and drops "
        f"what is not its part of each batch; {_SCOPE}, then batch_size is each worker's. Where each worker has a "
        "file of its own, give all of them the list of all files",
        stacklevel=2,
    )


def share_batches(data: Any, replicas: int) -> Any:
    """Return a `tf.data.Dataset` with each batch in so many pieces, of equal numbers of rows, give or take one."""
    import tensorflow as tf

    def pieces(*batch: Any) -> Any:
        rows = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]

        def piece(number: Any) -> Any:
            start, stop = rows * number // replicas, rows * (number + 1) // replicas
            return tf.nest.map_structure(lambda values: values[start:stop], batch)

        return tf.data.Dataset.range(replicas).map(piece)

    return data.flat_map(pieces)


def looked_at(look: Callable[[], Iterator[Any]], looking: Callable[[], bool], distributed: Any) -> Any:
    """Return a distributed data set that Keras may look at before training.

    To build a model Keras (3.15) looks at one batch, and averages it over the replicas with `strategy.reduce`. With
    more than one worker that fails for whatever data (keras#20585). A batch that is not distributed it takes as it is.

    Args:
        look: yields the batch to look at.
        looking: whether Keras only looks.
        distributed: yields those to train on.
    """
    import tensorflow as tf

    class LookedAt(tf.distribute.DistributedDataset):
        """The batches of `distributed`, except for the look."""

        @property
        def element_spec(self) -> Any:
            return distributed.element_spec

        def __iter__(self) -> Iterator[Any]:
            return look() if looking() else iter(distributed)

        def reduce(self, initial_state: Any, reduce_func: Any) -> Any:
            return distributed.reduce(initial_state, reduce_func)

    return LookedAt()


def make_logs_reducible(model: Any) -> None:
    """Have a model's steps return their scalars as vectors of one element.

    Keras (3.15) averages over workers what a step returns along its first axis, which a scalar has not: `fit` then
    fails with "Invalid reduction dimension 0", whatever the data (keras#20585). The average of a vector of one is the
    same number.

    Args:
        model: its `train_step` and `test_step` are wrapped, once; nothing of that is saved with it.
    """
    import tensorflow as tf

    def as_vector(value: Any) -> Any:
        return tf.reshape(value, [1]) if len(getattr(value, "shape", (None,))) == 0 else value

    for name in ("train_step", "test_step"):
        step = getattr(model, name, None)
        if step is None or hasattr(step, "kerasmem_step"):
            continue

        def vectors(*given: Any, _step: Any = step) -> Any:
            return tf.nest.map_structure(as_vector, _step(*given))

        vectors.kerasmem_step = step  # type: ignore[attr-defined]
        setattr(model, name, vectors)


# ---- data sets


def make_dataset(stream: Any, *, endless: bool, prefetch: int) -> Any:
    """Return a data set that delivers the next epoch of a `Stream` in every iteration.

    Args:
        stream: the stream.
        endless: whether an iteration goes on from epoch to epoch.
        prefetch: batches made ahead.
    """
    import tensorflow as tf

    plan = stream.stream_plan
    if plan.settings.transform is None:
        signature = plan_signature(plan)
    else:
        signature = batches_signature([stream.batch(place) for place in sorted({0, plan.num_batches - 1})])

    def batches() -> Iterator[Batch]:
        for _ in itertools.count() if endless else range(1):
            yield from map(_without_lists, stream.next_epoch())

    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    # Under tf.distribute a worker's share comes in smaller and more batches: Keras must not stop at this number.
    if endless or (stream.progress.position.batch == 0 and plan.settings.shard[1] == 1):
        number = tf.data.INFINITE_CARDINALITY if endless else plan.num_batches
        data = data.apply(tf.data.experimental.assert_cardinality(number))
    options = tf.data.Options()
    # Which rows are whose is said with `shard`; TensorFlow would leave out batches on top.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.prefetch(prefetch).with_options(options)


def plan_signature(plan: StreamPlan) -> Batch:
    """Return the signature of batches as they are read."""
    import tensorflow as tf

    rows = plan.settings.batch_size if plan.all_full else None
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
