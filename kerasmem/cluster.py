"""Which of several workers this process is: the one place that looks at strategies, distributions and launchers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kerasmem.errors import UsageError

_TRAINING_TASKS = ("chief", "master", "worker")  # in the order in which TensorFlow counts them
# Variables of launchers. SLURM_NTASKS would not do: a batch script's own program, started without srun, has it too.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
_RANK = re.compile(r"(?<![A-Za-z])(?:rank|worker)[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)  # in a path


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
    """Return the rank of this process among the workers; None if it trains alone or is an evaluator.

    The first of these counts: the strategy, JAX's processes (also those of `keras.distribution`), `TF_CONFIG`, and the
    environment variables of torchrun, Open MPI or Slurm. Nothing is imported for it.

    Args:
        strategy: the model's `tf.distribute` strategy, if it has one.
        environ: environment variables. Defaults to this process's.
    """
    _, worker = next(_sources(strategy, os.environ if environ is None else environ), ("", ALONE))
    return worker if worker.size > 1 else None


def find_shard(environ: Mapping[str, str] | None = None) -> Worker:
    """Return the shard of the rows for this process; (0, 1) if it trains alone.

    The distribution of `keras.distribution.set_distribution` counts first, in which several processes may share one
    replica; then what `find_worker` reads, with the strategy whose scope is open. The first time in a process that
    there are several workers, a line on stderr names this one and the source.

    Args:
        environ: environment variables. Defaults to this process's.

    Raises:
        UsageError: If `TF_CONFIG` is damaged, or Keras would share out the rows once more.
    """
    environ = os.environ if environ is None else environ
    text = environ.get("TF_CONFIG", "").strip()
    try:
        if text and _in_tf_config(text) is None:
            return ALONE  # an evaluator or a parameter server
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"shard: 'auto' reads the environment's TF_CONFIG, which cannot be understood ({error}); "
            "mend it or give shard=(index, count)"
        ) from error
    replica = _of_keras_distribution()
    sources = _sources(_open_strategy(), environ)
    name, worker = next(sources, ("", ALONE)) if replica is None else ("keras.distribution", replica)
    if worker.size > 1:
        _say_once(f"kerasmem: shard='auto': worker {worker.rank} of {worker.size:,}, by {name}")
    return worker


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


def worker_of(strategy: Any) -> Worker:
    """Return the rank of this process in a `tf.distribute` strategy; (0, 1) without several workers."""
    return _of_strategy(strategy) or ALONE


def rank_of(path: str) -> int | None:
    """Return the rank that a path names, in the file's name or a folder's; None if it names none.

    The last "rank" or "worker" that a number follows counts.

    Examples:
        >>> rank_of("logs/run.rank3.jsonl"), rank_of("worker_1/run.csv"), rank_of("frank3.csv")
        (3, 1, None)
    """
    ranks = _RANK.findall(path)
    return int(ranks[-1]) if ranks else None


def own_path(path: Path, worker: Worker | None) -> Path:
    """Insert the rank of a worker before the suffix of a path, unless the path names it already.

    A path that names another rank gets one too: all workers may have been given the same.

    Examples:
        >>> own_path(Path("run.jsonl"), Worker(1, 2)).name, own_path(Path("run.rank1.jsonl"), Worker(1, 2)).name
        ('run.rank1.jsonl', 'run.rank1.jsonl')
    """
    if worker is None or rank_of(str(path)) == worker.rank:
        return path
    return path.with_name(f"{path.stem}.rank{worker.rank}{path.suffix}")


def in_cluster(cluster: Mapping[str, Any], kind: str | None, index: int | None) -> Worker | None:
    """Return the rank of a task among the tasks that train; None for evaluators and the like.

    Args:
        cluster: the tasks of each kind, such as {"chief": ["a:1"], "worker": ["b:1", "c:1"]}.
        kind: this task's kind.
        index: its number within the kind.

    Examples:
        >>> in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1)
        Worker(rank=2, size=3)
    """
    sizes = {task: len(cluster.get(task, ())) for task in _TRAINING_TASKS}
    if kind not in _TRAINING_TASKS or index is None or not any(sizes.values()):
        return None
    before = sum(sizes[task] for task in _TRAINING_TASKS[: _TRAINING_TASKS.index(kind)])
    return Worker(before + int(index), sum(sizes.values()))


def _sources(strategy: Any, environ: Mapping[str, str]) -> Iterator[tuple[str, Worker]]:
    """Yield each source of a rank and the rank; launchers only if they started several processes."""
    workers = {
        "the strategy": _of_strategy(strategy),
        "JAX's processes": _of_jax(),
        "TF_CONFIG": _of_tf_config(environ.get("TF_CONFIG", "")),
    }
    yield from ((name, worker) for name, worker in workers.items() if worker is not None)
    for launcher, (rank, count) in _LAUNCHERS.items():
        with contextlib.suppress(KeyError, ValueError):
            worker = Worker(int(environ[rank]), int(environ[count]))
            if 0 <= worker.rank < worker.size and worker.size > 1:
                yield f"{launcher}'s {rank} and {count}", worker


def _of_strategy(strategy: Any) -> Worker | None:
    resolver = getattr(strategy, "cluster_resolver", None)
    try:
        return in_cluster(resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):  # no strategy, or one of a single process
        return None


def _open_strategy() -> Any:
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not tensorflow.distribute.has_strategy():
        return None
    return tensorflow.distribute.get_strategy()


def _keras_distribution() -> Any:
    keras = sys.modules.get("keras")
    return None if keras is None else keras.distribution.distribution()


def _of_keras_distribution() -> Worker | None:
    distribution = _keras_distribution()
    processes = getattr(distribution, "num_processes", 1)
    if distribution is None or processes <= 1:
        return None
    if getattr(distribution, "auto_shard_dataset", False):
        raise UsageError(
            "shard: with auto_shard_dataset, Keras shares out the rows itself, and takes a tf.data.Dataset only; "
            "make the distribution with auto_shard_dataset=False, or set keras.distribution.distribution()"
            ".auto_shard_dataset = False, and let shard='auto' share them out"
        )
    return Worker(distribution.data_shard_id, min(processes, distribution.num_model_replicas))


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
