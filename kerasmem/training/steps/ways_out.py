"""What to say where even one row of a batch does not fit: why, in bytes, and only what could still help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kerasmem.estimation.report import Outcome
from kerasmem.estimation.verdict import at_most
from kerasmem.training.steps.sizing import Fitting, embedding_variables
from kerasmem.units import format_size

_SMALLER = "a smaller model: fewer or narrower layers, shorter sequences, smaller pictures"
_HELD = {"weights": "weights", "optimizer": "the optimizer", "gradients": "gradients"}


def nothing_fits(summary: str, model: Any, found: Fitting | None, since: int) -> str:
    """Return the message: what ran out, what there is, and what could still help.

    Args:
        summary: what ran out.
        model: that was trained.
        found: what the estimator said of the batch; None where it had no answer.
        since: training steps since the copy that the model went back to.
    """
    ways = "".join(f"\n  - {each}" for each in _ways(model, found))
    return (
        f"not even one row at a time fits: {summary}\n{_figures(found)}A smaller batch cannot help. {_stand(since)} "
        f"What could still help:{ways}"
    )


def no_update_fits(summary: str, model: Any, since: int) -> str:
    """Return the message where the update after the last piece ran out, which takes as much whatever a piece has.

    Args:
        summary: what ran out.
        model: that was trained.
        since: training steps since the copy that the model went back to.
    """
    all_rows = "a smaller batch_size: the gradients of embeddings are kept for each row until then"
    ways = [*([all_rows] if embedding_variables(model) else []), *_lean_optimizer(model, ""), _SMALLER, _larger("")]
    return (
        f"the update of the weights does not fit: {summary}\nIt comes after the last piece of a batch, and smaller "
        f"pieces cannot help. {_stand(since)} What could still help:" + "".join(f"\n  - {each}" for each in ways)
    )


def cannot_divide(summary: str, obstacle: str, since: int, found: Fitting | None) -> str:
    """Return the message where a batch that ran out is not divided.

    Args:
        summary: what ran out.
        obstacle: why not.
        since: training steps since the copy that the model went back to.
        found: what the estimator said of the batch; None where it had no answer.
    """
    fits = found is not None and not found.is_hopeless
    rows = f" ({found.rows} rows {'' if found.is_sure else 'may '}fit by the estimate)" if found and fits else ""
    return (
        f"a step ran out of memory: {summary}\nThe batch is not divided: {obstacle}. {_figures(found)}{_stand(since)} "
        f"Ways on:\n  - a smaller batch_size{rows}: training is that of smaller batches\n"
        '  - kerasmem.fit(…, micro_batches="inexact"): the batch in pieces that are batches of their own, each with an '
        "update, where it runs out; other arithmetic\n"
        "  - kerasmem.recompute(model): activations are computed again in the backward pass; the same result"
    )


def _stand(since: int) -> str:
    before = f"{since} steps before it, at the last copy" if since else "before the step"
    return f"The model is as it was {before}."


def _figures(found: Fitting | None) -> str:
    one = None if found is None else found.one_row
    if found is None or one is None:
        return ""
    parts = [f"{name} {format_size(size)}" for key, name in _HELD.items() if (size := one.categories.get(key))]
    parts += [f"gradients added up {format_size(found.added)}"] if found.added else []
    parts += [f"data and other models {format_size(found.room.other)}"] if found.room.other else []
    return (
        f"By the estimate a step on one row takes {format_size(_need(found, one))} ({', '.join(parts)}), at most "
        f"{format_size(_most(found, one))}, and the device has {format_size(found.room.limit)}. "
    )


def _need(found: Fitting, one: Outcome) -> int:
    return one.total + found.added + found.room.other


def _most(found: Fitting, one: Outcome) -> int:
    return at_most(one) + found.added + found.room.other


def _ways(model: Any, found: Fitting | None) -> Iterator[str]:
    """Yield what could help; where the estimate says that a way alone saves too little, it is left out."""
    import tensorflow as tf

    one = None if found is None else found.one_row
    needs = [] if found is None or one is None else [_need(found, one), _most(found, one)]
    limit = 0 if found is None else found.room.limit
    need = next((each for each in needs if each > limit), None)  # it did not fit
    missing = None if need is None else need - limit
    saved = {} if one is None else one.categories

    def tells(share: float, name: str) -> str | None:
        """Return the bytes that a way saves of a category in words; None where they are too few."""
        size = saved.get(name)
        if missing is None or size is None:
            return ""
        return f" ({format_size(int(size * share))} less at most)" if size * share >= max(missing, 1) else None

    if (text := tells(1, "activations")) is not None:
        yield f"kerasmem.recompute(model): activations are computed again in the backward pass{text}"
    policy = getattr(model.dtype_policy, "compute_dtype", None)
    if policy == "float32" and (text := tells(0.5, "activations")) is not None:
        yield f'keras.mixed_precision.set_global_policy("mixed_float16") before the model is built{text}'
    if (text := tells(1, "optimizer")) is not None:
        yield from _lean_optimizer(model, text)
    yield _SMALLER
    if tf.config.list_physical_devices("GPU"):
        yield "unified memory, slow (docs/guides/advise.md): the host's memory stands in for the card's"
    yield _larger("" if need is None else f" with {format_size(need)} and more for TensorFlow")


def _lean_optimizer(model: Any, saving: str) -> Iterator[str]:
    if model.optimizer is not None and any(each.shape for each in model.optimizer.variables):
        name = type(model.optimizer).__name__
        yield f"an optimizer that keeps less than {name}, such as keras.optimizers.SGD{saving}"


def _larger(size: str) -> str:
    return f"a larger card or limit{size}; other processes on this one ended"
