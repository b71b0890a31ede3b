"""The least harmful changes that fit together: a search that asks seldom, since one answer may take a minute. Pure.

Every combination is put in the order of its harm. What one will need is guessed from the nearest that was asked, times
what the other changes saved when they were asked alone; the guess only decides which combination is asked next, and
nothing is found that was not asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_ASKED = 10
WANTED = 3  # found combinations


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
