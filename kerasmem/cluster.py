"""Which of several workers this process is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

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


def find_worker(strategy: Any = None, environ: Mapping[str, str] | None = None) -> Worker | None:
    """Return which worker this process is; None where it trains alone, or does not train (an evaluator).

    Looked at are, in this order, the strategy, the distribution of `keras.distribution`, PyTorch's process group,
    JAX's, `TF_CONFIG`, and what launchers put into the environment. Nothing is imported for it.

    Args:
        strategy: the model's `tf.distribute` strategy, where it has one.
        environ: environment variables; default: this process's.
    """
    environ = os.environ if environ is None else environ
    asked = (_of_strategy(strategy), _of_keras(), _of_torch(), _of_jax(), _of_tf_config(environ.get("TF_CONFIG", "")))
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


def _of_strategy(strategy: Any) -> Worker | None:
    resolver = getattr(strategy, "cluster_resolver", None)
    try:
        return _in_cluster(resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):  # no strategy, or one of a single process
        return None


def _of_keras() -> Worker | None:
    keras = sys.modules.get("keras")
    distribution = None if keras is None else keras.distribution.distribution()
    processes, rank = getattr(distribution, "num_processes", 1), getattr(distribution, "_process_id", None)
    return None if processes <= 1 or rank is None else Worker(int(rank), int(processes))


def _of_torch() -> Worker | None:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Worker(int(distributed.get_rank()), int(distributed.get_world_size()))


def _of_jax() -> Worker | None:
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return None
    return Worker(int(jax.process_index()), int(jax.process_count()))


def _of_tf_config(text: str) -> Worker | None:
    """Return the place that TF_CONFIG names; one that cannot be understood is TensorFlow's to complain about."""
    try:
        config = json.loads(text)
        task = config.get("task", {})
        return _in_cluster(config.get("cluster", {}), task.get("type", "worker"), task.get("index", 0))
    except (AttributeError, TypeError, ValueError):
        return None


def _in_cluster(cluster: Mapping[str, Any], kind: str | None, index: int | None) -> Worker | None:
    if kind not in _TRAINING_TASKS or index is None:
        return None
    sizes = {task: len(cluster.get(task, ())) for task in _TRAINING_TASKS}
    before = sum(sizes[task] for task in _TRAINING_TASKS[: _TRAINING_TASKS.index(kind)])
    return Worker(before + int(index), sum(sizes.values()))
