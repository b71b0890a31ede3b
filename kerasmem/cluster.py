"""Rank of this process among the workers of a distributed run."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kerasmem.errors import UsageError

_TRAINING_TASKS = ("chief", "master", "worker")  # in TensorFlow's order
# Variables of launchers. Slurm also sets SLURM_NTASKS for a batch script that was not started by srun.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
_RANK = re.compile(r"(?<![A-Za-z])(?:rank|worker)[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)  # in a path
# If a variable is missing or damaged, or a strategy has a single process. TensorFlow reports damaged ones itself.
_DAMAGES = (AttributeError, KeyError, TypeError, ValueError)


class Worker(NamedTuple):
    """One of several processes that train together.

    Attributes:
        rank: its number, from 0.
        size: the number of processes.
    """

    rank: int
    size: int


ALONE = Worker(0, 1)


def find_worker(strategy: Any = None, environ: Mapping[str, str] | None = None) -> Worker | None:
    """Return the rank of this process, or None for a single process or an evaluator.

    Sources in order of precedence: the strategy, JAX's processes (including those of `keras.distribution`),
    `TF_CONFIG`, and the environment variables of torchrun, Open MPI and Slurm. TensorFlow and JAX are not imported.

    Args:
        strategy: the model's `tf.distribute` strategy, if any.
        environ: environment variables. Defaults to this process's.
    """
    _, worker = next(_workers(strategy, os.environ if environ is None else environ), ("", ALONE))
    return worker if worker.size > 1 else None


def find_shard(environ: Mapping[str, str] | None = None) -> Worker:
    """Return the shard of rows for this process, or (0, 1) for a single process.

    The distribution of `keras.distribution.set_distribution` takes precedence, because several processes may share one
    of its replicas. Then the sources of `find_worker` follow, with the current strategy. If there are several workers,
    a line on stderr names the rank and its source once per process.

    Args:
        environ: environment variables. Defaults to this process's.

    Raises:
        UsageError: If `TF_CONFIG` is damaged, or Keras would shard the rows again.
    """
    environ = os.environ if environ is None else environ
    try:
        if environ.get("TF_CONFIG") and _read_tf_config(environ["TF_CONFIG"]) is None:
            return ALONE  # an evaluator or a parameter server
    except _DAMAGES as error:
        raise UsageError(
            f"shard='auto' cannot read the environment variable TF_CONFIG ({error}); correct it, or pass "
            "shard=(index, count)"
        ) from error
    replica = _keras_replica()
    first = next(_workers(_current_strategy(), environ), ("", ALONE))
    name, worker = first if replica is None else ("keras.distribution", replica)
    if worker.size > 1:
        _print_once(f"kerasmem: shard='auto': worker {worker.rank} of {worker.size:,}, from {name}")
    return worker


@functools.cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def worker_of(strategy: Any) -> Worker:
    """Return the rank of this process in a `tf.distribute` strategy, or (0, 1) without several workers."""
    with contextlib.suppress(*_DAMAGES):
        return _strategy_worker(strategy) or ALONE
    return ALONE


def own_path(path: Path, worker: Worker | None) -> Path:
    """Insert the rank of a worker before the suffix of a path, unless the last "rank" or "worker" in it has it.

    Examples:
        >>> own_path(Path("run.jsonl"), Worker(1, 2)).name, own_path(Path("run.rank1.jsonl"), Worker(1, 2)).name
        ('run.rank1.jsonl', 'run.rank1.jsonl')
    """
    ranks = _RANK.findall(str(path))
    if worker is None or (ranks and int(ranks[-1]) == worker.rank):
        return path
    return path.with_name(f"{path.stem}.rank{worker.rank}{path.suffix}")


def _workers(strategy: Any, environ: Mapping[str, str]) -> Iterator[tuple[str, Worker]]:
    """Yield the sources that name a rank, with that rank."""
    readers: dict[str, Callable[[], Worker | None]] = {
        "the strategy": lambda: _strategy_worker(strategy),
        "JAX's processes": _jax_worker,
        "TF_CONFIG": lambda: _read_tf_config(environ["TF_CONFIG"]),
    }
    for launcher, (rank, size) in _LAUNCHERS.items():
        readers[f"{launcher}'s {rank} and {size}"] = functools.partial(_launched_worker, environ, rank, size)
    for name, read in readers.items():
        with contextlib.suppress(*_DAMAGES):
            if (worker := read()) is not None:
                yield name, worker


def _launched_worker(environ: Mapping[str, str], rank: str, size: str) -> Worker | None:
    worker = Worker(int(environ[rank]), int(environ[size]))
    return worker if 0 <= worker.rank < worker.size > 1 else None


def _cluster_worker(cluster: Mapping[str, Any], kind: str | None, index: int | None) -> Worker | None:
    """Return the rank of a task among the training tasks, or None for evaluators and parameter servers.

    Args:
        cluster: the tasks of each kind, such as {"chief": ["a:1"], "worker": ["b:1", "c:1"]}.
        kind: this task's kind.
        index: its number within the kind.
    """
    sizes = {task: len(cluster.get(task, ())) for task in _TRAINING_TASKS}
    if kind not in _TRAINING_TASKS or index is None or not any(sizes.values()):
        return None
    before = sum(sizes[task] for task in _TRAINING_TASKS[: _TRAINING_TASKS.index(kind)])
    return Worker(before + int(index), sum(sizes.values()))


def _strategy_worker(strategy: Any) -> Worker | None:
    resolver = strategy.cluster_resolver
    return _cluster_worker(resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id)


def _current_strategy() -> Any:
    tensorflow: Any = sys.modules.get("tensorflow")
    has_strategy = tensorflow is not None and tensorflow.distribute.has_strategy()
    return tensorflow.distribute.get_strategy() if has_strategy else None


def _keras_distribution() -> Any:
    keras = sys.modules.get("keras")
    return None if keras is None else keras.distribution.distribution()


def _keras_replica() -> Worker | None:
    distribution = _keras_distribution()
    processes = getattr(distribution, "num_processes", 1)
    if distribution is None or processes <= 1:
        return None
    if getattr(distribution, "auto_shard_dataset", False):
        raise UsageError(
            "shard='auto' does not work with auto_shard_dataset=True, which makes Keras shard the rows again; set "
            "keras.distribution.distribution().auto_shard_dataset = False"
        )
    return Worker(distribution.data_shard_id, min(processes, distribution.num_model_replicas))


def _jax_worker() -> Worker | None:
    jax = sys.modules.get("jax")  # Keras's distributions get their processes from JAX
    has_several = getattr(_keras_distribution(), "num_processes", 1) > 1
    if jax is None or not (has_several or jax.distributed.is_initialized()):
        return None
    return Worker(int(jax.process_index()), int(jax.process_count()))


def _read_tf_config(text: str) -> Worker | None:
    config = json.loads(text)
    task = config.get("task", {})
    return _cluster_worker(config.get("cluster", {}), task.get("type", "worker"), int(task.get("index", 0)))
