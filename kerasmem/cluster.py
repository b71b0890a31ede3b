"""Which of several workers this process is: the one place that looks at strategies, distributions and launchers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from kerasmem.errors import UsageError

_TRAINING_TASKS = ("chief", "master", "worker")  # in the order in which TensorFlow counts them
# What launchers put into the environment: torchrun, Horovod, Open MPI, MPICH and Intel MPI, srun. SLURM_NTASKS would
# not do: a program that a batch script starts without srun has it too, and runs once.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class Worker(NamedTuple):
    """One process among those that train together.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
    """

    rank: int
    size: int


ALONE = Worker(0, 1)


def find_worker(strategy: Any = None, environ: Mapping[str, str] | None = None) -> Worker | None:
    """Return which worker this process is; None where it trains alone, or does not train (an evaluator).

    Looked at are, in this order, the strategy, PyTorch's process group, JAX's processes (those of `keras.distribution`
    too), `TF_CONFIG`, and what launchers put into the environment. Nothing is imported for it.

    Args:
        strategy: the model's `tf.distribute` strategy, where it has one.
        environ: environment variables; default: this process's.
    """
    environ = os.environ if environ is None else environ
    asked = (_of_strategy(strategy), _of_torch(), _of_jax(), _of_tf_config(environ.get("TF_CONFIG", "")))
    for found in asked:
        if found is not None:
            return found if found.size > 1 else None
    for rank, count in _LAUNCHERS:
        try:
            found = Worker(int(environ[rank]), int(environ[count]))
        except (KeyError, ValueError):
            continue
        if 0 <= found.rank < found.size and found.size > 1:
            return found
    return None


def find_shard() -> Worker:
    """Return which part of the rows is this process's in the distribution in force; (0, 1) where there is none.

    Looked at are, in this order, the `tf.distribute` strategy whose scope is open, the distribution set with
    `keras.distribution.set_distribution`, and the environment's `TF_CONFIG`. Unlike `find_worker` this refuses what it
    cannot understand, because rows would be lost or repeated.

    Raises:
        UsageError: `TF_CONFIG` cannot be understood, or Keras would share out the rows once more.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.distribute.has_strategy():
        return worker_of(tensorflow.distribute.get_strategy())
    distribution = _keras_distribution()
    if distribution is not None:
        processes = getattr(distribution, "num_processes", 1)
        if processes <= 1:
            return ALONE
        if getattr(distribution, "auto_shard_dataset", False):
            raise UsageError(
                "shard: with auto_shard_dataset, Keras shares out the rows itself, and takes a tf.data.Dataset only; "
                "make the distribution with auto_shard_dataset=False, or set keras.distribution.distribution()"
                ".auto_shard_dataset = False, and let shard='auto' share them out"
            )
        return Worker(distribution.data_shard_id, min(processes, distribution.num_model_replicas))
    text = os.environ.get("TF_CONFIG", "").strip()
    try:
        return (_in_tf_config(text) if text else None) or ALONE
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"shard: 'auto' reads the environment's TF_CONFIG, which cannot be understood ({error}); "
            "mend it or give shard=(index, count)"
        ) from error


def worker_of(strategy: Any) -> Worker:
    """Return which worker of a `tf.distribute` strategy this process is; (0, 1) where it has one worker, or is None."""
    return _of_strategy(strategy) or ALONE


def in_cluster(cluster: Mapping[str, Any], kind: str | None, index: int | None) -> Worker | None:
    """Return which worker a task is among the tasks that train; None for evaluators and the like.

    Args:
        cluster: the tasks of each kind, such as {"chief": ["a:1"], "worker": ["b:1", "c:1"]}.
        kind: this task's kind.
        index: its number within the kind.

    Example:
        >>> in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1)
        Worker(rank=2, size=3)
    """
    sizes = {task: len(cluster.get(task, ())) for task in _TRAINING_TASKS}
    if kind not in _TRAINING_TASKS or index is None or not any(sizes.values()):
        return None
    before = sum(sizes[task] for task in _TRAINING_TASKS[: _TRAINING_TASKS.index(kind)])
    return Worker(before + int(index), sum(sizes.values()))


def _of_strategy(strategy: Any) -> Worker | None:
    resolver = getattr(strategy, "cluster_resolver", None)
    try:
        return in_cluster(resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):  # no strategy, or one of a single process
        return None


def _keras_distribution() -> Any:
    keras = sys.modules.get("keras")
    return None if keras is None else keras.distribution.distribution()


def _of_torch() -> Worker | None:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Worker(int(distributed.get_rank()), int(distributed.get_world_size()))


def _of_jax() -> Worker | None:
    jax = sys.modules.get("jax")  # where keras.distribution has several processes it has them from JAX
    several = getattr(_keras_distribution(), "num_processes", 1) > 1
    if jax is None or not (several or jax.distributed.is_initialized()):
        return None
    return Worker(int(jax.process_index()), int(jax.process_count()))


def _of_tf_config(text: str) -> Worker | None:
    """Return the worker that TF_CONFIG names; one that cannot be understood is TensorFlow's to complain about."""
    try:
        return _in_tf_config(text)
    except (AttributeError, TypeError, ValueError):
        return None


def _in_tf_config(text: str) -> Worker | None:
    config = json.loads(text)
    task = config.get("task", {})
    return in_cluster(config.get("cluster", {}), task.get("type", "worker"), int(task.get("index", 0)))
