"""How many rows of a batch fit by the estimate, and the errors if none do.

A trial that runs out costs ten seconds and more: the allocator waits some ten seconds before it says that it has
nothing left, and under XLA a new process must be started after each failure. Tracing the same step at a few sizes takes
a fraction of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.estimation.outcomes import model_outcome
from kerasmem.estimation.report import Outcome, at_most
from kerasmem.estimation.search import bracket, on_the_line
from kerasmem.models.sizes import variable_bytes
from kerasmem.units import format_size

MOST_SECONDS = 20.0  # after which no further size is asked for
_MOST_BETWEEN = 3  # sizes that are asked for between one that fits and one that does not
_SMALLER = "a smaller model: fewer or narrower layers, shorter sequences, smaller pictures"
_LARGER = "a larger card or limit; other processes on this one ended"
_HELD = {"weights": "weights", "optimizer": "the optimizer", "gradients": "gradients"}
_MODES = {"train": "train", "test": "evaluate"}


@dataclass(frozen=True)
class Fitting:
    """The estimate for a batch that ran out.

    Attributes:
        rows: the most rows of a piece that fit; 0 if not even one does.
        is_sure: whether they fit at the upper end of the estimate.
        one_row: the step on one row; None if it was not needed.
        limit: bytes that the device's allocator may hand out.
        other: bytes of it in use beside the model, its optimizer and its metrics, such as pipelines' arrays.
        added: bytes that a step in pieces takes beside the step itself: its accumulators.
    """

    rows: int
    is_sure: bool
    one_row: Outcome | None
    limit: int
    other: int
    added: int

    @property
    def is_impossible(self) -> bool:
        """Whether one row cannot fit even if nothing else is on the device and kernels take no scratch memory."""
        one = self.one_row
        return self.rows == 0 and one is not None and one.bounds[0] - (one.workspace or 0) + self.added > self.limit


def estimate_fitting(
    model: Any,
    kind: str,
    batch: Any,
    most: int,
    limit: int,
    other: int = 0,
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
        limit, other: as for `Fitting`.
        accumulates: whether pieces add up gradients, which they keep meanwhile.
        clock: returns the time in seconds.

    Returns:
        The estimate, or None if the estimator has no answer.
    """
    added = gradient_bytes(model) if accumulates and kind == "train" else 0
    free = limit - other - added
    outcomes: dict[int, Outcome] = {}
    end = clock() + MOST_SECONDS

    def outcome_of(rows: int) -> Outcome:
        if rows not in outcomes:
            outcomes[rows] = model_outcome(model, batch, rows, mode=_MODES[kind])
        return outcomes[rows]

    def rows_within(bound: Callable[[Outcome], int]) -> int:
        return most_rows(lambda rows: bound(outcome_of(rows)), free, most, lambda: clock() < end)

    try:
        surely = rows_within(at_most)
        rows = surely or rows_within(lambda outcome: outcome.total)
    except Exception:  # a size is tried instead, as without an estimator
        return None
    return Fitting(rows, surely > 0, outcomes.get(1), limit, other, added)


def most_rows(need: Callable[[int], int], room: int, most: int, has_time: Callable[[], bool]) -> int:
    """Return the most rows up to `most` that fit, or 0. Pure.

    A few sizes are asked for; if there is no time for more, the answer is between those that were. The first guess is
    on the line. Need jumps if a second row takes other kernels, so that after one that fails the gap is halved.

    Examples:
        >>> most_rows(lambda rows: 100 + 7 * rows, 1000, 512, lambda: True)
        128
        >>> most_rows(lambda rows: 30 if rows == 1 else 50 + rows // 10, 65, 256, lambda: True)
        149
    """
    if need(most) <= room:
        return most
    if most == 1 or need(1) > room:
        return 0

    def between(fits: int | None, fails: int | None) -> int:
        assert fits is not None and fails is not None
        if fails < most:
            return (fits + fails) // 2
        return min(max(on_the_line(fits, need(fits), fails, need(fails), room), fits + 1), fails - 1)

    fits, fails = bracket(
        lambda size: need(size) <= room,
        lambda fits, fails: between(fits, fails) if has_time() else None,
        low=1, high=most, gap=lambda fits: max(1, fits // 4), most=_MOST_BETWEEN,
    )  # fmt: skip
    return fits or 1 if has_time() else between(fits, fails)


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
    options = [
        "kerasmem.recompute(model): activations are computed again in the backward pass",
        *_half_precision(model), *_lean_optimizer(model), _SMALLER, _LARGER,
    ]  # fmt: skip
    return (
        f"not even one row at a time fits: {summary}\n{_figures(fitting)}A smaller batch cannot help. "
        f"{_state(since)} kerasmem.advise(model, device=…) estimates the options:{_listed(options)}"
    )


def no_update_fits(summary: str, model: Any, since: int) -> str:
    """Return the message if the update after the last piece ran out."""
    all_rows = "a smaller batch_size: the gradients of embeddings are kept for each row until then"
    options = [*([all_rows] if embedding_variables(model) else []), *_lean_optimizer(model), _SMALLER, _LARGER]
    return (
        f"the update of the weights does not fit: {summary}\nIt comes after the last piece of a batch, and smaller "
        f"pieces cannot help. {_state(since)} Options:{_listed(options)}"
    )


def cannot_divide(summary: str, obstacle: str, since: int, fitting: Fitting | None) -> str:
    """Return the message if a batch that ran out is not divided, because of an obstacle.

    Args:
        summary, since, fitting: as for `nothing_fits`.
        obstacle: result of `division_obstacle`.
    """
    rows = f" ({fitting.rows} rows fit by the estimate)" if fitting and fitting.rows else ""
    options = (
        f"a smaller batch_size{rows}: training is that of smaller batches",
        "kerasmem.recompute(model): activations are computed again in the backward pass; the same result",
    )
    return (
        f"a step ran out of memory: {summary}\nThe batch is not divided: {obstacle}. {_figures(fitting)}"
        f"{_state(since)} Options:{_listed(options)}"
    )


def _listed(options: Iterable[str]) -> str:
    return "".join(f"\n  - {option}" for option in options)


def _state(since: int) -> str:
    before = f"{since} steps before it, at the last copy" if since else "before the step"
    return f"The model is as it was {before}."


def _figures(fitting: Fitting | None) -> str:
    if fitting is None or fitting.one_row is None:
        return ""
    one, beside = fitting.one_row, fitting.added + fitting.other
    sizes = {name: getattr(one, key) for key, name in _HELD.items()}
    sizes |= {"gradients added up": fitting.added, "data and other models": fitting.other}
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in sizes.items() if size)
    return (
        f"By the estimate a step on one row takes {format_size(one.total + beside)} ({parts}), at most "
        f"{format_size(at_most(one) + beside)}, and the device has {format_size(fitting.limit)}. "
    )


def _half_precision(model: Any) -> Iterator[str]:
    if getattr(model.dtype_policy, "compute_dtype", None) == "float32":
        yield 'keras.mixed_precision.set_global_policy("mixed_float16") before the model is built'


def _lean_optimizer(model: Any) -> Iterator[str]:
    if model.optimizer is not None and any(variable.shape for variable in model.optimizer.variables):
        name = type(model.optimizer).__name__
        yield f"an optimizer that keeps less than {name}, such as keras.optimizers.SGD"
