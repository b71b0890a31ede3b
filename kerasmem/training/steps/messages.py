"""The errors of a step that ran out and cannot be repeated in smaller pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from kerasmem.compat.keras_layers import flatten_layers

_SMALLER = "a smaller model: fewer or narrower layers, shorter sequences, smaller pictures"
_LARGER = "a larger card or limit; other processes on this one ended"
_RECOMPUTE = "kerasmem.recompute(model): activations are computed again in the backward pass; the same result"


def nothing_fits(summary: str, model: Any, since: int) -> str:
    """Return the message if not even one row fits.

    Args:
        summary: summary of the failure.
        model: the model.
        since: training steps since the copy that the model went back to.
    """
    options = [_RECOMPUTE, *_half_precision(model), *_lean_optimizer(model), _SMALLER, _LARGER]
    return (
        f"not even one row at a time fits: {summary}\nA smaller batch cannot help. {_state(since)} "
        f"kerasmem.advise(model, device=…) estimates the options:{_listed(options)}"
    )


def no_update_fits(summary: str, model: Any, since: int) -> str:
    """Return the message if the update after the last piece ran out."""
    all_rows = "a smaller batch_size: the gradients of embeddings are kept for each row until then"
    has_embeddings = any(isinstance(layer, keras.layers.Embedding) for layer in flatten_layers(model))
    options = [*([all_rows] if has_embeddings else []), *_lean_optimizer(model), _SMALLER, _LARGER]
    return (
        f"the update of the weights does not fit: {summary}\nIt comes after the last piece of a batch, and smaller "
        f"pieces cannot help. {_state(since)} Options:{_listed(options)}"
    )


def cannot_divide(summary: str, obstacle: str, since: int) -> str:
    """Return the message if a batch that ran out is not divided, because of an obstacle.

    Args:
        summary, since: as for `nothing_fits`.
        obstacle: result of `division_obstacle`.
    """
    options = ["a smaller batch_size (kerasmem.max_batch_size): training is that of smaller batches", _RECOMPUTE]
    return (
        f"a step ran out of memory: {summary}\nThe batch is not divided: {obstacle}. {_state(since)} "
        f"Options:{_listed(options)}"
    )


def _listed(options: Iterable[str]) -> str:
    return "".join(f"\n  - {option}" for option in options)


def _state(since: int) -> str:
    before = f"{since} steps before it, at the last copy" if since else "before the step"
    return f"The model is as it was {before}."


def _half_precision(model: Any) -> Iterator[str]:
    if getattr(model.dtype_policy, "compute_dtype", None) == "float32":
        yield 'keras.mixed_precision.set_global_policy("mixed_float16") before the model is built'


def _lean_optimizer(model: Any) -> Iterator[str]:
    if model.optimizer is not None and any(variable.shape for variable in model.optimizer.variables):
        name = type(model.optimizer).__name__
        yield f"an optimizer that keeps less than {name}, such as keras.optimizers.SGD"
