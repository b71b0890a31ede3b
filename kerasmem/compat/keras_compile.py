"""The arguments of a model's `compile` as the user gave them."""

from __future__ import annotations

from typing import Any


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
