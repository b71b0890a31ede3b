"""Keras's indices turned into places, as `fit` asks for them."""

from __future__ import annotations

import random

from kerasmem.streaming.passes import Passes


def test_outside_a_pass_an_index_is_a_place():
    passes = Passes(10)
    assert [passes.place(i) for i in (5, 0, 5)] == [5, 0, 5]
    passes.end()
    assert passes.epoch == 0, "fit ends an epoch before its first"


def test_within_a_pass_any_permutation_gives_the_own_order():
    passes = Passes(50)
    for epoch in range(3):
        assert passes.epoch == epoch
        passes.place(0), passes.place(1)
        passes.begin()
        indices = random.Random(epoch).sample(range(50), 50)
        assert [passes.place(i) for i in indices] == list(range(50))
        passes.end()


def test_fewer_steps_than_batches_go_on_with_the_pass():
    passes = Passes(10)
    indices = iter(random.Random(1).sample(range(10), 10))
    places = []
    for _ in range(2):
        passes.begin()
        places += [passes.place(next(indices)) for _ in range(4)]
        passes.end()
        places.append(passes.place(next(indices)))  # TensorFlow's prefetch asks between epochs too
    assert places == list(range(10))


def test_an_interrupted_fit_does_not_spoil_the_next():
    passes = Passes(10)
    passes.begin()
    for index in (0, 1, 2, 3):
        passes.place(index)
    passes.place(0), passes.place(1)  # the next fit looks at two batches
    passes.end()  # and resets
    assert (passes.open, passes.epoch) == (False, 1)
    passes.begin()
    assert sorted(passes.place(i) for i in range(10)) == list(range(10))


def test_even_where_an_interruption_goes_unseen_each_batch_comes_once():
    passes = Passes(10)
    passes.begin()
    for index in (7, 8, 9):
        passes.place(index)
    passes.place(0), passes.place(1)
    passes.end()
    passes.begin()
    assert sorted(passes.place(i) for i in random.Random(0).sample(range(10), 10)) == list(range(10))


def test_restart():
    passes = Passes(4)
    passes.begin()
    passes.place(3)
    passes.restart(7)
    assert passes.epoch == 7
    assert [passes.place(i) for i in (2, 3)] == [0, 1]
