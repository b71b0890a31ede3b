"""Where tasks run: in this process, in others of this machine, on Dask or on Ray; all of them asked in the same way."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from kerasmem.errors import KerasmemError, MissingExtraError, UsageError
from kerasmem.processes.children import end_after_parent

_RETRIES = 3  # of a task that failed, or whose process was lost
_WAY_OUT = "write processes, processes=4, dask, dask=tcp://host:8786, ray or ray=host:6379"

Task = TypeVar("Task")
Result = TypeVar("Result")
RunTasks = Callable[[Callable[[Task], Result], Iterable[Task]], Iterator[Result]]
"""Calls a function on each of some tasks, all of which can be pickled; yields the results in order."""
Engine = str | Callable[..., Iterable[Any]] | None
"""What `open_engine` takes."""


@contextlib.contextmanager
def open_engine(engine: Engine) -> Iterator[RunTasks[Any, Any]]:
    """Yield what runs tasks, for as long as the block runs.

    A task that fails, or whose worker is lost, is run again some times; so it has to be one that may run twice. What
    the task raised at last is raised here.

    Args:
        engine: None for this process; "processes" or "processes=4"; "dask" or "dask=tcp://host:8786"; "ray" or
            "ray=host:6379"; or a function that works as `map` does, such as that of Dask's `client.get_executor()`.
            Without an address, Dask and Ray run on this machine, or where their own environment variables say.

    Raises:
        UsageError: there is no such engine.
        MissingExtraError: it is not installed.
        KerasmemError: it cannot be reached, or a task failed for good.

    Examples:
        >>> with open_engine(None) as run_tasks:
        ...     list(run_tasks(abs, [-2, 1]))
        [2, 1]
    """
    if engine is None:
        yield map
        return
    if callable(engine):
        yield functools.partial(_run, engine)
        return
    name, _, place = engine.partition("=") if isinstance(engine, str) else (repr(engine), "", "")
    if name not in _ENGINES:
        raise UsageError(f"engine: {name!r} is none that is known; {_WAY_OUT}")
    with _ENGINES[name](place) as run_tasks:
        yield functools.partial(_run, run_tasks)


def _run(
    run_tasks: Callable[..., Iterable[Result]], function: Callable[[Task], Result], tasks: Iterable[Task]
) -> Iterator[Result]:
    try:
        yield from run_tasks(function, list(tasks))
    except (KerasmemError, OSError):
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise KerasmemError(
            f"engine: a task failed on its worker: {type(error).__name__}: {said[-1][:300]}; the engine's log has more"
        ) from error


@contextlib.contextmanager
def _processes(count: str) -> Iterator[RunTasks[Any, Any]]:
    if count and not (count.isdecimal() and int(count)):
        raise UsageError(f"engine: {count!r} is no number of processes; {_WAY_OUT}")
    context = multiprocessing.get_context("spawn")  # this process may have threads

    def run_tasks(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        import cloudpickle

        waiting = [cloudpickle.dumps((function, task)) for task in tasks]
        for left in reversed(range(_RETRIES + 1)):
            pool = ProcessPoolExecutor(int(count) if count else None, context, initializer=end_after_parent)
            try:
                for result in pool.map(_call, waiting.copy()):
                    del waiting[0]
                    yield result
                return
            except BrokenProcessPool:  # a worker was killed; what was not yielded is done again
                if not left:
                    raise KerasmemError(
                        "engine: worker processes end again and again; most often the system kills them for lack of "
                        "memory: use fewer, processes=N, or a smaller memory budget"
                    ) from None
            finally:
                pool.shutdown(cancel_futures=True)

    yield run_tasks


def _call(pickled: bytes) -> Any:
    import cloudpickle

    return _apply(*cloudpickle.loads(pickled))


def _apply(function: Callable[[Task], Result], task: Task) -> Result:
    return function(task)


@contextlib.contextmanager
def _dask(address: str) -> Iterator[RunTasks[Any, Any]]:
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtraError("engine: Dask", "dask") from None
    own: dict[str, Any] = {} if address else {"threads_per_worker": 1, "dashboard_address": None}
    try:
        client = Client(address or None, **own)
    except (OSError, ValueError) as error:
        raise KerasmemError(
            f"engine: no Dask scheduler can be reached at {address or 'this machine'}: {error}"
        ) from None
    with client:
        yield client.get_executor(pure=False, retries=_RETRIES).map


@contextlib.contextmanager
def _ray(address: str) -> Iterator[RunTasks[Any, Any]]:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("engine: Ray", "ray") from None
    own = not ray.is_initialized()
    try:
        if own:
            ray.init(address=address or None, log_to_driver=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise KerasmemError(f"engine: no Ray cluster can be reached at {address or 'this machine'}: {error}") from None

    def run_tasks(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        remote = ray.remote(_apply).options(max_retries=_RETRIES, retry_exceptions=True)
        try:
            for answer in [remote.remote(function, task) for task in tasks]:
                yield ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    try:
        yield run_tasks
    finally:
        if own:
            ray.shutdown()


_ENGINES = {"processes": _processes, "dask": _dask, "ray": _ray}
