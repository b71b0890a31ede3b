"""Messages for a step that ran out of memory for good: the figures, and only the options that could still help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kerasmem.estimation.report import Outcome
from kerasmem.estimation.verdict import at_most
from kerasmem.training.steps.sizing import Fitting, embedding_variables
from kerasmem.units import format_size

_SMALLER = "a smaller model: fewer or narrower layers, shorter sequences, smaller pictures"
_HELD = {"weights": "weights", "optimizer": "the optimizer", "gradients": "gradients"}


def nothing_fits(summary: str, model: Any, fitting: Fitting | None, since: int) -> str:
    """Return the message if not even one row fits.

    Args:
        summary: summary of the failure.
        model: the model.
        fitting: the estimate for the batch; None if there is none.
        since: training steps since the copy that the model went back to.
    """
    return (
        f"not even one row at a time fits: {summary}\n{_figures(fitting)}A smaller batch cannot help. "
        f"{_state(since)} Options:{_listed(_options(model, fitting))}"
    )


def no_update_fits(summary: str, model: Any, since: int) -> str:
    """Return the message if the update after the last piece ran out."""
    all_rows = "a smaller batch_size: the gradients of embeddings are kept for each row until then"
    options = [*([all_rows] if embedding_variables(model) else []), *_lean_optimizer(model), _SMALLER, _larger()]
    return (
        f"the update of the weights does not fit: {summary}\nIt comes after the last piece of a batch, and smaller "
        f"pieces cannot help. {_state(since)} Options:{_listed(options)}"
    )


def cannot_divide(summary: str, obstacle: str, since: int, fitting: Fitting | None) -> str:
    """Return the message if a batch that ran out is not divided, because of an obstacle."""
    fits = fitting is not None and not fitting.is_hopeless
    rows = f" ({fitting.rows} rows {'' if fitting.is_sure else 'may '}fit by the estimate)" if fitting and fits else ""
    options = (
        f"a smaller batch_size{rows}: training is that of smaller batches",
        'kerasmem.fit(…, micro_batches="inexact"): each piece of the batch is a batch with its own update, if it runs '
        "out; other arithmetic",
        "kerasmem.recompute(model): activations are computed again in the backward pass; the same result",
    )
    return (
        f"a step ran out of memory: {summary}\nThe batch is not divided: {obstacle}. {_figures(fitting)}"
        f"{_state(since)} Options:{_listed(options)}"
    )


def _listed(options: Iterable[str]) -> str:
    return "".join(f"\n  - {each}" for each in options)


def _state(since: int) -> str:
    before = f"{since} steps before it, at the last copy" if since else "before the step"
    return f"The model is as it was {before}."


def _figures(fitting: Fitting | None) -> str:
    if fitting is None or fitting.one_row is None:
        return ""
    sizes = {name: fitting.one_row.categories.get(key) for key, name in _HELD.items()}
    sizes |= {"gradients added up": fitting.added, "data and other models": fitting.room.other}
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in sizes.items() if size)
    need, most = _needs(fitting, fitting.one_row)
    return (
        f"By the estimate a step on one row takes {format_size(need)} ({parts}), at most {format_size(most)}, and the "
        f"device has {format_size(fitting.room.limit)}. "
    )


def _needs(fitting: Fitting, one: Outcome) -> tuple[int, int]:
    """Return the bytes of a step on one row, and the upper end of the estimate."""
    beside = fitting.added + fitting.room.other
    return one.total + beside, at_most(one) + beside


def _options(model: Any, fitting: Fitting | None) -> Iterator[str]:
    """Yield the options, without those that save too little by the estimate."""
    import tensorflow as tf

    one = None if fitting is None else fitting.one_row
    limit = 0 if fitting is None else fitting.room.limit
    need = next((each for each in _needs(fitting, one) if each > limit), None) if fitting and one else None

    def saving(category: str, share: float = 1.0) -> str | None:
        """Return the saving of an option in words, or None if it is too small."""
        size = None if one is None else one.categories.get(category)
        if need is None or size is None:
            return ""
        return f" ({format_size(int(size * share))} less at most)" if size * share >= need - limit else None

    if (text := saving("activations")) is not None:
        yield f"kerasmem.recompute(model): activations are computed again in the backward pass{text}"
    policy = getattr(model.dtype_policy, "compute_dtype", None)
    if policy == "float32" and (text := saving("activations", 0.5)) is not None:
        yield f'keras.mixed_precision.set_global_policy("mixed_float16") before the model is built{text}'
    if (text := saving("optimizer")) is not None:
        yield from _lean_optimizer(model, text)
    yield _SMALLER
    if tf.config.list_physical_devices("GPU"):
        yield "unified memory, slow: the host's memory stands in for the card's (docs/guides/advise.md)"
    yield _larger("" if need is None else f" with {format_size(need)} and more for TensorFlow")


def _lean_optimizer(model: Any, saving: str = "") -> Iterator[str]:
    if model.optimizer is not None and any(each.shape for each in model.optimizer.variables):
        name = type(model.optimizer).__name__
        yield f"an optimizer that keeps less than {name}, such as keras.optimizers.SGD{saving}"


def _larger(size: str = "") -> str:
    return f"a larger card or limit{size}; other processes on this one ended"
