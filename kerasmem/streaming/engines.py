"""How a sequence reaches the workers of a `tf.distribute` strategy: whose rows, whose batches, nothing thrown away.

Keras hands a `PyDataset` to `strategy.experimental_distribute_dataset`, which takes every worker's data for the same
and its batches for those of all workers together: it cuts each batch into one piece a replica, and of these leaves
a worker its own. Of a sequence whose rows are already a worker's share, all but one piece in `count` would be lost.
So the data set that Keras asks for is given in the form in which batches are per worker. As Keras gives no room
for that, its adapter is told where to ask: `attend`.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from kerasmem.errors import UsageError
from kerasmem.streaming.sharding import place_in_cluster

if TYPE_CHECKING:
    from kerasmem.streaming.sequence import H5ChunkSequence

_FRAMES = 16  # looked at on the way up to `fit`
_SCOPE = "make the sequence with shard='auto' in the strategy's scope"
_LOOP = "strategy.distribute_datasets_from_function(lambda context: sequence.as_tf_dataset())"


def attend(sequence: H5ChunkSequence, adapter: Any) -> None:
    """Have Keras's adapter, which has just been made for a sequence, ask here for its `tf.data.Dataset`.

    Args:
        sequence: what it reads.
        adapter: the adapter; None where somebody else calls.
    """
    if adapter is None or "tensorflow" not in sys.modules or not hasattr(type(adapter), "get_tf_dataset"):
        return
    known = weakref.ref(adapter)  # the adapter must not keep itself alive: readers are told apart by theirs

    def get_tf_dataset() -> Any:
        there, strategy = known(), _find_strategy(sys._getframe(1))
        assert there is not None, "it is what calls"
        data = for_strategy(sequence, type(there).get_tf_dataset(there), strategy, look=there._get_iterator)
        model = _find_model(sys._getframe(1))
        if model is not None and place_of(strategy)[1] > 1:
            make_logs_reducible(model)
        return data

    adapter.get_tf_dataset = get_tf_dataset


def check_attended(sequence: H5ChunkSequence, reader: Any) -> None:
    """Refuse a `fit` in which a worker's rows would be shared out once more.

    Args:
        sequence: whose epoch begins.
        reader: the adapter that reads it; None where that cannot be seen.

    Raises:
        UsageError: there are several workers, and the reader does not ask here: another version of Keras, or a
            `PyDataset` of somebody's own that reads from this one.
    """
    if sequence.shard[1] == 1 or "tensorflow" not in sys.modules or "get_tf_dataset" in getattr(reader, "__dict__", ()):
        return
    strategy = getattr(_find_model(sys._getframe(1)), "distribute_strategy", None)
    if place_of(strategy)[1] > 1:
        raise UsageError(
            "shard: here Keras would share out the worker's rows once more, and drop all but one part; give fit the "
            f"H5ChunkSequence itself, or in a loop of your own go through {_LOOP}"
        )


def check_devices(sequence: H5ChunkSequence) -> None:
    """Refuse batches that `keras.distribution` on JAX cannot lay out over its devices, before it fails on the last one.

    Args:
        sequence: whose epoch begins.

    Raises:
        UsageError: a batch cannot be shared out evenly.
    """
    keras = sys.modules.get("keras")
    if keras is None or keras.backend.backend() != "jax":
        return
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.batch_dim_name is None:
        return
    mesh, processes = distribution.device_mesh, distribution.num_processes
    replicas = mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)]
    count = min(processes, replicas)
    if count > 1 and sequence.shard[1] == 1:
        warnings.warn(
            f"H5ChunkSequence: without shard all {count:,} processes deliver the same rows, unless their files differ; "
            "make the sequence with shard='auto' after the distribution is set",
            stacklevel=3,
        )
    here = max(1, replicas // processes)
    last = sequence.num_rows - (len(sequence) - 1) * sequence.batch_size
    full = sequence.drop_remainder or sequence._share.rows % (sequence.batch_size * sequence.shard[1]) == 0
    if sequence.batch_size % here or (not sequence.drop_remainder and last % here) or (processes > 1 and not full):
        raise UsageError(
            f"batch_size: JAX lays out every batch evenly over {here:,} devices of each of {processes:,} processes, "
            f"which batches of {sequence.batch_size:,} with a last one of other size do not allow; take a multiple of "
            f"{here:,}, and drop_remainder=True"
        )


def for_strategy(sequence: H5ChunkSequence, data: Any, strategy: Any, look: Callable[[], Iterator[Any]]) -> Any:
    """Return a sequence's `tf.data.Dataset` as Keras has to be given it under a strategy.

    Args:
        sequence: whose batches they are.
        data: the data set that Keras made of it.
        strategy: a `tf.distribute` strategy, or None.
        look: gives batches to look at, and reads none ahead.

    Returns:
        `data` itself where there is one worker, also with several devices: there Keras shares out each batch among
        them, and loses nothing. Else a `tf.distribute.DistributedDataset`.

    Raises:
        UsageError: the workers would read other rows than they should.
    """
    index, count = place_of(strategy)
    if count == 1:
        return data
    if sequence.shard[1] == 1:
        if sequence.shuffle and sequence._seed_drawn:
            raise UsageError(
                f"seed: None draws another seed in each of the {count:,} workers, whose batches are pieces of the same "
                "ones; give a number"
            )
        warnings.warn(
            f"H5ChunkSequence: without shard every one of the {count:,} workers reads all rows of its file and drops "
            f"what is not its part of each batch; {_SCOPE}, then batch_size is each worker's. Where each worker has a "
            "file of its own, give all of them the list of all files",
            stacklevel=2,
        )
        return looked_at(look, strategy.experimental_distribute_dataset(data))
    if tuple(sequence.shard) != (index, count):
        raise UsageError(
            f"shard: this sequence has part {sequence.shard[0]} of {sequence.shard[1]:,}, but the process is worker "
            f"{index} of {count:,}; {_SCOPE}"
        )
    if _called_to_predict():
        raise UsageError(
            "shard: predict puts the results of all workers together batch by batch, which is no order of the file's "
            "rows when each worker has its own; give predict a sequence without shard, with shuffle=False"
        )
    replicas = strategy.num_replicas_in_sync // count
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    mine = (data if replicas == 1 else share_batches(data, replicas)).with_options(options)
    return looked_at(look, strategy.distribute_datasets_from_function(lambda context: mine))


def place_of(strategy: Any) -> tuple[int, int]:
    """Return this process's (index, count) among the workers of a `tf.distribute` strategy; (0, 1) where it has one."""
    resolver = getattr(strategy, "cluster_resolver", None)
    if resolver is None or resolver.task_type is None:
        return 0, 1
    return place_in_cluster(resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id)


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


