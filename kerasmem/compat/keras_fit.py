"""How Keras's `fit` iterates over epochs and data, for runs that resume inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

_STREAMS = "kerasmem.fit(checkpoint=…) on tf.data and generators"
CATCH_STOP = Borrowed("keras.src.backend.tensorflow.trainer:TFEpochIterator.catch_stop_iteration", feature=_STREAMS)
MAYBE_BUILD = Borrowed("keras:Model._maybe_symbolic_build(iterator, data_batch)", feature=_STREAMS)
STEP_LOGS = Borrowed("keras:Model._get_metrics_result_or_logs(logs)", feature="kerasmem.fit(isolated=True)")


def is_under_strategy(model: Any) -> bool:
    """Return whether a model was made in the scope of a `tf.distribute` strategy."""
    return getattr(model, "_distribute_strategy", None) is not None


def initial_epoch(model: Any) -> Any:
    """Return the epoch that overrides `initial_epoch` of the model's `fit`, or None."""
    return getattr(model, "_initial_epoch", None)


def set_initial_epoch(model: Any, epoch: Any) -> None:
    """Have a `fit` that has called `on_train_begin`, and all later ones, begin at an epoch, as `BackupAndRestore` does.

    Raises:
        NotAvailableError: If Keras does not look at it.
    """
    if not hasattr(model, "_initial_epoch"):
        raise NotAvailableError("ResumeTraining does not work with this Keras: a callback cannot choose the epoch")
    model._initial_epoch = epoch


@contextlib.contextmanager
def logs_from_steps(model: Any) -> Iterator[None]:
    """Make an epoch's logs those of its last step, instead of the model's metrics."""
    STEP_LOGS.get()
    model.__dict__["_get_metrics_result_or_logs"] = lambda logs: logs
    try:
        yield
    finally:
        del model.__dict__["_get_metrics_result_or_logs"]


@contextlib.contextmanager
def noted_epoch_iterator(model: Any) -> Iterator[list[Any]]:
    """Yield a list that receives the epoch iterator of the next `fit`."""
    found: list[Any] = []
    build = MAYBE_BUILD.get()

    def note(iterator: Any = None, data_batch: Any = None) -> None:
        found.append(iterator)
        build(model, iterator=iterator, data_batch=data_batch)

    model.__dict__["_maybe_symbolic_build"] = note
    try:
        yield found
    finally:
        del model.__dict__["_maybe_symbolic_build"]


def read_epoch(epoch_iterator: Any, read: Callable[[Any], Any]) -> Any:
    """Go through one epoch, with `read` called with TensorFlow's iterator in place of each execution of steps.

    Returns:
        What `read` returned last; None if there was nothing to read.
    """
    found = None
    with epoch_iterator.catch_stop_iteration():
        for _, _, iterator in epoch_iterator:
            found = read(iterator)
    return found


def step_on_data(function: Any) -> Any:
    """Return the inner `tf.function` for one batch of a train or test function, or None."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    step: Any = getattr(cells.get("one_step_on_data"), "cell_contents", None)
    step = getattr(step, "__wrapped__", step)
    return step if hasattr(step, "get_concrete_function") else None
