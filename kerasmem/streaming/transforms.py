"""Transforms of batches, in threads or worker processes."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cloudpickle

from kerasmem.hdf5.format.layout import one_line
from kerasmem.processes.children import end_after_parent

Batch = tuple[Any, ...]
Transform = Callable[..., Any]


class TransformFailure(Exception):
    """A transform failed or returned a wrong value. The text follows "transform, on batch 3, "."""


def apply_transform(transform: Transform, batch: Batch) -> Batch:
    """Return the transformed batch, or raise `TransformFailure`."""
    try:
        result = transform(*batch)
    except Exception as error:
        raise TransformFailure(f"raised {type(error).__name__}: {one_line(str(error))}") from error
    if len(batch) == 1 and not isinstance(result, tuple):
        return (result,)
    if not isinstance(result, (tuple, list)) or len(result) != len(batch):
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
        wanted = ("x", "(x, y)", "(x, y, sample_weight)")[len(batch) - 1]
        raise TransformFailure(f"returned {got}; it has to return {wanted}")
    return tuple(result)


_in_worker: Transform | None = None  # in a worker process: the transform it was started with


def _start_worker(pickled: bytes) -> None:
    global _in_worker
    end_after_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that trains ends the others
    _in_worker = cloudpickle.loads(pickled)


def _run_in_worker(batch: Batch) -> tuple[Batch | None, str, str]:
    # An exception that does not survive pickling would take the pool down: send its text.
    assert _in_worker is not None
    try:
        return apply_transform(_in_worker, batch), "", ""
    except TransformFailure as failure:
        return None, str(failure), traceback.format_exc()


class TransformPool:
    """Runs a transform in worker processes, which start with the first batch.

    Args:
        transform: the function. It is sent by cloudpickle: lambdas, and functions of a notebook, work.
        processes: how many.
    """

    def __init__(self, transform: Transform, processes: int) -> None:
        # A fork of this process would have locks that TensorFlow's threads hold.
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self._start = functools.partial(
            ProcessPoolExecutor, processes, context, initializer=_start_worker, initargs=(cloudpickle.dumps(transform),)
        )
        self._pool = self._start()
        self._replacing = threading.Lock()

    def run(self, batch: Batch) -> Batch:
        """Return the transformed batch, or raise `TransformFailure`."""
        pool = self._pool
        try:
            result, message, details = pool.submit(_run_in_worker, batch).result()
        except BrokenProcessPool as error:
            with self._replacing:  # several threads may have waited for it
                self._pool = self._start() if self._pool is pool else self._pool
            raise TransformFailure(
                "ended with its worker process; most often the system kills one for lack of memory: use "
                "fewer workers, or threads (use_multiprocessing=False). With processes, a script must train "
                'under `if __name__ == "__main__":`'
            ) from error
        if result is None:
            raise TransformFailure(message) from RuntimeError(f"in the worker process:\n{details}")
        return result

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
