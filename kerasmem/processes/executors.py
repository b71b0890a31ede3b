"""Run tasks on any `concurrent.futures.Executor`, and open the executors of the command line."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from typing import Any, TypeVar

from kerasmem.errors import KerasmemError, MissingExtraError, UsageError
from kerasmem.processes.children import end_after_parent

_RETRIES = 3  # by Dask, if a task's worker is lost

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(executor: Executor | None, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
    """Call a function on each task and yield the results in order.

    Args:
        executor: executor, or None for this process.
        function: function, sent by cloudpickle. It must be safe to call twice with one task: some executors retry.
        tasks: tasks, sent by cloudpickle.

    Raises:
        UsageError: If `executor` is not an executor.
        KerasmemError: If a task failed. Errors of kerasmem and the system keep their type.

    Examples:
        >>> list(run_tasks(None, abs, [-2, 1]))
        [2, 1]
    """
    if executor is None:
        yield from map(function, tasks)
        return
    if not callable(getattr(executor, "map", None)):
        raise UsageError(
            f"executor must be a concurrent.futures.Executor or None; got {executor!r}. Try ProcessPoolExecutor(4)."
        )
    import cloudpickle

    try:
        yield from executor.map(_call, [cloudpickle.dumps((function, task)) for task in tasks])
    except (KerasmemError, OSError):
        raise
    except BrokenExecutor as error:
        raise KerasmemError(
            "executor: a worker process ended unexpectedly. If it ran out of memory, use fewer workers. "
            'If this is a script, it must start processes under `if __name__ == "__main__":`.'
        ) from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise KerasmemError(f"executor: a task failed: {type(error).__name__}: {lines[-1][:300]}") from error


def _call(pickled: bytes) -> Any:
    import cloudpickle

    function, task = cloudpickle.loads(pickled)
    return function(task)


@contextlib.contextmanager
def open_executor(workers: int | None = None, dask: str | None = None) -> Iterator[Executor | None]:
    """Yield an executor of local processes or a Dask cluster, or None if neither is requested.

    Args:
        workers: number of local processes. Defaults to None.
        dask: address of a Dask scheduler, such as "tcp://host:8786". Defaults to None.

    Raises:
        UsageError: If both are given.
        MissingExtraError: If Dask is not installed.
        KerasmemError: If the scheduler cannot be reached.
    """
    if workers is not None and dask is not None:
        raise UsageError("--workers and --dask: choose one")
    if dask is not None:
        try:
            from distributed import Client

            client = Client(dask)
        except ImportError:
            raise MissingExtraError("--dask", "dask") from None
        except (OSError, ValueError) as error:
            raise KerasmemError(f"--dask: no scheduler can be reached at {dask}: {error}") from None
        with client:
            yield client.get_executor(pure=False, retries=_RETRIES)
    elif workers is None:
        yield None
    else:
        context = multiprocessing.get_context("spawn")  # this process may have threads
        pool = ProcessPoolExecutor(workers, context, initializer=end_after_parent)
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
