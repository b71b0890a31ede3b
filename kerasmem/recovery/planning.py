"""Changes that fit together, each combination estimated as a whole."""

from __future__ import annotations

from kerasmem.errors import KerasmemError
from kerasmem.estimation.verdict import FITS
from kerasmem.recovery.advice import Considered, Remedy
from kerasmem.recovery.asking import Asker, Need, OutOfTimeError
from kerasmem.recovery.changes import Change
from kerasmem.recovery.inspecting import Facts
from kerasmem.recovery.reviewing import Review, remedy
from kerasmem.recovery.searching import Answer, Combination, Option, search_combinations

MOST_PIECES = 64
_NOT_COMBINED = {"replicas"}  # more hardware is another answer than fitting this device


def find_plans(asker: Asker, facts: Facts, found: Review) -> list[Remedy]:
    """Return the least harmful changes that fit, alone or combined; where none does, what comes nearest."""
    base = asker.base
    if base is None or base.device is None or base.device.verdict == FITS or not found.changes:
        return []
    before = asker.without([])
    changes: dict[str, Change] = {}
    options: list[Option] = []
    needs: dict[Combination, Need] = {}
    known: dict[Combination, Answer] = {frozenset(): _answer(before)}
    for made, ratio, need in _options(asker, facts, found):
        key = _key(made)
        changes[key] = made
        options.append(Option(key, made.group, made.harm, ratio, made.kind))
        if need is not None:
            needs[frozenset([key])] = need
            known[frozenset([key])] = _answer(need)
    stopped = False

    def ask(keys: Combination) -> Answer | None:
        nonlocal stopped
        if stopped:
            return None
        try:
            needs[keys] = asker.ask([changes[key] for key in keys])
        except OutOfTimeError:
            stopped = True
            return None
        except KerasmemError as error:
            name = " + ".join(changes[key].name for key in sorted(keys))
            found.considered.append(Considered(name, f"it cannot be estimated: {error}"))
            return None
        return _answer(needs[keys])

    chosen = search_combinations(options, known, ask, asker.target.available_bytes)
    if stopped:
        found.notes.append("the time was over before all combinations were asked (--budget-seconds, budget_seconds)")
    return [remedy(asker, facts, tuple(changes[key] for key in keys), needs[keys]) for keys in chosen]


def _options(asker: Asker, facts: Facts, found: Review) -> list[tuple[Change, float, Need | None]]:
    """Return what may be combined, with the share of the peak that is left and the answer where it was asked.

    Micro-batches and batches come in all powers of two: what those between need is guessed on the line through those
    that were asked, and asked before it is told.
    """
    rows: list[tuple[Change, float, Need | None]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for made, need in found.changes:
        before, after = asker.without([made]).bytes, need.bytes
        ratio = (after.high or after.total) / max(before.high or before.total, 1)
        if made.kind in ("micro_batches", "batch_size"):
            share = 1 / made.value if made.kind == "micro_batches" else made.value / asker.batch_size
            lines.setdefault(made.kind, [(1.0, 1.0)]).append((share, ratio))
        if made.kind not in _NOT_COMBINED and ratio < 1:
            rows.append((made, ratio, need))
    asked = {made.key for made, _, _ in rows}
    for kind, points in lines.items():
        pieces = 2
        while pieces <= min(MOST_PIECES, asker.batch_size):
            value = pieces if kind == "micro_batches" else asker.batch_size // pieces
            made = facts.change(kind, value)
            ratio = _on_the_line(points, 1 / pieces)
            if made.key not in asked and ratio < 1:
                rows.append((made, ratio, None))
            pieces *= 2
    return rows


def _on_the_line(points: list[tuple[float, float]], share: float) -> float:
    """Return the ratio for a share of the batch on the line through its smallest and largest known.

    Example:
        >>> _on_the_line([(1.0, 1.0), (0.25, 0.4)], 0.5)
        0.6
    """
    (x0, y0), (x1, y1) = min(points), max(points)
    return y1 if x1 == x0 else round(y0 + (share - x0) * (y1 - y0) / (x1 - x0), 9)


def _key(made: Change) -> str:
    return f"{made.kind}={made.value!r}"


def _answer(need: Need) -> Answer:
    return Answer(need.bytes.high, need.verdict == FITS)
