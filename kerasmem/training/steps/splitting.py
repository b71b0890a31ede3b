"""Splitting a batch that ran out of memory: whether the result stays the same, the next size, and the final error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from kerasmem.compat.keras_layers import draws_numbers, flatten_layers
from kerasmem.compat.keras_training import has_added_losses

_SHARES = ("rate", "dropout", "recurrent_dropout")
SUMS_PENALTIES = keras.__version__.startswith("3.12.")  # later versions divide activity penalties by the batch
_SMALLER = "a smaller model: fewer or narrower layers, shorter sequences, smaller images"
_LARGER = "a larger card or limit, or fewer other processes on the card"
_RECOMPUTE = "kerasmem.recompute(model): recomputes activations in the backward pass, with the same result"
_STEPS = {
    "train": ("train_step", "make_train_function", "compute_loss"),
    "test": ("test_step", "make_test_function", "compute_loss"),
}


def uneven_layers(model: Any) -> str | None:
    """Return a warning about layers that treat micro-batches differently, or None."""
    layers = flatten_layers(model, include_self=False)
    statistics, random, added = [], [], []
    half = sorted({f"layers in {layer.compute_dtype}" for layer in layers if _sums_in_half(layer)})
    for layer in layers:
        if isinstance(layer, (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)):
            if layer.trainable:
                statistics.append(layer.name)
        elif draws_numbers(layer):
            shares = [getattr(layer, name) for name in _SHARES if hasattr(layer, name)]
            if any(shares) or not shares:  # a GRU has a generator even if it drops nothing
                random.append(layer.name)
        elif SUMS_PENALTIES if layer.activity_regularizer is not None else has_added_losses(layer):
            added.append(layer.name)
    reasons = (
        (statistics, "statistics are those of each micro-batch (unless frozen, or with LayerNormalization)"),
        (random, "each micro-batch draws its own random numbers, which differ from those of the whole batch"),
        (added, "penalties that the layer adds are taken as means over the rows"),
        (half, "gradients are sums over the rows in half precision, which micro-batches round differently"),
    )
    parts = [f"{_list(names)}: {why}" for names, why in reasons if names]
    return "micro-batches give another result than the whole batch for " + "; ".join(parts) if parts else None


def _sums_in_half(layer: Any) -> bool:
    return layer.compute_dtype in ("bfloat16", "float16") and bool(layer.trainable_variables)


def _list(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def division_obstacle(model: Any, kind: str) -> str | None:
    """Return the reason why a batch cannot be divided with the same result, or None.

    Args:
        model: compiled.
        kind: "train" or "test".
    """
    for name in _STEPS[kind]:
        if not _is_keras_own(type(model), name):
            return f"{type(model).__name__} overrides {name}(), so its gradients and updates are unknown"
    return None


def _is_keras_own(cls: type, name: str) -> bool:
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is None or owner.__module__.split(".")[0] == "keras"


class Failure(Protocol):
    """A step that ran out of memory.

    Attributes:
        rows: rows of its pieces.
        is_update: whether the update after the last piece ran out.
        is_certain: whether memory is known to be the reason; a process may have been killed for others.
    """

    rows: int
    is_update: bool
    is_certain: bool


@dataclass(frozen=True)
class GiveUp:
    """No smaller piece helps.

    Attributes:
        is_update: whether the update does not fit.
    """

    is_update: bool = False


class SplitPolicy:
    """Chooses the number of rows per piece after a batch ran out of memory.

    A failure costs ten seconds or more, as TensorFlow's allocator waits. So the driver tries one row first: if that
    runs out too, no smaller piece helps. Then pieces are halved, as larger ones train faster.
    """

    def next(self, failures: Sequence[Failure]) -> int | GiveUp:
        """Return the rows of the next pieces."""
        last = failures[-1]
        if not last.is_certain and len(failures) == 1:
            return last.rows
        if last.is_update or last.rows == 1:
            return GiveUp(last.is_update)
        return -(-last.rows // 2)


def nothing_fits(summary: str, model: Any, since: int) -> str:
    """Return the error message for a step that does not fit even with one row.

    Args:
        summary: summary of the failure.
        model: the model.
        since: training steps since the restored copy.
    """
    options = [_RECOMPUTE, *_half_precision(model), *_lean_optimizer(model), _SMALLER, _LARGER]
    return (
        f"not even one row fits: {summary}\nA smaller batch cannot help. {_state(since)} "
        f"kerasmem.advise(model, device=…) estimates the options:{_bullets(options)}"
    )


def no_update_fits(summary: str, model: Any, since: int) -> str:
    """Return the error message for an update that ran out of memory after the last piece."""
    all_rows = "a smaller batch_size, as the gradients of embeddings are kept for each row until the update"
    has_embeddings = any(isinstance(layer, keras.layers.Embedding) for layer in flatten_layers(model))
    options = [*([all_rows] if has_embeddings else []), *_lean_optimizer(model), _SMALLER, _LARGER]
    return (
        f"the optimizer update does not fit in memory: {summary}\nSmaller pieces of the batch cannot help. "
        f"{_state(since)} Options:{_bullets(options)}"
    )


def cannot_divide(summary: str, obstacle: str, since: int) -> str:
    """Return the error message for a batch that ran out of memory and cannot be divided.

    Args:
        summary, since: as for `nothing_fits`.
        obstacle: result of `division_obstacle`.
    """
    options = ["a smaller batch_size (kerasmem.max_batch_size), which changes the training", _RECOMPUTE]
    return (
        f"a step ran out of memory: {summary}\nThe batch is not divided: {obstacle}. {_state(since)} "
        f"Options:{_bullets(options)}"
    )


def _bullets(options: Iterable[str]) -> str:
    return "".join(f"\n  - {option}" for option in options)


def _state(since: int) -> str:
    before = f"{since} steps earlier, at the last copy" if since else "before the step"
    return f"The model is as it was {before}."


def _half_precision(model: Any) -> Iterator[str]:
    if getattr(model.dtype_policy, "compute_dtype", None) == "float32":
        yield 'keras.mixed_precision.set_global_policy("mixed_float16") before the model is built'


def _lean_optimizer(model: Any) -> Iterator[str]:
    if model.optimizer is not None and any(variable.shape for variable in model.optimizer.variables):
        name = type(model.optimizer).__name__
        yield f"an optimizer with fewer variables than {name}, such as keras.optimizers.SGD"
