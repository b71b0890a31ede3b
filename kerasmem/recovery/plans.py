"""Combinations of changes that fit, each estimated as a whole, and real steps of the first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.errors import KerasmemError
from kerasmem.estimation.probing import DEFAULT_TIMEOUT, try_batch
from kerasmem.estimation.report import DOES_NOT_FIT, FITS, at_most
from kerasmem.recovery.advice import Considered, Remedy
from kerasmem.recovery.changes import Change, make_change
from kerasmem.recovery.estimator import Need, OutOfTimeError, StepEstimator
from kerasmem.recovery.remedies import RemedySearch

MOST_ASKED = 10
WANTED = 3  # combinations
_PIECES = (2, 4, 8, 16, 32, 64)  # into which a batch is divided
STEPS = 3  # that are run of a plan
_OUT_OF_TIME = "the time was over before all combinations were estimated (--budget-seconds, budget_seconds)"
_NOT_COMBINED = {"replicas"}  # more hardware is another answer than fitting this device


def find_plans(search: RemedySearch) -> list[Remedy]:
    """Return the least harmful changes that fit, alone or combined; if none fits, the nearest."""
    estimator = search.estimator
    if estimator.fits_now or not search.changes:
        return []
    offered = list(_options(search))
    changes = {change.key: change for change, _, _ in offered}
    options = [Option(change.key, change.group, change.harm, ratio, change.kind) for change, ratio, _ in offered]
    needs: dict[Combination, Need] = {frozenset(): estimator.estimate(())}
    needs |= {frozenset([change.key]): need for change, _, need in offered if need is not None}
    known = {keys: answer_of(need) for keys, need in needs.items()}

    def ask(keys: Combination) -> Answer | None:
        try:
            needs[keys] = estimator.estimate([changes[key] for key in keys])
        except OutOfTimeError:
            if _OUT_OF_TIME not in search.notes:
                search.notes.append(_OUT_OF_TIME)
            return None
        except KerasmemError as error:
            name = " + ".join(changes[key].name for key in sorted(keys))
            search.considered.append(Considered(name, f"it cannot be estimated: {error}"))
            return None
        return answer_of(needs[keys])

    chosen = search_combinations(options, known, ask, estimator.target.available_bytes)
    return [search.remedy([changes[key] for key in keys], needs[keys]) for keys in chosen]


def _options(search: RemedySearch) -> Iterator[tuple[Change, float, Need | None]]:
    """Yield changes that may be combined, each with its share of the peak and, if estimated, its need.

    Micro-batches and batches come in all powers of two: what those between need is guessed on the line through those
    that were estimated, and estimated before it is told.
    """
    estimator, batch_size = search.estimator, search.estimator.batch_size
    lines: dict[str, list[tuple[float, float]]] = {}
    estimated = set()
    for change in search.changes:
        before = estimator.baseline([change]).bytes
        need = estimator.estimate([change])
        ratio = at_most(need.bytes) / max(at_most(before), 1)
        if change.kind in ("micro_batches", "batch_size"):
            share = 1 / change.value if change.kind == "micro_batches" else change.value / batch_size
            lines.setdefault(change.kind, [(1.0, 1.0)]).append((share, ratio))
        if change.kind not in _NOT_COMBINED and ratio < 1:
            estimated.add(change.key)
            yield change, ratio, need
    for kind, points in lines.items():
        for pieces in (each for each in _PIECES if each <= batch_size):
            change = search.traits.change(kind, pieces if kind == "micro_batches" else batch_size // pieces)
            ratio = _on_the_line(points, 1 / pieces)
            if change.key not in estimated and ratio < 1:
                yield change, ratio, None


def _on_the_line(points: list[tuple[float, float]], share: float) -> float:
    """Return the ratio for a share of the batch on the line through its smallest and largest known.

    Examples:
        >>> _on_the_line([(1.0, 1.0), (0.25, 0.4)], 0.5)
        0.6
    """
    (x0, y0), (x1, y1) = min(points), max(points)
    return y1 if x1 == x0 else round(y0 + (share - x0) * (y1 - y0) / (x1 - x0), 9)


def answer_of(need: Need) -> Answer:
    """Return the most that a step must have, and whether it surely fits."""
    return Answer(need.bytes.most_needed, need.verdict == FITS)


def confirmed(estimator: StepEstimator, plans: Sequence[Remedy], notes: list[str]) -> list[Remedy]:
    """Run the plans until one fits, and move it to the front; those that ran out go to the end.

    Each is run in a process of its own: training steps on a batch of zeros and an evaluation, under the limit of the
    device. A plan of which the estimate says that it does not fit is not run.

    Args:
        estimator: that estimated them.
        plans: the best first.
        notes: where to say why one could not be run.
    """
    waiting, failed = list(plans), []
    while waiting:
        if waiting[0].verdict == DOES_NOT_FIT:
            break
        try:
            first = _ran(estimator, waiting[0])
        except KerasmemError as error:
            notes.append(f"{waiting[0].name}: its steps were not run: {error}")
            break
        if first.verdict == FITS:
            waiting[0] = first
            break
        failed.append(first)
        del waiting[0]
    return [*waiting, *failed]


def _ran(estimator: StepEstimator, plan: Remedy) -> Remedy:
    """Run real steps of a plan and take over their verdict."""
    changes = [make_change(each["kind"], each["value"]) for each in plan.changes]
    limit = estimator.target.available_bytes
    request = estimator.request(changes)
    trial = try_batch(request, request.batch_size, limit, steps=STEPS, last=0, timeout=DEFAULT_TIMEOUT)
    return replace(plan, trial=trial, verdict=FITS if trial.fits else DOES_NOT_FIT)


@dataclass(frozen=True)
class Option:
    """A change that may be combined.

    Attributes:
        key: what tells it from others; keys can be sorted.
        group: options of one group exclude one another.
        kind: more and less of the same thing are of one kind.
        harm: where it stands in the order of harm.
        ratio: the need with it alone, as a share of the need without.
    """

    key: Any
    group: str
    harm: float
    ratio: float
    kind: str = ""


@dataclass(frozen=True)
class Answer:
    """What a combination needs: the upper end in bytes (None: not known), and whether it surely fits."""

    high: int | None
    fits: bool


Combination = frozenset[Any]


def search_combinations(
    options: Sequence[Option],
    known: Mapping[Combination, Answer],
    ask: Callable[[Combination], Answer | None],
    available_bytes: int,
    *,
    wanted: int = WANTED,
    most_asked: int = MOST_ASKED,
) -> list[Combination]:
    """Return the least harmful combinations that fit, at most `wanted`.

    None has another in it, or is more of the same: with batches of 16, batches of 8 say nothing new.

    Args:
        options: what may be combined; those that save nothing are best left out.
        known: what was asked before, the empty combination among it.
        ask: from a combination to what it needs; None where it has no answer.
        available_bytes: what there is.
        wanted: how many are looked for.
        most_asked: how often to ask.

    Returns:
        Those that fit. Where none does, the one of what was asked that needs least, or nothing.

    Examples:
        >>> halves = [Option("a", "a", 1, 0.5), Option("b", "b", 2, 0.5)]
        >>> need = lambda keys: Answer(100 >> len(keys), 100 >> len(keys) <= 30)
        >>> [sorted(each) for each in search_combinations(halves, {frozenset(): Answer(100, False)}, need, 30)]
        [['a', 'b']]
    """
    by_key = {each.key: each for each in options}
    answers: dict[Combination, Answer | None] = dict(known)
    found: list[Combination] = []
    asked = 0

    def harm(keys: Combination) -> float:
        return sum(by_key[key].harm for key in keys)

    def guessed(keys: Combination) -> float:
        return guess(keys, answers, by_key)

    def may_fit(keys: Combination) -> bool:
        if any(_kinds(each, by_key) <= _kinds(keys, by_key) for each in found):
            return False
        return _fits(answers[keys]) if keys in answers else guessed(keys) <= available_bytes

    order = sorted(combinations(options), key=lambda keys: (harm(keys), len(keys), sorted(keys)))
    while len(found) < wanted:
        following = next(filter(may_fit, order), None)
        if following is None and not found:  # to be told that nothing fits, not to guess it
            following = min((keys for keys in order if keys not in answers), key=guessed, default=None)
        if following is None or (following not in answers and asked == most_asked):
            break
        if following not in answers:
            asked += 1
            answers[following] = ask(following)
        if _fits(answers[following]):
            found.append(following)
    return sorted(found, key=harm) or _least(answers, harm)


def _kinds(keys: Combination, options: Mapping[Any, Option]) -> set[Any]:
    return {options[key].kind or key for key in keys}


def _least(answers: Mapping[Combination, Answer | None], harm: Callable[[Combination], float]) -> list[Combination]:
    """Return the combination with the least known need, as a list; empty if none is known."""
    told = {keys: each.high for keys, each in answers.items() if keys and each is not None and each.high is not None}
    return [min(told, key=lambda keys: (told[keys], harm(keys)))] if told else []


def combinations(options: Iterable[Option]) -> list[Combination]:
    """Return every combination with at most one option of a group, the empty one left out."""
    groups: dict[str, list[Any]] = {}
    for each in options:
        groups.setdefault(each.group, [None]).append(each.key)
    every = (frozenset(key for key in chosen if key is not None) for chosen in itertools.product(*groups.values()))
    return [keys for keys in every if keys]


def guess(keys: Combination, answers: Mapping[Combination, Answer | None], options: Mapping[Any, Option]) -> float:
    """Guess the need of a combination from its largest estimated part and the savings of the rest."""
    told = {part: each.high for part, each in answers.items() if each and each.high is not None and part <= keys}
    most = max(map(len, told), default=0)
    nearest = [(part, high) for part, high in told.items() if len(part) == most]
    guesses = (high * math.prod(options[key].ratio for key in keys - part) for part, high in nearest)
    return min(guesses, default=0.0)


def _fits(answer: Answer | None) -> bool:
    return answer is not None and answer.fits
