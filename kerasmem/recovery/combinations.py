"""The least harmful changes that fit together: a search that asks seldom, since one answer may take a minute. Pure.

Every combination is put in the order of its harm. What one will need is guessed from the nearest that was asked, times
what the other changes saved when they were asked alone; the guess only decides which combination is asked next, and
nothing is found that was not asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

MOST_ASKED = 10
WANTED = 3  # found combinations


@dataclass(frozen=True)
class Option:
    """A change that may be combined.

    Attributes:
        key: what it is called here.
        group: options of one group exclude one another.
        kind: more and less of the same thing are of one kind.
        harm: where it stands in the order of harm.
        ratio: the need with it alone, as a share of the need without.
    """

    key: str
    group: str
    harm: float
    ratio: float
    kind: str = ""


@dataclass(frozen=True)
class Answer:
    """What a combination needs: the upper end in bytes (None: not known), and whether it surely fits."""

    high: int | None
    fits: bool


Combination = frozenset[str]


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

    Example:
        >>> halves = [Option("a", "a", 1, 0.5), Option("b", "b", 2, 0.5)]
        >>> need = lambda keys: Answer(100 >> len(keys), 100 >> len(keys) <= 30)
        >>> [sorted(each) for each in search_combinations(halves, {frozenset(): Answer(100, False)}, need, 30)]
        [['a', 'b']]
    """
    by_key = {each.key: each for each in options}
    answers: dict[Combination, Answer | None] = dict(known)
    order = sorted(combinations(options), key=lambda keys: (_harm(keys, by_key), len(keys), sorted(keys)))
    found: list[Combination] = []
    asked = 0
    while len(found) < wanted and asked <= most_asked:
        following = _next(order, found, answers, by_key, available_bytes)
        if following is None and not found and asked < most_asked:
            following = _strongest(order, answers, by_key)  # to be told that nothing fits, not to guess it
        if following is None:
            break
        if following not in answers:
            asked += 1
            if asked > most_asked:
                break
            answers[following] = ask(following)
        answer = answers[following]
        if answer is not None and answer.fits:
            found.append(following)
    if found:
        return sorted(found, key=lambda keys: _harm(keys, by_key))
    told = {keys: each.high for keys, each in answers.items() if keys and each is not None and each.high is not None}
    return [min(told, key=lambda keys: (told[keys], _harm(keys, by_key)))] if told else []


def combinations(options: Iterable[Option]) -> list[Combination]:
    """Return every combination with at most one option of a group, the empty one left out."""
    groups: dict[str, list[str | None]] = {}
    for each in options:
        groups.setdefault(each.group, [None]).append(each.key)
    every = (frozenset(key for key in chosen if key is not None) for chosen in itertools.product(*groups.values()))
    return [keys for keys in every if keys]


def guess(keys: Combination, answers: Mapping[Combination, Answer | None], options: Mapping[str, Option]) -> float:
    """Return what a combination may need, from the largest part of it that was asked and what the rest saves alone."""
    parts = [
        (len(part), each.high) for part, each in answers.items() if each and each.high is not None and part <= keys
    ]
    most = max((size for size, _ in parts), default=0)
    if not parts:
        return 0.0
    guesses = []
    for part, each in answers.items():
        if each is not None and each.high is not None and part <= keys and len(part) == most:
            need = float(each.high)
            for key in keys - part:
                need *= options[key].ratio
            guesses.append(need)
    return min(guesses)


def _next(
    order: Sequence[Combination],
    found: Sequence[Combination],
    answers: Mapping[Combination, Answer | None],
    options: Mapping[str, Option],
    available_bytes: int,
) -> Combination | None:
    """Return the least harmful combination that may fit and is not yet settled."""
    settled = [{options[key].kind or key for key in each} for each in found]
    for keys in order:
        if any(each <= {options[key].kind or key for key in keys} for each in settled):
            continue
        if keys in answers:
            answer = answers[keys]
            if answer is not None and answer.fits:
                return keys
        elif guess(keys, answers, options) <= available_bytes:
            return keys
    return None


def _strongest(
    order: Sequence[Combination], answers: Mapping[Combination, Answer | None], options: Mapping[str, Option]
) -> Combination | None:
    left = [keys for keys in order if keys not in answers]
    return min(left, key=lambda keys: guess(keys, answers, options), default=None)


def _harm(keys: Iterable[str], options: Mapping[str, Option]) -> float:
    return sum(options[key].harm for key in keys)
