"""How many rows of a batch fit: asked of the estimator, since a trial that runs out costs ten seconds and more.

The allocator waits some ten seconds before it says that it has nothing left, and under XLA a new process must be
started after each failure. Tracing the same step at a few sizes takes a fraction of that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.estimation.live import live_outcome
from kerasmem.estimation.report import Outcome
from kerasmem.estimation.verdict import at_least, at_most
from kerasmem.models.sizes import variable_bytes

MOST_SECONDS = 20.0  # after which no further size is asked for
_MOST_BETWEEN = 3  # sizes that are asked for between one that fits and one that does not
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
        is_sure: whether they surely fit.
        is_in_doubt: whether one row does not surely fit.
        is_hopeless: whether not even one row may fit.
        one_row: the step on one row; None where it was not needed.
        room: what there is.
        added: bytes that a step in pieces takes beside the step itself: its accumulators.
        is_impossible: whether one row cannot fit even on a device that holds nothing else and with kernels that take no
            scratch; what the estimator does not know of another machine's kernels makes no difference then.
    """

    rows: int
    is_sure: bool
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
            outcomes[rows] = live_outcome(model, batch, rows, mode=_MODES[kind])
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
    is_sure = rows in outcomes and not is_in_doubt
    return Fitting(rows, is_sure, is_in_doubt, is_hopeless, one, room, added, is_impossible)


_BOUNDS: tuple[Callable[[Outcome], int], ...] = (at_most, attrgetter("total"), at_least)


def _need(bound: Callable[[Outcome], int], outcome_of: Callable[[int], Outcome], rows: int) -> int:
    return bound(outcome_of(rows))


def _least_held(found: Outcome) -> int:
    return at_least(found) - (found.categories.get("workspace") or 0)


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
    fits, fails, is_above = 1, most, False
    if need(fits) > room:
        return 1
    for _ in range(_MOST_BETWEEN):
        if fails - fits <= max(1, fits // 4):
            break
        slope = (need(fails) - need(fits)) / (fails - fits)
        middle = fits + int((room - need(fits)) / slope) if slope > 0 else (fits + fails) // 2
        middle = min(max(middle, fits + 1), fails - 1, (fits + fails) // 2 if is_above else fails)
        if not has_time():
            return middle
        is_above = need(middle) > room
        if is_above:
            fails = middle
        else:
            fits = middle
    return fits


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
    import keras

    layers = (each for each in flatten_layers(model) if isinstance(each, keras.layers.Embedding))
    return [variable for layer in layers for variable in layer.trainable_variables]
