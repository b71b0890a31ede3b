"""How many rows of a batch fit by the estimate, and the errors if none do.

A trial that runs out costs ten seconds and more: the allocator waits some ten seconds before it says that it has
nothing left, and under XLA a new process must be started after each failure. Tracing the same step at a few sizes takes
a fraction of that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import keras
import tensorflow as tf

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.estimation.outcomes import model_outcome
from kerasmem.estimation.report import Outcome, at_most
from kerasmem.estimation.search import bracket, on_the_line
from kerasmem.models.sizes import variable_bytes
from kerasmem.units import format_size

MOST_SECONDS = 20.0  # after which no further size is asked for
_MOST_BETWEEN = 3  # sizes that are asked for between one that fits and one that does not
_SMALLER = "a smaller model: fewer or narrower layers, shorter sequences, smaller pictures"
_HELD = {"weights": "weights", "optimizer": "the optimizer", "gradients": "gradients"}
_MODES = {"train": "train", "test": "evaluate"}


@dataclass(frozen=True)
class Room:
    """What a step has.

    Attributes:
        limit: bytes that the device's allocator may hand out.
        other: bytes of it that are in use beside the model, its optimizer and its metrics, such as `fit`'s own copy of
            the arrays.
    """

    limit: int
    other: int = 0


@dataclass(frozen=True)
class Fitting:
    """What the estimator says of a batch that ran out.

    Attributes:
        rows: the most rows of a piece that surely fit; if none do, those that may fit, on the line between one row
            and the most that were asked about.
        is_in_doubt: whether one row does not surely fit.
        is_hopeless: whether not even one row may fit.
        one_row: the step on one row; None where it was not needed.
        room: what there is.
        added: bytes that a step in pieces takes beside the step itself: its accumulators.
        is_impossible: whether one row cannot fit even on a device that holds nothing else and with kernels that take no
            scratch; what the estimator does not know of another machine's kernels makes no difference then.
    """

    rows: int
    is_in_doubt: bool
    is_hopeless: bool
    one_row: Outcome | None
    room: Room
    added: int
    is_impossible: bool = False


def estimate_fitting(
    model: Any,
    kind: str,
    batch: Any,
    most: int,
    room: Room,
    *,
    accumulates: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Fitting | None:
    """Estimate how many rows of the model's own step fit, up to `most`.

    Args:
        model: compiled and built.
        kind: "train" or "test".
        batch: batch that ran out.
        most: maximum rows.
        room: memory of the step.
        accumulates: whether pieces add up gradients, which they keep meanwhile.
        clock: returns the time in seconds.

    Returns:
        The estimate, or None if the estimator has no answer.
    """
    added = gradient_bytes(model) if accumulates and kind == "train" else 0
    free = room.limit - room.other - added
    outcomes: dict[int, Outcome] = {}
    end = clock() + MOST_SECONDS

    def outcome_of(rows: int) -> Outcome:
        if rows not in outcomes:
            outcomes[rows] = model_outcome(model, batch, rows, mode=_MODES[kind])
        return outcomes[rows]

    for bound in _BOUNDS:
        need = partial(_need, bound, outcome_of)
        try:
            rows = most_rows(need, free, most, lambda: clock() < end)
        except Exception:  # a size is tried instead, as without an estimator
            return None
        is_hopeless = rows in outcomes and bound(outcomes[rows]) > free
        if not is_hopeless:
            break
    one, is_in_doubt = outcomes.get(1), is_hopeless or bound is not at_most
    is_impossible = is_hopeless and one is not None and _least_held(one) + added > room.limit
    return Fitting(rows, is_in_doubt, is_hopeless, one, room, added, is_impossible)


def _least(outcome: Outcome) -> int:
    return outcome.bounds[0]


_BOUNDS: tuple[Callable[[Outcome], int], ...] = (at_most, attrgetter("total"), _least)


def _need(bound: Callable[[Outcome], int], outcome_of: Callable[[int], Outcome], rows: int) -> int:
    return bound(outcome_of(rows))


def _least_held(found: Outcome) -> int:
    return _least(found) - (found.workspace or 0)


def most_rows(need: Callable[[int], int], room: int, most: int, has_time: Callable[[], bool]) -> int:
    """Return the most rows up to `most` that fit, or 1. Pure.

    A few sizes are asked for; if there is no time for more, the answer is on the line between those that were. What
    a step takes is no line: it jumps if a second row needs other kernels, and grows slowly from there. So after a
    size on the line that does not fit no more than half of what is left is asked for.

    Examples:
        >>> most_rows(lambda rows: 100 + 7 * rows, 1000, 512, lambda: True)
        128
        >>> most_rows(lambda rows: 30 if rows == 1 else 50 + rows // 10, 65, 256, lambda: True)
        155
    """
    if most == 1 or need(most) <= room:
        return most
    if need(1) > room:
        return 1
    tried: list[int] = []
    untried: list[int] = []

    def guess(fits: int | None, fails: int | None) -> int | None:
        assert fits is not None and fails is not None
        middle = on_the_line(fits, need(fits), fails, need(fails), room)
        was_above = bool(tried) and need(tried[-1]) > room
        middle = min(max(middle, fits + 1), fails - 1, (fits + fails) // 2 if was_above else fails)
        if not has_time():
            untried.append(middle)
            return None
        tried.append(middle)
        return middle

    rows, _ = bracket(
        lambda size: need(size) <= room, guess, low=1, high=most, gap=lambda fits: max(1, fits // 4), most=_MOST_BETWEEN
    )
    return untried[0] if untried else rows or 1


def even_rows(rows: int, most: int) -> int:
    """Return the rows of a piece if a batch is divided into pieces of `most` at most, about even.

    All of one size are worth up to twice the pieces: each size of a piece is traced, and compiled, by itself.

    Examples:
        >>> even_rows(2048, 845), even_rows(23, 10)
        (512, 8)
    """
    whole = next((size for size in range(most, most // 2, -1) if rows % size == 0), None)
    return whole or -(-rows // math.ceil(rows / most))


def gradient_bytes(model: Any) -> int:
    """Return the bytes of the accumulated gradients, without those of embeddings."""
    embeddings = set(map(id, embedding_variables(model)))
    return sum(variable_bytes(each) for each in model.trainable_variables if id(each) not in embeddings)


def embedding_variables(model: Any) -> list[Any]:
    """Return the weights of embeddings, which have slices as gradients."""
    layers = (each for each in flatten_layers(model) if isinstance(each, keras.layers.Embedding))
    return [variable for layer in layers for variable in layer.trainable_variables]


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


def cannot_divide(summary: str, obstacle: str, since: int, fitting: Fitting | None, *, is_spread: bool) -> str:
    """Return the message if a batch that ran out is not divided, because of an obstacle.

    Args:
        is_spread: whether the model is under a strategy, which takes no micro-batches.
        summary, since, fitting: as for `nothing_fits`.
        obstacle: result of `division_obstacle`.
    """
    fits = fitting is not None and not fitting.is_hopeless
    rows = (
        f" ({fitting.rows} rows {'may ' if fitting.is_in_doubt else ''}fit by the estimate)" if fitting and fits else ""
    )
    inexact = (
        'kerasmem.fit(…, micro_batches="inexact"): pieces with an update each if a batch runs out; other arithmetic'
    )
    options = (
        f"a smaller batch_size{rows}: training is that of smaller batches",
        *(() if is_spread else (inexact,)),
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
    sizes = {name: getattr(fitting.one_row, key) for key, name in _HELD.items()}
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
    one = None if fitting is None else fitting.one_row
    limit = 0 if fitting is None else fitting.room.limit
    need = next((each for each in _needs(fitting, one) if each > limit), None) if fitting and one else None

    def saving(category: str, share: float = 1.0) -> str | None:
        """Return the saving of an option in words, or None if it is too small."""
        size = None if one is None else getattr(one, category)
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
