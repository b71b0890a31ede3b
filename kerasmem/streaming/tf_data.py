"""Batches of a sequence as a `tf.data.Dataset`, also for the workers of a `tf.distribute` strategy.

Keras passes a `PyDataset` to `strategy.experimental_distribute_dataset`, which assumes that all workers have the same
data. It splits each batch into one piece per replica, and each worker keeps only its own pieces. If the rows of a
sequence are already a worker's shard, the other pieces would be lost. So Keras gets a data set with per-worker batches.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kerasmem.cluster import worker_of
from kerasmem.compat.keras_reading import Call
from kerasmem.errors import UsageError, warn_user
from kerasmem.streaming.stream_plan import StreamPlan, build_batch
from kerasmem.streaming.workers import Batch

_SCOPE = "create the sequence with shard='auto' in the strategy's scope"


def check_devices(plan: StreamPlan) -> None:
    """Check that `keras.distribution` on JAX can split every batch evenly among its devices.

    Raises:
        UsageError: If it cannot. JAX would fail at the last batch.
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
        warn_user(
            f"H5ChunkSequence: without shard all {count:,} processes deliver the same rows unless their files differ; "
            "create the sequence with shard='auto' after the distribution is set"
        )
    devices = max(1, replicas // processes)
    rows = settings.batch_size
    even = settings.remainder != "keep"
    last = plan.num_rows - (plan.num_batches - 1) * rows
    full = even or plan.share.rows % (settings.batch_size * settings.shard[1]) == 0
    if rows % devices or (not even and last % devices) or (processes > 1 and not full):
        raise UsageError(
            f"batch_size: JAX splits every batch evenly among {devices:,} devices of each of {processes:,} processes; "
            f"got batches of {rows:,} with a smaller last one. Use a multiple of {devices:,}, and remainder='drop' or "
            "remainder='pad'"
        )


def for_strategy(
    plan: StreamPlan, call: Call, data: Any, peek: Callable[[], Iterator[Any]], is_peeking: Callable[[], bool]
) -> Any:
    """Return a sequence's `tf.data.Dataset` in the form that Keras needs under a strategy.

    Args:
        plan: plan of the sequence.
        call: the call that reads it.
        data: the data set that Keras created.
        peek: yields batches to peek at, without reading ahead.
        is_peeking: returns whether Keras only peeks.

    Returns:
        `data` itself if there is one worker, because Keras then splits each batch among its devices without losing
        rows. Else a `tf.distribute.DistributedDataset`.

    Raises:
        UsageError: If the workers would read the wrong rows.
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
        return make_peekable(peek, is_peeking, strategy.experimental_distribute_dataset(data))
    if tuple(plan.settings.shard) != worker:
        index, count = plan.settings.shard
        raise UsageError(
            f"shard must be {tuple(worker)} in this process, the strategy's worker and number of workers; got "
            f"{(index, count)}. {_SCOPE.capitalize()}"
        )
    if call.name == "predict":
        raise UsageError(
            "shard: predict joins the results of all workers batch by batch, so sharded rows would not be in the "
            "file's order. Pass predict a sequence without shard, with shuffle=False"
        )
    replicas = strategy.num_replicas_in_sync // worker.size
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    per_worker = (data if replicas == 1 else share_batches(data, replicas)).with_options(options)
    return make_peekable(peek, is_peeking, strategy.distribute_datasets_from_function(lambda context: per_worker))


def _check_whole_rows(plan: StreamPlan, workers: int) -> None:
    if plan.settings.shuffle and plan.settings.seed_drawn:
        raise UsageError(
            f"seed must be a number: None draws another seed in each of the {workers:,} workers, and their batches "
            "would not match"
        )
    warn_user(
        f"H5ChunkSequence: without shard each of the {workers:,} workers reads all rows and drops the other workers' "
        f"part of each batch. {_SCOPE.capitalize()}; batch_size is then per worker. If each worker has its own file, "
        "pass the list of all files to every worker"
    )


def share_batches(data: Any, replicas: int) -> Any:
    """Split each batch of a `tf.data.Dataset` into `replicas` pieces of equal size, give or take a row."""
    import tensorflow as tf

    def pieces(*batch: Any) -> Any:
        rows = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]

        def piece(number: Any) -> Any:
            start, stop = rows * number // replicas, rows * (number + 1) // replicas
            return tf.nest.map_structure(lambda values: values[start:stop], batch)

        return tf.data.Dataset.range(replicas).map(piece)

    return data.flat_map(pieces)


def make_peekable(peek: Callable[[], Iterator[Any]], is_peeking: Callable[[], bool], distributed: Any) -> Any:
    """Return a distributed data set that Keras can peek at before training.

    To build a model, Keras (3.15) peeks at one batch and averages it over the replicas with `strategy.reduce`. With
    more than one worker that fails for any data (keras#20585), but a batch that is not distributed works.

    Args:
        peek: yields the batch to peek at.
        is_peeking: returns whether Keras only peeks.
        distributed: yields the batches to train on.
    """
    import tensorflow as tf

    class PeekableDataset(tf.distribute.DistributedDataset):
        """The batches of `distributed`, except when Keras peeks."""

        @property
        def element_spec(self) -> Any:
            return distributed.element_spec

        def __iter__(self) -> Iterator[Any]:
            return peek() if is_peeking() else iter(distributed)

        def reduce(self, initial_state: Any, reduce_func: Any) -> Any:
            return distributed.reduce(initial_state, reduce_func)

    return PeekableDataset()


def make_logs_reducible(model: Any) -> None:
    """Make a model's steps return their scalars as vectors of one element.

    Keras (3.15) averages the results of a step over workers along their first axis. Scalars have none, so `fit` fails
    with "Invalid reduction dimension 0" for any data (keras#20585). The average of one-element vectors is the same
    number.

    Args:
        model: its `train_step` and `test_step` are wrapped once. The wrappers are not saved with the model.
    """
    import tensorflow as tf

    def as_vector(value: Any) -> Any:
        return tf.reshape(value, [1]) if len(getattr(value, "shape", (None,))) == 0 else value

    for name in ("train_step", "test_step"):
        step = getattr(model, name, None)
        if step is None or hasattr(step, "kerasmem_step"):
            continue

        def vector_step(*args: Any, _step: Any = step) -> Any:
            return tf.nest.map_structure(as_vector, _step(*args))

        vector_step.kerasmem_step = step  # type: ignore[attr-defined]
        setattr(model, name, vector_step)


# ---- data sets


def make_dataset(stream: Any, *, endless: bool, prefetch: int) -> Any:
    """Return a data set that delivers the next epoch of a `Stream` in every iteration.

    Args:
        stream: the stream.
        endless: whether an iteration continues from epoch to epoch.
        prefetch: number of batches prepared ahead.
    """
    import tensorflow as tf

    plan = stream.stream_plan
    if plan.settings.transform is None:
        signature = plan_signature(plan)
    else:
        signature = batches_signature([stream.batch(number) for number in sorted({0, plan.num_batches - 1})])

    def batches() -> Iterator[Batch]:
        for _ in itertools.count() if endless else range(1):
            yield from map(_without_lists, stream.next_epoch())

    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    # Under tf.distribute a worker's rows come in more and smaller batches, and Keras must not stop at this number.
    if endless or (stream.progress.position.batch == 0 and plan.settings.shard[1] == 1):
        number = tf.data.INFINITE_CARDINALITY if endless else plan.num_batches
        data = data.apply(tf.data.experimental.assert_cardinality(number))
    options = tf.data.Options()
    # `shard` divides the rows already. TensorFlow's own sharding would drop batches.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.prefetch(prefetch).with_options(options)


def plan_signature(plan: StreamPlan) -> Batch:
    """Return the signature of batches without a transform."""
    import tensorflow as tf

    rows = plan.settings.batch_size if plan.all_full else None
    weights = (tf.TensorSpec((rows,), tf.float32),) if plan.adds_weights else ()
    specs = [tf.TensorSpec((rows, *column.row_shape), tf.as_dtype(column.dtype)) for column in plan.columns]
    return (*build_batch(plan.parts, plan.uses, specs), *weights)


def batches_signature(batches: Sequence[Batch]) -> Batch:
    """Return a signature that fits all `batches`: None for the first axis and for axes of different lengths."""
    import tensorflow as tf

    def spec(*arrays: Any) -> Any:
        tensors = [tf.convert_to_tensor(array) for array in arrays]
        lengths = np.array([tensor.shape for tensor in tensors])
        shape = [int(axis[0]) if (axis == axis[0]).all() else None for axis in lengths.T]
        return tf.TensorSpec([None, *shape[1:]] if shape else [], tensors[0].dtype)

    return tf.nest.map_structure(spec, *map(_without_lists, batches))


def _without_lists(value: Any) -> Any:
    """Return a batch with tuples instead of lists, which tf.data would convert to arrays."""
    if isinstance(value, (list, tuple)):
        return tuple(_without_lists(entry) for entry in value)
    if isinstance(value, dict):
        return {key: _without_lists(entry) for key, entry in value.items()}
    return value
