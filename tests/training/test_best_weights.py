"""The best of many models: its weights and configuration, and none of the models."""

import copy
import gc
import math
import pickle
import weakref

import keras
import numpy as np
import pytest

from kerasmem import BestWeights, run_isolated
from kerasmem.errors import UsageError

pytestmark = pytest.mark.usefixtures("loaded_python")

X, Y = np.linspace(-1, 1, 256).reshape(64, 4), np.linspace(0, 1, 64)


def build(units, compile=True):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    if compile:
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def test_the_best_epoch_of_all_trials_is_kept():
    best, scores, weights = BestWeights("loss"), {}, {}
    for units in (2, 4, 8):
        keras.utils.set_random_seed(units)
        model = build(units)

        def note(epoch, logs, model=model, units=units):
            scores[units, epoch] = logs["loss"]
            weights[units, epoch] = model.get_weights()

        model.fit(
            X,
            Y,
            epochs=3,
            verbose=0,
            callbacks=[best.of(units=units), keras.callbacks.LambdaCallback(on_epoch_end=note)],
        )
    units, epoch = min(scores, key=scores.get)
    assert (best.config, best.epoch, best.score) == ({"units": units}, epoch, scores[units, epoch])
    for kept, expected in zip(best.weights, weights[units, epoch], strict=True):
        np.testing.assert_array_equal(kept, expected)
    made = best.build()
    assert not made.compiled and made.layers[0].units == units
    again = best.restore(build(units))
    np.testing.assert_array_equal(made.predict(X, verbose=0), again.predict(X, verbose=0))


def test_no_model_is_kept():
    best = BestWeights("loss")
    model = build(4)
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[best])
    seen = weakref.ref(model.layers[0])
    best.set_model(None)  # Keras hands a callback the next model; the last one goes when that happens
    trial = best.of(units=4)
    del model, trial
    keras.backend.clear_session()
    gc.collect()
    assert seen() is None and best.weights


def test_a_better_one_takes_the_place_of_the_last():
    best = BestWeights()
    first = build(4)
    assert best.offer(2.0, first, {"n": 1})
    arrays = [id(each) for each in best.weights]
    assert best.offer(1.0, build(4), {"n": 2}) and [id(each) for each in best.weights] == arrays
    assert not best.offer(1.0, build(4), {"n": 3})  # the first of equals stays
    assert not best.offer(math.nan, build(4), {"n": 4})
    assert best.offer(0.5, build(8), {"n": 5}) and best.weights[0].shape == (4, 8)
    assert (best.score, best.config, best.epoch) == (0.5, {"n": 5}, None)


def test_kept_weights_are_a_copy():
    best, model = BestWeights(), build(4)
    best.offer(1.0, model)
    before = [each.copy() for each in best.weights]
    model.fit(X, Y, epochs=2, verbose=0)
    given = model.get_weights()
    assert all((kept == then).all() for kept, then in zip(best.weights, before, strict=True))
    best.offer(0.1, given)
    given[0][:] = 7
    assert not (best.weights[0] == 7).any()


@pytest.mark.parametrize(
    ("monitor", "mode", "expected"),
    [("val_loss", "auto", "min"), ("val_accuracy", "auto", "max"), ("auc", "auto", "max"), ("loss_acc", "auto", "min"),
     ("mae", "auto", "min"), ("anything", "max", "max")],
)  # fmt: skip
def test_which_way_is_better(monitor, mode, expected):
    best = BestWeights(monitor, mode)
    assert best.mode == expected
    best.offer(1.0, [np.zeros(1)])
    assert best.offer(2.0, [np.zeros(1)]) == (expected == "max")


def test_trials_in_processes_of_their_own():
    best = BestWeights()

    def trial(units):
        model = build(units)
        loss = model.fit(X, Y, epochs=1, verbose=0).history["loss"][-1]
        return loss, model

    for units in (2, 4):
        loss, model = run_isolated(trial, units, output=False).get()
        best.offer(loss, model, {"units": units})
    assert best.build().layers[0].units == best.config["units"]


def test_it_can_be_pickled_and_copied():
    best = BestWeights()
    best.offer(1.0, build(4), {"units": 4})
    for other in (pickle.loads(pickle.dumps(best)), copy.deepcopy(best)):
        assert other.config == {"units": 4} and other.offer(0.5, build(4)) and other.build() is not None
    assert best.score == 1.0


def test_reduced_precision_and_integer_weights():
    best = BestWeights()
    layers = [keras.Input((4,)), keras.layers.Dense(2, dtype="bfloat16"), keras.layers.Dropout(0.5)]
    model = keras.Sequential(layers)
    best.offer(1.0, model)
    made = best.build()
    for one, other in zip(made.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(np.asarray(one, "float32"), np.asarray(other, "float32"))


class NoConfig(keras.Model):
    def __init__(self, size):
        super().__init__()
        self.dense = keras.layers.Dense(size)

    def call(self, x):
        return self.dense(x)


def test_errors_say_what_to_do():
    best = BestWeights()
    with pytest.raises(UsageError, match="no weights were kept"):
        best.build()
    with pytest.raises(UsageError, match="must be a number"):
        best.offer("low", build(2))
    with pytest.raises(UsageError, match="Keras model or its get_weights"):
        best.offer(1.0, "model")
    with pytest.raises(UsageError, match="choose from"):
        BestWeights(mode="highest")
    best.offer(1.0, build(2).get_weights(), {"units": 2})
    with pytest.raises(UsageError, match=r"units.*restore"):
        best.build()
    with pytest.raises(UsageError, match="other shapes"):
        best.restore(build(3))
    model = NoConfig(3)
    model(X)
    best.offer(0.5, model, {"size": 3})
    with pytest.raises(UsageError, match="restore"):
        best.build()
    with pytest.raises(UsageError, match="monitor one of these: loss"):
        build(2).fit(X, Y, verbose=0, callbacks=[BestWeights("val_loss")])
