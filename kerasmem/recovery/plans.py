"""Combinations of changes that fit, each estimated as a whole, and real steps of the first.

The search is pure, and estimates few combinations, as one estimate may take a minute. Combinations are sorted by harm.
The need of one is guessed from the nearest estimated one, times the savings of the other changes. A guess only decides
which combination is estimated next; every result is an estimate.
"""

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

MOST_ESTIMATES = 10
MOST_PLANS = 3  # combinations
_PIECES = (2, 4, 8, 16, 32, 64)  # of a batch
STEPS = 3  # real steps of a plan
_OUT_OF_TIME = "not all combinations were estimated within --budget-seconds (budget_seconds)"
_NOT_COMBINED = {"replicas"}  # more hardware does not make the step fit this device


def find_plans(search: RemedySearch) -> list[Remedy]:
    """Return the least harmful single or combined changes that fit, or the nearest if none fits."""
    estimator = search.estimator
    if estimator.fits_now or not search.changes:
        return []
    candidates = list(_options(search))
    changes = {change.key: change for change, _, _ in candidates}
    options = [Option(change.key, change.group, change.harm, ratio, change.kind) for change, ratio, _ in candidates]
    needs: dict[Combination, Need] = {frozenset(): estimator.estimate(())}
    needs |= {frozenset([change.key]): need for change, _, need in candidates if need is not None}
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

    plans = search_combinations(options, known, ask, estimator.target.available_bytes)
    return [search.remedy([changes[key] for key in keys], needs[keys]) for keys in plans]


