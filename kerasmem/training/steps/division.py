"""Whether a batch can be divided with the same result."""

from __future__ import annotations

from typing import Any

from kerasmem.compat.keras_fit import is_under_strategy

INEXACT = "inexact"  # `micro_batches`: pieces are batches of their own if the step cannot be divided
MEAN, SUM = "mean", "sum"  # `loss_reduction`
_STEPS = {"train": ("train_step", "make_train_function"), "test": ("test_step", "make_test_function")}


def division_obstacle(model: Any, kind: str, loss_reduction: str | None) -> str | None:
    """Return the reason why a batch cannot be divided with the same result, or None.

    Args:
        model: compiled.
        kind: "train" or "test".
        loss_reduction: "mean" or "sum" if the user states how the model's own `compute_loss` reduces over rows.
    """
    if is_under_strategy(model):
        return f"it was made under {type(model.distribute_strategy).__name__}, which divides batches itself"
    for name in _STEPS[kind]:
        if not _is_keras_own(type(model), name):
            return f"{type(model).__name__} has its own {name}(), whose gradients and updates are not known"
    if loss_reduction is None and has_own_loss(model):
        return (
            f'{type(model).__name__} has its own compute_loss(); state how it reduces over rows: loss_reduction="mean" '
            'or loss_reduction="sum"'
        )
    return None


def has_own_loss(model: Any) -> bool:
    """Return whether the model's class computes its loss in its own way."""
    return not _is_keras_own(type(model), "compute_loss")


def _is_keras_own(cls: type, name: str) -> bool:
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is None or owner.__module__.split(".")[0] == "keras"
