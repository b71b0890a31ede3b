"""Keras's indices turned into places, as `fit` asks for them."""

from __future__ import annotations

import gc
import random

import keras
import numpy as np
import pytest
from streams import RowModel

from kerasmem import H5ChunkSequence
from kerasmem.streaming.passes import Passes


class Reader:
    """As much of Keras's adapter as counts."""

    def __init__(self, shuffle=True):
        self.shuffle = shuffle


def places(passes, reader, indices):
    return [passes.find(reader, index)[1] for index in indices]


def test_outside_a_pass_an_index_is_a_place():
    passes, reader = Passes(10), Reader()
    assert places(passes, reader, (5, 0, 5)) == [5, 0, 5]
    passes.end(reader)
    assert passes.epoch == 0, "fit ends an epoch before its first"


def test_within_a_pass_any_permutation_gives_the_own_order():
    passes, reader = Passes(50), Reader()
    for epoch in range(3):
        assert passes.epoch == epoch
        passes.begin(reader)
        indices = random.Random(epoch).sample(range(50), 50)
        assert places(passes, reader, indices) == list(range(50))
        assert passes.epoch == epoch
        assert passes.end(reader) is not None


def test_fewer_steps_than_batches_go_on_with_the_pass():
    passes, reader = Passes(10), Reader()
    indices = random.Random(1).sample(range(10), 10)
    got = []
    for start in (0, 5):
        passes.begin(reader)
        got += places(passes, reader, indices[start : start + 4])
        passes.end(reader)
        got += places(passes, reader, indices[start + 4 : start + 5])  # prefetched between epochs
    assert got == list(range(10))


def test_nobody_disturbs_another():
    passes, fitting, other = Passes(10), Reader(), Reader(shuffle=False)
    passes.begin(fitting)
    assert places(passes, fitting, (7, 3)) == [0, 1]
    assert places(passes, None, (7, 0)) == [7, 0]
    passes.begin(other, trains=False)
    assert places(passes, other, range(10)) == list(range(10))
    passes.end(other)
    assert passes.epoch == 0, "evaluate uses no epoch up"
    assert places(passes, fitting, (0, 1)) == [2, 3]
    again = Reader()  # the first fit was broken off
    passes.begin(again)
    assert passes.epoch == 1, "the rows it did not come to are not left out each time"
    assert places(passes, again, (9, 8)) == [0, 1]


def test_readers_are_not_kept():
    passes = Passes(10)
    for _ in range(3):
        reader = Reader()
        passes.begin(reader)
        passes.find(reader, 3)
    del reader
    gc.collect()
    assert len(passes._passes) == 0


def test_unshuffled_readers_get_what_they_name():
    passes, reader = Passes(4), Reader(shuffle=False)
    passes.begin(reader)
    assert places(passes, reader, (2, 3)) == [2, 3]


def test_restart():
    passes, reader = Passes(4), Reader()
    passes.begin(reader)
    passes.find(reader, 3)
    passes.restart(7)
    assert passes.epoch == 7
    assert places(passes, reader, (2, 3)) == [0, 1]


def test_a_table_of_places_is_made_only_where_it_is_needed():
    passes = Passes(10**13)
    passes.begin(Reader(shuffle=False))
    assert places(passes, None, [10**12]) == [10**12]


# ---- in Keras

ROWS = 200


@pytest.fixture
def path(numbered):
    return numbered(rows=ROWS, chunks=8)


def stream(path, **settings):
    return H5ChunkSequence(path, batch_size=8, memory_budget="4kB", **settings)


def in_order(model, sequence):
    """Return whether predict gives the rows of a sequence in file order."""
    return np.array_equal(model.predict(sequence, verbose=0)[:, 0], np.arange(ROWS))


class Stop(keras.callbacks.Callback):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch, logs=None):
        if batch == 7:
            self.how(self.model)


def interrupt(model):
    raise KeyboardInterrupt


def finish(model):
    model.stop_training = True


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("how", ["steps", "interrupt", "finish"])
def test_predict_and_index_after_an_unfinished_fit(path, how, workers):
    sequence, model = stream(path, shuffle=False, workers=workers), RowModel()
    if how == "steps":
        model.fit(sequence, steps_per_epoch=10, verbose=0)
    elif how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            model.fit(sequence, callbacks=[Stop(interrupt)], verbose=0)
    else:
        model.fit(sequence, callbacks=[Stop(finish)], verbose=0)
    assert in_order(RowModel(), sequence)
    assert sequence[0][1].tolist() == list(range(8))
    model.trained.clear()
    model.fit(sequence, verbose=0)
    assert model.trained == list(range(ROWS)), "and fit is as before"
    sequence.close()


@pytest.mark.parametrize("workers", [1, 3])
def test_predict_and_evaluate_within_an_epoch_of_fit(path, workers):
    sequence, model, other = stream(path, shuffle=False, workers=workers), RowModel(), RowModel()

    def look(_):
        assert in_order(other, sequence)
        assert sequence[3][1].tolist() == list(range(24, 32))
        other.evaluate(sequence, verbose=0)

    model.fit(sequence, epochs=2, callbacks=[Stop(look)], verbose=0)
    assert model.trained == list(range(ROWS)) * 2
    assert other.tested == list(range(ROWS)) * 2
    sequence.close()


def test_validation_with_the_same_sequence_uses_no_epoch_up(path):
    alone, both = RowModel(), RowModel()
    alone.fit(stream(path), epochs=3, verbose=0)
    sequence = stream(path)
    both.fit(sequence, validation_data=sequence, epochs=3, verbose=0)
    assert both.trained == alone.trained
    assert sequence.epoch == 3
    assert [sorted(both.tested[k * ROWS :][:ROWS]) for k in range(3)] == [list(range(ROWS))] * 3


def test_repeated_short_fits_see_other_rows(path):
    sequence, model = stream(path), RowModel()
    for _ in range(2):
        model.fit(sequence, steps_per_epoch=10, verbose=0)
    assert model.trained[:80] != model.trained[80:]


def test_many_short_epochs_make_whole_passes(path):
    sequence, model = stream(path), RowModel()  # 25 batches
    model.fit(sequence, steps_per_epoch=10, epochs=6, verbose=0)
    assert [sorted(model.trained[k * ROWS :][:ROWS]) for k in range(2)] == [list(range(ROWS))] * 2
    assert model.trained[:ROWS] != model.trained[ROWS : 2 * ROWS]


@pytest.mark.parametrize("shuffle", [True, False])
def test_where_keras_cannot_be_seen_every_row_comes_once(path, shuffle, monkeypatch):
    monkeypatch.setattr("kerasmem.streaming.sequence.find_reader", lambda dataset, asking: None)
    sequence, model = stream(path, shuffle=shuffle), RowModel()
    model.fit(sequence, epochs=2, validation_data=sequence, verbose=0)
    assert [sorted(model.trained[k * ROWS :][:ROWS]) for k in range(2)] == [list(range(ROWS))] * 2
    assert [sorted(model.tested[k * ROWS :][:ROWS]) for k in range(2)] == [list(range(ROWS))] * 2
    if not shuffle:
        assert in_order(model, sequence)