def _options(search: RemedySearch) -> Iterator[tuple[Change, float, Need | None]]:
    """Yield changes that may be combined, each with its share of the peak and, if estimated, its need.

    Micro-batches and batches come in all powers of two. The need of those in between is interpolated, and estimated
    before it is reported.
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
        for pieces in (count for count in _PIECES if count <= batch_size):
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
    """Return the upper end of a need, and whether it surely fits."""
    return Answer(need.bytes.most_needed, need.verdict == FITS)


def confirm_plans(estimator: StepEstimator, plans: Sequence[Remedy], notes: list[str]) -> list[Remedy]:
    """Run the plans until one fits, and move it to the front. Plans that ran out move to the end.

    Each runs in a separate process: training steps on a batch of zeros and an evaluation, under the limit of the
    device. Plans that do not fit by the estimate are not run.

    Args:
        estimator: estimator of the plans.
        plans: plans, the best first.
        notes: list that receives the reason if a plan cannot be run.
    """
    waiting, failed = list(plans), []
    while waiting:
        if waiting[0].verdict == DOES_NOT_FIT:
            break
        try:
            first = _run_plan(estimator, waiting[0])
        except KerasmemError as error:
            notes.append(f"{waiting[0].name}: its steps were not run: {error}")
            break
        if first.verdict == FITS:
            waiting[0] = first
            break
        failed.append(first)
        del waiting[0]
    return [*waiting, *failed]


def _run_plan(estimator: StepEstimator, plan: Remedy) -> Remedy:
    """Run real steps of a plan, and return it with their verdict."""
    changes = [make_change(change["kind"], change["value"]) for change in plan.changes]
    limit = estimator.target.available_bytes
    request = estimator.request(changes)
    trial = try_batch(request, request.samples, limit, steps=STEPS, last=0, timeout=DEFAULT_TIMEOUT)
    return replace(plan, trial=trial, verdict=FITS if trial.fits else DOES_NOT_FIT)


@dataclass(frozen=True)
class Option:
    """A change that may be combined.

    Attributes:
        key: identity; keys can be sorted.
        group: group of options that exclude one another.
        harm: rank in the order of harm.
        ratio: need with only this change, relative to the need without.
        kind: kind shared by degrees of one change.
    """

    key: Any
    group: str
    harm: float
    ratio: float
    kind: str = ""


@dataclass(frozen=True)
class Answer:
    """The estimate of a combination: the upper end in bytes (None if unknown), and if it surely fits."""

    high: int | None
    fits: bool


Combination = frozenset[Any]


def search_combinations(
    options: Sequence[Option],
    known: Mapping[Combination, Answer],
    ask: Callable[[Combination], Answer | None],
    available_bytes: int,
    *,
    count: int = MOST_PLANS,
    most_estimates: int = MOST_ESTIMATES,
) -> list[Combination]:
    """Return the least harmful combinations that fit, at most `count`.

    No combination includes another or is a higher degree of it: if batches of 16 fit, batches of 8 are left out.

    Args:
        options: changes that may be combined; leave out those that save nothing.
        known: previous answers, including the empty combination.
        ask: function from a combination to its estimate, or None if there is none.
        available_bytes: memory of the device.
        count: maximum number of combinations. Defaults to 3.
        most_estimates: maximum number of calls of `ask`. Defaults to 10.

    Returns:
        Combinations that fit; if none does, the estimated one with the least need, or an empty list.

    Examples:
        >>> halves = [Option("a", "a", 1, 0.5), Option("b", "b", 2, 0.5)]
        >>> need = lambda keys: Answer(100 >> len(keys), 100 >> len(keys) <= 30)
        >>> [sorted(keys) for keys in search_combinations(halves, {frozenset(): Answer(100, False)}, need, 30)]
        [['a', 'b']]
    """
    by_key = {option.key: option for option in options}
    answers: dict[Combination, Answer | None] = dict(known)
    fitting: list[Combination] = []
    calls = 0

    def harm(keys: Combination) -> float:
        return sum(by_key[key].harm for key in keys)

    def guess_bytes(keys: Combination) -> float:
        return guess(keys, answers, by_key)

    def may_fit(keys: Combination) -> bool:
        if any(_kinds(smaller, by_key) <= _kinds(keys, by_key) for smaller in fitting):
            return False
        return _fits(answers[keys]) if keys in answers else guess_bytes(keys) <= available_bytes

    order = sorted(combinations(options), key=lambda keys: (harm(keys), len(keys), sorted(keys)))
    while len(fitting) < count:
        following = next(filter(may_fit, order), None)
        if following is None and not fitting:  # estimate that nothing fits instead of guessing it
            following = min((keys for keys in order if keys not in answers), key=guess_bytes, default=None)
        if following is None or (following not in answers and calls == most_estimates):
            break
        if following not in answers:
            calls += 1
            answers[following] = ask(following)
        if _fits(answers[following]):
            fitting.append(following)
    return sorted(fitting, key=harm) or _least(answers, harm)


def _kinds(keys: Combination, options: Mapping[Any, Option]) -> set[Any]:
    return {options[key].kind or key for key in keys}


def _least(answers: Mapping[Combination, Answer | None], harm: Callable[[Combination], float]) -> list[Combination]:
    """Return a list of the combination with the least known need, or an empty list."""
    needs = _known_needs({keys: answer for keys, answer in answers.items() if keys})
    return [min(needs, key=lambda keys: (needs[keys], harm(keys)))] if needs else []


def _known_needs(answers: Mapping[Combination, Answer | None]) -> dict[Combination, int]:
    return {keys: answer.high for keys, answer in answers.items() if answer is not None and answer.high is not None}


def combinations(options: Iterable[Option]) -> list[Combination]:
    """Return every combination with at most one option of a group, except the empty one."""
    groups: dict[str, list[Any]] = {}
    for option in options:
        groups.setdefault(option.group, [None]).append(option.key)
    every = (frozenset(key for key in keys if key is not None) for keys in itertools.product(*groups.values()))
    return [keys for keys in every if keys]


def guess(keys: Combination, answers: Mapping[Combination, Answer | None], options: Mapping[Any, Option]) -> float:
    """Guess the need of a combination from its largest estimated part and the savings of the rest."""
    needs = _known_needs({part: answer for part, answer in answers.items() if part <= keys})
    most = max(map(len, needs), default=0)
    nearest = [(part, high) for part, high in needs.items() if len(part) == most]
    guesses = (high * math.prod(options[key].ratio for key in keys - part) for part, high in nearest)
    return min(guesses, default=0.0)


def _fits(answer: Answer | None) -> bool:
    return answer is not None and answer.fits