def looked_at(look: Callable[[], Iterator[Any]], distributed: Any) -> Any:
    """Return a distributed data set at which Keras may look before it trains.

    To build a model Keras (3.15) looks at one batch, and averages it over the replicas with `strategy.reduce`. With
    more than one worker that fails for whatever data (keras#20585). A batch that is not distributed it takes as it is.

    Args:
        look: gives the batch to look at.
        distributed: gives those to train on.
    """
    import tensorflow as tf

    class LookedAt(tf.distribute.DistributedDataset):
        """What `distributed` gives, but for the look."""

        @property
        def element_spec(self) -> Any:
            return distributed.element_spec

        def __iter__(self) -> Iterator[Any]:
            return look() if _called_from("_maybe_symbolic_build") else iter(distributed)

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
        if step is None or hasattr(step, "_kerasmem_step"):
            continue

        def vectors(*given: Any, _step: Any = step) -> Any:
            return tf.nest.map_structure(as_vector, _step(*given))

        vectors._kerasmem_step = step  # type: ignore[attr-defined]
        setattr(model, name, vectors)


def _find_model(frame: FrameType | None) -> Any:
    """Return the model whose `fit` or `evaluate` asks; None where somebody else does."""
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_name in ("fit", "evaluate"):
            break
        frame = frame.f_back
    model = None if frame is None else frame.f_locals.get("self")
    return model if hasattr(model, "train_step") else None


def _find_strategy(frame: FrameType | None) -> Any:
    """Return the strategy of the iterator that asks, or else that whose scope is open."""
    asking = None if frame is None else frame.f_locals.get("self")
    strategy = getattr(asking, "_distribute_strategy", None)
    if strategy is None:
        tensorflow = sys.modules["tensorflow"]
        strategy = tensorflow.distribute.get_strategy() if tensorflow.distribute.has_strategy() else None
    return strategy


def _called_to_predict() -> bool:
    return _called_from("predict")


def _called_from(name: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_name == name:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == name
