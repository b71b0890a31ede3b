"""Positions of the readers of a sequence, as Keras uses them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from streams import RowModel

from kerasmem import H5ChunkSequence

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


def test_set_epoch_between_epochs_of_steps_loses_no_batch(path, recwarn):
    class Again(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            sequence.set_epoch(5)

    sequence, model = stream(path), RowModel()
    model.fit(sequence, epochs=3, steps_per_epoch=10, callbacks=[Again()], verbose=0)
    assert len(model.trained) == 3 * 10 * 8
    assert model.trained[-8:] in [sequence.batch_rows(batch, 5).tolist() for batch in range(25)]
    assert not [warning for warning in recwarn if "ran out of data" in str(warning.message)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_a_reader_of_keras_every_row_comes_once(path, shuffle, monkeypatch):
    monkeypatch.setattr("kerasmem.streaming.sequence.attach_reader", lambda dataset, make_reader: None)
    sequence, model = stream(path, shuffle=shuffle), RowModel()
    model.fit(sequence, epochs=2, validation_data=sequence, verbose=0)
    assert [sorted(model.trained[k * ROWS :][:ROWS]) for k in range(2)] == [list(range(ROWS))] * 2
    assert [sorted(model.tested[k * ROWS :][:ROWS]) for k in range(2)] == [list(range(ROWS))] * 2
    if not shuffle:
        assert in_order(model, sequence)
