"""The search for combinations that fit: the least harmful first, by few questions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasmem.models.sizes import Bytes
from kerasmem.recovery.estimator import Need
from kerasmem.recovery.plans import Answer, Option, answer_of, combinations, guess, search_combinations

pytestmark = pytest.mark.usefixtures("loaded_python")

BASE = frozenset()


def test_what_a_step_does_without_decides_nothing():
    bytes = Bytes(100, 90, 500, optional_workspace=390)
    assert answer_of(Need(bytes, "fits", "graph")) == Answer(110, True)


def searched(options, limit, *, base=1000, need=None, **settings):
    """Search where each option alone, and so all together, multiply the need; return what was found and asked."""
    by_key = {each.key: each for each in options}

    def of(keys):
        if need is not None:
            return need(keys)
        total = float(base)
        for key in keys:
            total *= by_key[key].ratio
        return total

    asked = []

    def ask(keys):
        asked.append(keys)
        size = of(keys)
        return None if size is None else Answer(int(size), size <= limit)

    known = {BASE: Answer(base, base <= limit)}
    known.update({frozenset([key]): Answer(int(of([key])), of([key]) <= limit) for key in by_key})
    return search_combinations(options, known, ask, limit, **settings), asked


def test_one_change_that_is_enough_is_not_combined():
    options = [Option("mild", "a", 1, 0.4), Option("harsh", "b", 100, 0.3)]
    found, asked = searched(options, 500)
    assert found == [{"mild"}, {"harsh"}]
    assert asked == []


def test_the_least_harmful_combination_comes_first():
    options = [Option("a", "a", 1, 0.7), Option("b", "b", 2, 0.7), Option("c", "c", 1000, 0.4)]
    found, asked = searched(options, 500)
    assert found[0] == {"a", "b"}
    assert {"c"} in found
    assert all(len(each) == 2 for each in asked)


def test_options_of_a_group_exclude_one_another():
    options = [Option("adam", "optimizer", 1, 0.7), Option("sgd", "optimizer", 2, 0.6), Option("half", "dtype", 3, 0.6)]
    assert frozenset({"adam", "sgd"}) not in combinations(options)
    assert len(combinations(options)) == 3 * 2 - 1
    assert searched(options, 400)[0] == [{"sgd", "half"}]


def test_more_of_the_same_is_not_found_again():
    options = [Option("2", "batch", 1, 0.5, "pieces"), Option("4", "batch", 2, 0.25, "pieces")]
    assert searched(options, 600)[0] == [{"2"}]
    assert searched(options, 300)[0] == [{"4"}]


def test_nothing_fits_and_the_nearest_is_asked():
    options = [Option("a", "a", 1, 0.9), Option("b", "b", 2, 0.9)]
    found, asked = searched(options, 100)
    assert found == [{"a", "b"}]
    assert asked == [{"a", "b"}]
    assert search_combinations([], {BASE: Answer(10, False)}, lambda keys: None, 1) == []


def test_what_has_no_answer_is_passed_over():
    options = [Option("a", "a", 1, 0.6), Option("b", "b", 2, 0.6), Option("c", "c", 5, 0.6)]
    refused = frozenset({"a", "b"})
    found, asked = searched(options, 400, need=lambda keys: None if set(keys) == refused else 1000 * 0.6 ** len(keys))
    assert refused in asked
    assert refused not in found
    assert found[0] == {"a", "c"}


def test_a_guess_is_corrected_by_what_was_asked():
    options = {
        each.key: each for each in (Option("a", "a", 1, 0.5), Option("b", "b", 1, 0.5), Option("c", "c", 1, 0.5))
    }
    answers = {BASE: Answer(1000, False), frozenset("a"): Answer(500, False), frozenset("b"): Answer(500, False)}
    assert guess(frozenset("ab"), answers, options) == 250
    answers[frozenset("ab")] = Answer(480, False)  # both save the same
    assert guess(frozenset("abc"), answers, options) == 240


OPTIONS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(1, 999), st.floats(0.3, 0.95)), min_size=1, max_size=12
)


@given(OPTIONS, st.integers(30, 900))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_the_first_is_the_least_harmful_of_all_that_fit(drawn, limit):
    """If changes multiply. Nothing is asked twice."""
    options = [Option(f"{group}{n}", group, harm, ratio) for n, (group, harm, ratio) in enumerate(drawn)]
    by_key = {each.key: each for each in options}

    def harm(keys):
        return sum(by_key[key].harm for key in keys)

    def need(keys):
        return 1000 * math.prod(by_key[key].ratio for key in sorted(keys))

    fitting = [keys for keys in combinations(options) if need(keys) <= limit]
    found, asked = searched(options, limit, need=need, most_estimates=50)
    assert len(asked) == len(set(asked)) <= 50
    if fitting:
        assert harm(found[0]) == min(map(harm, fitting))
        assert all(need(keys) <= limit for keys in found)
    else:
        assert len(found) == 1


def test_it_asks_no_more_often_than_allowed():
    options = [Option(str(n), str(n), n + 1, 0.8) for n in range(8)]
    _, asked = searched(options, 400, need=lambda keys: 950.0, most_estimates=4)
    assert len(asked) <= 4
