"""`fit`, `evaluate` and `predict` see every row exactly once, and always the same batches."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
from streams import Recorded, RowModel, die, note_process, raise_odd, shared_model, slow_double, tiny_model

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError

ROWS = 203


def sequence(path, **settings):
    return Recorded(path, **{"batch_size": 8, "memory_budget": "3kB", **settings})


WAYS = [{"workers": 0}, {"workers": 1}, {"workers": 4}, {"workers": 2, "use_multiprocessing": True}]


@pytest.fixture
def path(numbered):
    return numbered(rows=ROWS, chunks=4)


def test_every_way_gives_every_row_once_and_the_same_batches(path):
    expected = None
    for way, shuffle in zip(WAYS, (True, False, True, False), strict=True):
        stream = sequence(path, transform=slow_double, **way)
        assert stream.stream_plan.memory.window_rows < ROWS / 2, "several windows"
        shared_model().fit(stream, epochs=3, shuffle=shuffle, verbose=0)
        stream.close()
        assert [sorted(rows) for rows in stream.rows] == [list(range(ROWS))] * 3, (way, shuffle)
        expected = expected or stream.epochs
        assert stream.epochs == expected, (way, shuffle)
        assert stream.epoch == 3
    assert expected[0] != expected[1] != expected[2]
    other = H5ChunkSequence(path, batch_size=8, memory_budget="3kB")
    assert expected[1] == [other.batch(i, 1)[1].tolist() for i in range(len(other))]


def test_evaluate_predict_and_validation(path):
    model = tiny_model()
    whole = H5ChunkSequence(path, batch_size=50, shuffle=False)
    arrays = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 3, 1)
    assert model.evaluate(whole, verbose=0) == pytest.approx(
        model.evaluate(arrays, np.arange(ROWS), batch_size=50, verbose=0)
    )
    inputs = H5ChunkSequence(path, y=None, batch_size=50, shuffle=False)
    assert np.allclose(model.predict(inputs, verbose=0), model.predict(arrays, verbose=0))
    train, valid = sequence(path, rows=(0, 150), scale=0.01), sequence(path, rows=(150, ROWS), scale=0.01)
    history = model.fit(train, validation_data=valid, epochs=2, verbose=0).history
    assert len(history["val_loss"]) == 2
    assert [sorted(rows) for rows in train.rows] == [list(range(150))] * 2
    assert [sorted(rows) for rows in valid.rows] == [list(range(150, ROWS))] * 2


def test_weights_and_several_inputs(write):
    rows = np.arange(40, dtype="f4")
    path = write(a=rows[:, None], b=rows[:, None] * 2, y=rows % 2 == 0, w=rows, y2=rows)
    inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((1,), name="b")}
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    outputs = {"c": keras.layers.Dense(1, name="c")(joined), "d": keras.layers.Dense(1, name="d")(joined)}
    by_name = keras.Model(inputs, outputs)
    by_name.compile("sgd", {"c": "mse", "d": "mse"})
    by_name.fit(H5ChunkSequence(path, {"a": "a", "b": "b"}, {"c": "y", "d": "y2"}, batch_size=16), verbose=0)
    listed = keras.Model(list(inputs.values()), list(outputs.values()))
    listed.compile("sgd", ["mse", "mse"])
    listed.fit(H5ChunkSequence(path, ["a", "b"], ["y", "y2"], batch_size=16), verbose=0)


@pytest.mark.parametrize(("steps", "way"), zip([30, 1, 13, 30], WAYS, strict=True))
def test_steps_per_epoch_continue_across_epochs(path, steps, way, recwarn):
    stream, model = H5ChunkSequence(path, batch_size=8, memory_budget="3kB", **way), RowModel()  # 26 batches
    epochs = -(-60 // steps)
    model.fit(stream, epochs=epochs, steps_per_epoch=steps, verbose=0)
    stream.close()
    order = [row for epoch in range(4) for place in range(26) for row in stream.batch_rows(place, epoch)]
    assert len(model.trained) >= 60 * 8 - 3 * 5
    assert model.trained == order[: len(model.trained)], "one epoch of the data after the other, none left out"
    assert stream.epoch == epochs * steps // 26
    assert not [warning for warning in recwarn if "ran out of data" in str(warning.message)]


@pytest.mark.parametrize("settings", [{"steps_per_execution": 4}, {"run_eagerly": True}])
def test_steps_per_epoch_with_other_execution_modes(path, settings):
    stream = sequence(path)
    expected = [stream.batch(place, epoch)[1].tolist() for epoch in range(2) for place in range(26)]
    counted = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            counted.append(batch)

    tiny_model(**settings).fit(stream, epochs=3, steps_per_epoch=10, callbacks=[Count()], verbose=0)
    given = [batch for epoch in stream.epochs for batch in epoch]
    trained = 3 * (max(counted) + 1)
    assert given[:trained] == expected[:trained]


def test_class_weights_and_sample_weights_count_as_they_do_for_arrays(write):
    random = np.random.default_rng(0)
    x, y, w = random.random((60, 3), "f4"), random.integers(0, 2, 60), random.random(60, "f4")
    path = write(x=x, y=y, w=w, chunks=7)

    def weights(*data, **settings):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(*data, shuffle=False, verbose=0, **settings)
        return np.concatenate([v.ravel() for v in model.get_weights()])

    def stream(**settings):
        return H5ChunkSequence(path, batch_size=8, shuffle=False, **settings)

    plain = weights(stream())
    by_class = weights(stream(), class_weight={0: 1.0, 1: 3.0})
    by_sample = weights(stream(sample_weight="w"))
    assert np.allclose(plain, weights(x, y, batch_size=8), atol=1e-6)
    assert np.allclose(by_class, weights(x, y, batch_size=8, class_weight={0: 1.0, 1: 3.0}), atol=1e-6)
    assert np.allclose(by_sample, weights(x, y, batch_size=8, sample_weight=w), atol=1e-6)
    assert not np.allclose(plain, by_class, atol=1e-3)
    assert not np.allclose(plain, by_sample, atol=1e-3)
    with pytest.raises(ValueError, match="class_weight"):
        weights(stream(sample_weight="w"), class_weight={0: 1.0, 1: 3.0})


@pytest.mark.parametrize("steps", [None, 20])
def test_a_distribution_that_looks_at_a_batch_first_loses_none(path, steps):
    import tensorflow as tf

    stream = sequence(path)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = tiny_model(run_eagerly=True)
    trained, step = [], model.train_step
    model.train_step = lambda data: (trained.append(data[1].numpy().tolist()), step(data))[1]
    model.fit(stream, epochs=2, steps_per_epoch=steps, verbose=0)
    expected = [stream.batch(place, epoch)[1].tolist() for epoch in range(2) for place in range(26)]
    assert trained == expected[: 2 * (steps or 26)]


def test_transform_runs_in_processes_without_our_threads(path):
    transform = lambda *batch: note_process(*batch)  # noqa: E731, as a function of a notebook it has no module
    stream = H5ChunkSequence(path, batch_size=50, transform=transform, workers=2, use_multiprocessing=True)
    processes = {int(process) for x, _ in stream for process in x[:, :2].flat}
    assert len(processes) >= 2 and os.getpid() not in processes, "neither here nor forked from here"
    stream.close()


@pytest.mark.parametrize(
    ("transform", "text"), [(die, "crashed its worker process"), (raise_odd, "raised OddError: odd error")]
)
def test_a_failing_worker_process_is_reported(path, transform, text):
    stream = H5ChunkSequence(path, batch_size=50, transform=transform, workers=2, use_multiprocessing=True)
    with pytest.raises(DataError, match=f"batch 0 of epoch 0.*{text}"):
        stream[0]
    with pytest.raises(Exception, match=text):
        shared_model().fit(stream, verbose=0)
    stream.close()
