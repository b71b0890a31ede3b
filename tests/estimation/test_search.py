"""The search for what fits: right, with few questions, and honest where memory does not grow steadily."""

from __future__ import annotations

import random

import pytest

from kerasmem.errors import InputError, UsageError
from kerasmem.estimation.report import Bytes
from kerasmem.estimation.search import MOST_EVALUATIONS, SearchResult, search


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


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("power", [1, 2, 0.7])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_the_answer_is_the_last_that_fits_and_the_first_that_does_not(seed, power, spread):
    draw = random.Random(seed)
    base, slope, room = draw.randrange(10**6), draw.randrange(10, 10**5), draw.randrange(10**5, 10**8)
    model = Model(lambda size: base + slope * size**power, spread)
    found = search(model, room, tolerance=0, maximum=2**15)
    fits = [size for size in (found.largest, (found.largest or 0) + 1) if size]
    by_hand = [int((base + slope * size**power) * (1 + spread)) <= room for size in fits]
    if found.largest is None:
        assert by_hand == [False]
    else:
        assert found.is_exact
        assert by_hand[0]
        assert found.largest == 2**15 or not by_hand[1]
    if found.fails_from is not None:
        assert int((base + slope * found.fails_from**power) * (1 - spread)) > room
        before = found.fails_from - 1
        assert before == 0 or int((base + slope * before**power) * (1 - spread)) <= room
    assert len(model.asked) == len(set(model.asked)) <= MOST_EVALUATIONS


def test_few_questions_where_memory_grows_in_proportion():
    for spread, most in ((0.0, 7), (0.1, 9)):
        for seed in range(200):
            draw = random.Random(seed)
            base, slope, room = draw.randrange(10**6), draw.randrange(10, 10**5), draw.randrange(10**6, 10**8)
            model = Model(lambda size, base=base, slope=slope: base + slope * size, spread)
            search(model, room)
            assert len(model.asked) <= most


def test_within_one_percent_unless_asked_for_the_last():
    def steps(size):  # jumps, as chunks and regions make them
        return (10_000 + 700 * size) * (1 + 0.1 * (size // 37 % 3))

    rough, exact = Model(steps, 0.05), Model(steps, 0.05)
    near, last = search(rough, 5_000_000), search(exact, 5_000_000, tolerance=0)
    assert len(rough.asked) < len(exact.asked)
    assert near.next_asked - near.largest <= 0.01 * near.largest
    assert last.is_exact
    assert search(Model(lambda size: 100 * size), 5_050).largest == 50  # small sizes are told apart


def test_nothing_fits():
    model = Model(lambda size: 1000 + size)
    found = search(model, 500)
    assert (found.largest, found.fails_from, found.verdict) == (None, 1, "does not fit")
    assert model.asked == [1]
    close = search(Model(lambda size: 1000 + size, 0.5), 1200)
    assert (close.largest, close.verdict) == (None, "too close to call")
    assert close.fails_from == 1402


def test_no_upper_end_is_never_said_to_fit():
    found = search(lambda size: need(100 * size, 50 * size), 10_000)
    assert (found.largest, found.fails_from, found.verdict) == (None, 201, "too close to call")


def test_everything_up_to_the_maximum_fits():
    for maximum in (1, 2, 7, 100):
        model = Model(lambda size: size)
        found = search(model, 10**9, maximum=maximum)
        assert (found.largest, found.fails_from, found.is_exact) == (maximum, None, True)
        assert len(model.asked) <= 3


def test_constant_and_falling_needs_end():
    for bytes_of in (lambda size: 500, lambda size: max(1000 - size, 1)):
        for room in (100, 700, 5000):
            model = Model(bytes_of)
            found = search(model, room, maximum=10_000)
            assert len(model.asked) <= MOST_EVALUATIONS
            assert found.largest is None or bytes_of(found.largest) <= room


@pytest.mark.parametrize("seed", range(300))
def test_noise_neither_loops_nor_lies(seed):
    draw = random.Random(seed)
    answers = {}

    def ask(size):
        assert size not in answers
        total = draw.randrange(2 * 10**6)
        answers[size] = need(total, total - 50, total + 50)
        return answers[size]

    found = search(ask, 10**6, maximum=draw.choice([None, 1, 2, 50]))
    assert len(answers) <= MOST_EVALUATIONS
    fitting = [size for size, each in answers.items() if each.high <= 10**6]
    assert found.largest == max(fitting, default=None)
    assert found.is_steady == all(answers[size].high <= 10**6 for size in answers if size < (found.largest or 0))
    if found.fails_from is not None:
        assert answers[found.fails_from].low > 10**6
        assert found.fails_from > (found.largest or 0)


def test_steps_and_ranges():
    model = Model(lambda size: 10 * size)
    found = search(model, 1000, minimum=8, step=8)
    assert found.largest == 96
    assert all(size % 8 == 0 for size in model.asked)
    for options, message in [({"minimum": 0}, "minimum 0"), ({"step": 0}, "step 0"), ({"maximum": 0}, "less than")]:
        with pytest.raises(UsageError, match=message):
            search(model, 1000, **options)


def test_an_error_of_one_size_is_not_swallowed():
    def ask(size):
        if size > 40:
            raise UsageError(f"size {size}")
        return need(size, size, size)

    with pytest.raises(UsageError, match="size"):
        search(ask, 100)


def test_only_results_are_read_back():
    with pytest.raises(InputError, match="format_version"):
        SearchResult.from_dict({"format_version": 9})
    with pytest.raises(InputError, match=r"not a kerasmem search"):
        SearchResult.from_dict({"format_version": 1})


def test_few_questions_where_chunks_make_steps():
    def steps(size):  # what a small convnet took: 38 MB at 32, 1.84 GB at 8,209, 5.72 GB at 27,020
        return 22 * 2**20 + 212_000 * size * (1 + 0.02 * (size // 211 % 3))

    for room in (10**9, 2 * 10**9, 4 * 10**9, 6 * 10**9, 8 * 10**9):
        model = Model(steps, 0.2)
        found = search(model, room)
        assert len(model.asked) <= 11
        assert found.next_asked - found.largest <= 0.01 * found.largest
        assert found.fails_from is not None
