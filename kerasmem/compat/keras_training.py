"""Training in Keras: the loop of `fit`, the arguments of `compile`, losses and their trackers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.patching import patched

_STREAMS = "kerasmem.fit(checkpoint=…) on tf.data and generators"
CATCH_STOP = Borrowed("keras.src.backend.tensorflow.trainer:TFEpochIterator.catch_stop_iteration", feature=_STREAMS)
MAYBE_BUILD = Borrowed("keras:Model._maybe_symbolic_build", feature=_STREAMS)
STEP_LOGS = Borrowed("keras:Model._get_metrics_result_or_logs", feature="kerasmem.fit(isolated=True)")
_MICRO_BATCHES = "training in micro-batches"
_LOSSES = "keras.src.losses.loss"
REDUCE = Borrowed(f"{_LOSSES}:reduce_weighted_values", feature=_MICRO_BATCHES)
# The weights that Keras divides a mean by, after a mask.
masked_weights = Borrowed(f"{_LOSSES}:apply_mask", feature=_MICRO_BATCHES)


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


def loss_and_metrics_built(model: Any) -> tuple[bool, bool]:
    """Return whether the compiled loss and the metrics are built (True if there are none)."""
    parts = (getattr(model, name, None) for name in ("_compile_loss", "_compile_metrics"))
    loss, metrics = (part is None or part.built for part in parts)
    return loss, metrics


def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the loss as the model's step computes it."""
    return model._compute_loss(*args, **kwargs)


def user_metrics(model: Any) -> Any:
    """Return the metrics given to `compile`, or None."""
    return getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)


def user_loss_weights(model: Any) -> Any:
    """Return the loss weights given to `compile`, or None."""
    return getattr(getattr(model, "_compile_loss", None), "_user_loss_weights", None)


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return arguments to compile another model with the same objects."""
    metrics = getattr(model, "_compile_metrics", None)
    return {
        "optimizer": model.optimizer,
        "loss": model.loss,
        "loss_weights": user_loss_weights(model),
        "metrics": user_metrics(model),
        "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        "run_eagerly": model.run_eagerly,
        "steps_per_execution": model.steps_per_execution,
        "jit_compile": model.jit_compile,
        "auto_scale_loss": getattr(model, "auto_scale_loss", True),
    }


def reduction_replaced(function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Have Keras's losses reduce their values by another function in this thread.

    Args:
        function: called with Keras's own function, the values, and by name `sample_weight`, `mask`, `reduction` and
            `dtype`.
    """

    def reduce_weighted_values(
        original: Callable[..., Any], values: Any, sample_weight: Any = None, mask: Any = None,
        reduction: Any = "sum_over_batch_size", dtype: Any = None,
    ) -> Any:  # fmt: skip
        return function(original, values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)

    return patched(*REDUCE.owner(), reduce_weighted_values)


def loss_and_tracker(model: Any) -> tuple[Any, Any]:
    """Return the compiled loss with the trackers of single outputs, or None, and the metric that shows the loss.

    Raises:
        NotAvailableError: If Keras has them elsewhere.
    """
    try:
        return model._compile_loss, model._loss_tracker
    except AttributeError as error:
        raise NotAvailableError(f"{_MICRO_BATCHES} does not work with this Keras: {error}") from error


def has_added_losses(layer: Any) -> bool:
    """Return whether `add_loss` of the layer itself was called."""
    return bool(getattr(layer, "_losses", None))
