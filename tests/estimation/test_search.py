"""The search for what fits: right, with few questions, and honest where memory does not grow steadily."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasmem.estimation.report import Bytes
from kerasmem.estimation.search import MOST_EVALUATIONS, MOST_TRIES, Trial, largest_that_ran, search


def need(total, low=None, high=None):
    return Bytes(int(total), int(total if low is None else low), None if high is None else int(high), *[None] * 7)


class Model:
    """Counts the questions."""

    def __init__(self, bytes_of, spread=0.0):
        self.bytes_of, self.spread, self.asked = bytes_of, spread, []

    def __call__(self, size):
        self.asked.append(size)
        total = self.bytes_of(size)
        return need(total, total * (1 - self.spread), total * (1 + self.spread))


def test_search_ignores_optional_workspace():
    result = search(lambda size: Bytes(size, size, 10 * size, optional_workspace=9 * size), 100, tolerance=0)
    assert result.largest == 100
    assert all(row.high == row.size for row in result.rows)


properties = settings(max_examples=100, deadline=None, derandomize=True)
BASE, SLOPE = st.integers(0, 10**6), st.integers(10, 10**5)
SPREAD = st.sampled_from([0.0, 0.1])


@properties
@given(BASE, SLOPE, st.integers(10**5, 10**8), st.sampled_from([1, 2, 0.7]), SPREAD)
def test_the_answer_is_the_last_that_fits_and_the_first_that_does_not(base, slope, room, power, spread):
    model = Model(lambda size: base + slope * size**power, spread)
    result = search(model, room, tolerance=0, maximum=2**15)
    fits = [size for size in (result.largest, (result.largest or 0) + 1) if size]
    by_hand = [int((base + slope * size**power) * (1 + spread)) <= room for size in fits]
    if result.largest is None:
        assert by_hand == [False]
    else:
        assert result.largest == 2**15 or result.above[0].size == result.largest + 1
        assert by_hand[0]
        assert result.largest == 2**15 or not by_hand[1]
    if result.fails_from is not None:
        assert int((base + slope * result.fails_from**power) * (1 - spread)) > room
        before = result.fails_from - 1
        assert before == 0 or int((base + slope * before**power) * (1 - spread)) <= room
    assert len(model.asked) == len(set(model.asked)) <= MOST_EVALUATIONS


@properties
@given(BASE, SLOPE, st.integers(10**6, 10**8), SPREAD)
def test_search_evaluates_few_sizes_if_memory_is_linear(base, slope, room, spread):
    model = Model(lambda size: base + slope * size, spread)
    search(model, room)
    assert len(model.asked) <= (9 if spread else 7)


def test_search_is_within_its_tolerance():
    def steps(size):  # jumps, as chunks and regions make them
        return (10_000 + 700 * size) * (1 + 0.1 * (size // 37 % 3))

    rough, exact = Model(steps, 0.05), Model(steps, 0.05)
    near, last = search(rough, 5_000_000), search(exact, 5_000_000, tolerance=0)
    assert len(rough.asked) < len(exact.asked)
    assert near.above[0].size - near.largest <= 0.01 * near.largest
    assert last.above[0].size == last.largest + 1
    assert search(Model(lambda size: 100 * size), 5_050).largest == 50  # small sizes are told apart


def test_nothing_fits():
    model = Model(lambda size: 1000 + size)
    result = search(model, 500)
    assert (result.largest, result.fails_from, result.verdict) == (None, 1, "does not fit")
    assert model.asked == [1]
    close = search(Model(lambda size: 1000 + size, 0.5), 1200, tolerance=0)
    assert (close.largest, close.verdict) == (None, "too close to call")
    assert close.fails_from == 1402


def test_nothing_fits_without_an_upper_end():
    result = search(lambda size: need(100 * size, 50 * size), 10_000, tolerance=0)
    assert (result.largest, result.fails_from, result.verdict) == (None, 201, "too close to call")


def test_everything_up_to_the_maximum_fits():
    for maximum in (1, 2, 7, 100):
        model = Model(lambda size: size)
        result = search(model, 10**9, maximum=maximum)
        assert (result.largest, result.fails_from) == (maximum, None)
        assert len(model.asked) <= 3


@properties
@given(st.randoms(use_true_random=False), st.sampled_from([None, 1, 2, 50]))
def test_search_ends_on_noise_with_a_consistent_result(draw, maximum):
    answers = {}

    def ask(size):
        assert size not in answers
        total = draw.randrange(2 * 10**6)
        answers[size] = need(total, total - 50, total + 50)
        return answers[size]

    result = search(ask, 10**6, maximum=maximum)
    assert len(answers) <= MOST_EVALUATIONS
    fitting = [size for size, trial in answers.items() if trial.high <= 10**6]
    assert result.largest == max(fitting, default=None)
    if result.fails_from is not None:
        assert answers[result.fails_from].low > 10**6
        assert result.fails_from > (result.largest or 0)


def test_search_ends_at_the_memory_if_only_the_upper_end_grows():
    asked = []

    def evaluate(size):
        asked.append(size)
        return need(1000 * size, 5, 1100 * size)

    result = search(evaluate, 10**6, grows_from_below=False)
    assert result.largest == 909 and result.fails_from is None
    assert max(asked) <= 1000, "no size far above the memory is evaluated"


def test_every_size_is_a_multiple_of_the_unit():
    model = Model(lambda size: 100 * size)
    result = search(model, 10_000, unit=12, maximum=1000, tolerance=0)
    assert (result.largest, result.fails_from) == (96, 108)
    assert all(size % 12 == 0 for size in model.asked)
    assert search(Model(lambda size: size), 10_000, unit=12, maximum=100).largest == 96


def ran_up_to(most, log):
    def try_size(size):
        log.append(size)
        return Trial(size, size <= most, None, 0)

    return try_size


@pytest.mark.parametrize("fails_from", [65, None])
def test_an_exact_estimate_takes_one_try(fails_from):
    largest, trials = largest_that_ran(ran_up_to(64, []), first=64, fails_from=fails_from)
    assert largest == 64 and [trial.size for trial in trials] == [64]


@properties
@given(st.integers(1, 500), st.none() | st.integers(1, 400), st.integers(0, 900))
def test_the_largest_that_ran_ran_and_no_size_is_tried_twice(first, fails_after, truth):
    log = []
    fails = None if fails_after is None else first + fails_after
    largest, trials = largest_that_ran(ran_up_to(truth, log), first=first, fails_from=fails)
    assert len(log) == len(set(log)) <= MOST_TRIES and [trial.size for trial in trials] == log
    assert all(fails is None or 1 <= size < fails for size in log)
    assert largest == max((size for size in log if size <= truth), default=None)
    assert (largest is None) == (truth < 1)  # it never gives up without having tried the smallest
