"""A batch in micro-batches trains as the whole batch does: losses, masks, weights, penalties, optimizers, metrics."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from stopped import Stop

import kerasmem
from kerasmem.errors import DataError, UsageError
from kerasmem.training.steps import splitting
from kerasmem.training.steps.remote import pack, unpack
from kerasmem.training.steps.splitting import uneven_layers

pytestmark = pytest.mark.usefixtures("loaded_python")

L = keras.layers
ROWS = 22
random = np.random.default_rng(0)
X = random.random((ROWS, 8), "float32")
Y = random.integers(0, 3, ROWS)
WEIGHT = random.random(ROWS).astype("float32")
TEXT = random.integers(1, 11, (ROWS, 6)) * (np.arange(6) < random.integers(1, 7, ROWS)[:, None])
TAGS = random.integers(0, 3, (ROWS, 6))
CROSS = "sparse_categorical_crossentropy"
Cross = keras.losses.SparseCategoricalCrossentropy


AVERAGES = not splitting.SUMS_PENALTIES


def dense():
    # Keras 3.12 adds up activity penalties over the rows, which is told (below).
    first = L.Dense(16, "tanh", kernel_regularizer="l2", activity_regularizer="l1" if AVERAGES else None)
    return keras.Sequential([keras.Input((8,)), first, L.Dense(3, "softmax")])


def masked():
    parts = [L.Embedding(11, 8, mask_zero=True), L.Dense(8, "tanh"), L.Dense(3, "softmax")]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *parts])


def two():
    inputs = keras.Input((8,))
    hidden = L.Dense(9, "tanh")(inputs)
    return keras.Model(inputs, {"a": L.Dense(1, name="a")(hidden), "b": L.Dense(3, "softmax", name="b")(hidden)})


def squared(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - keras.ops.cast(y_true, y_pred.dtype)), -1)


optimizers = keras.optimizers
BOTH = {"a": "mse", "b": Cross(reduction="mean_with_sample_weight")}
# name -> model, arguments of compile, arguments of fit
CASES = {
    "penalties": (dense, {"optimizer": lambda: optimizers.Adam(0.01), "loss": CROSS, "metrics": ["accuracy"]},
                  {"x": X, "y": Y}),
    "sample weights": (dense, {"optimizer": lambda: optimizers.Adam(0.01, clipnorm=0.1), "loss": CROSS,
                               "weighted_metrics": ["accuracy"]}, {"x": X, "y": Y, "sample_weight": WEIGHT}),
    "class weights": (dense, {"optimizer": lambda: optimizers.AdamW(0.01, global_clipnorm=0.1), "loss": CROSS},
                      {"x": X, "y": Y, "class_weight": {0: 0.2, 1: 3.0, 2: 1.0}}),
    "mean by weights": (dense, {"optimizer": lambda: optimizers.Adam(0.01),
                                "loss": Cross(reduction="mean_with_sample_weight")},
                        {"x": X, "y": Y, "sample_weight": WEIGHT}),
    "sum": (dense, {"optimizer": lambda: optimizers.SGD(0.01, momentum=0.9), "loss": Cross(reduction="sum")},
            {"x": X, "y": Y, "sample_weight": WEIGHT}),
    "function": (dense, {"optimizer": lambda: optimizers.Lion(0.001), "loss": squared}, {"x": X, "y": X[:, :3]}),
    "masks": (masked, {"optimizer": lambda: optimizers.Adam(0.01), "loss": CROSS, "metrics": ["accuracy"]},
              {"x": TEXT, "y": TAGS}),
    "masks, slices squared": (masked, {"optimizer": lambda: optimizers.Adagrad(0.01), "loss": CROSS},
                              {"x": TEXT, "y": TAGS, "sample_weight": random.random((ROWS, 6)).astype("float32")}),
    "two outputs": (two, {"optimizer": lambda: optimizers.Adam(0.01, use_ema=True), "loss": BOTH,
                          "loss_weights": {"a": 0.3, "b": 2.0}, "metrics": {"a": "mae", "b": "accuracy"}},
                    {"x": X, "y": {"a": WEIGHT[:, None], "b": Y}, "sample_weight": {"a": WEIGHT, "b": WEIGHT[::-1]},
                     "batch_size": 11}),
    "gradient accumulation": (dense, {"optimizer": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
                                      "loss": CROSS, "steps_per_execution": 2}, {"x": X, "y": Y}),
}  # fmt: skip


PARTS = ("x", "y", "sample_weight")


def trained(name, train, **more):
    make, compiled, data = CASES[name]
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(**{**compiled, "optimizer": compiled["optimizer"]()}, jit_compile=False)
    data = {"batch_size": 9, **data, "validation_data": tuple(data[key] for key in PARTS if key in data)}
    settings = {"epochs": 2, "shuffle": False, "verbose": 0}
    history = train(model)(**data, **settings, **more)
    return [np.asarray(v.value) for v in model.variables + model.optimizer.variables], history.history


@pytest.mark.parametrize("name", CASES)
def test_pieces_train_as_the_whole_batch(name):
    whole, told = trained(name, lambda model: model.fit)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing here differs, so nothing is warned of
        pieces, told_too = trained(name, lambda model: lambda **all_: kerasmem.fit(model, **all_), micro_batches=4)
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6 * max(1.0, np.abs(one).max()))
    assert told.keys() == told_too.keys()
    for key in told:
        np.testing.assert_allclose(told[key], told_too[key], rtol=2e-5)


def half(data_y, pieces):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), L.Dense(16, "tanh"), L.Dense(1, dtype="float32")])
    model.compile(optimizers.Adam(0.01), "mse", jit_compile=False)
    kerasmem.fit(model, X, data_y, batch_size=11, shuffle=False, verbose=0, micro_batches=pieces)
    return model


@pytest.mark.usefixtures("mixed_float16")
def test_loss_scaling_leaves_a_step_out_as_a_whole():
    fine, broken = X[:, :1].copy(), X[:, :1].copy()
    broken[3] = np.inf  # in one piece of the first batch
    whole, skipped = half(fine, None), half(broken, 3)
    with pytest.warns(RuntimeWarning, match="layers in float16: gradients are sums"):
        pieces = half(fine, 3)
    assert type(pieces.optimizer).__name__ == "LossScaleOptimizer"
    assert [int(each.optimizer.iterations) for each in (whole, pieces, skipped)] == [2, 2, 1]
    assert float(skipped.optimizer.dynamic_scale) == float(whole.optimizer.dynamic_scale) / 2
    for one, other in zip(whole.get_weights(), pieces.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)  # rounded to 11 bits within
    assert all(np.isfinite(each).all() for each in skipped.get_weights())


@pytest.mark.usefixtures("mixed_float16")
def test_a_scaled_loss_is_scaled_in_another_process_too():
    model = small(optimizer="adam")
    keras.config.set_dtype_policy("float32")
    model.optimizer.build(model.trainable_variables)
    other = unpack(pack(model))
    assert type(other.optimizer) is type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    assert len(other.optimizer.variables) == len(model.optimizer.variables)


def test_weights_frozen_one_by_one_stay_frozen_in_another_process():
    model = small(optimizer="adam")
    model.layers[0].kernel.trainable = False
    model.optimizer.build(model.trainable_variables)
    other = unpack(pack(model))
    assert [weight.trainable for weight in other.weights] == [weight.trainable for weight in model.weights]
    assert len(other.optimizer.variables) == len(model.optimizer.variables)


def test_layers_for_which_pieces_differ_are_named_once():
    model = keras.Sequential(
        [keras.Input((8,)), L.Dense(4), L.BatchNormalization(name="norm"), L.Dropout(0.5, name="drop"), L.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.warns(RuntimeWarning, match="norm: statistics.*drop: each micro-batch draws") as said:
        kerasmem.fit(model, X, X[:, :1], batch_size=11, epochs=2, verbose=0, micro_batches=2)
    assert [each.filename for each in said if each.category is RuntimeWarning] == [__file__]


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {**super().train_step(data), "more": 1.0}


def small(cls=keras.Sequential, **compiled):
    model = cls([keras.Input((8,)), L.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", "jit_compile": False, **compiled})
    return model


def test_what_cannot_work_is_refused_before_training():
    for model, options, message in (
        (small(OwnStep), {"micro_batches": 2}, "OwnStep overrides train_step.*smaller batch_size"),
        (small(loss=keras.losses.MeanSquaredError(reduction=None)), {}, "reduction=None"),
        (keras.Sequential([keras.Input((8,)), L.Dense(1)]), {}, "call model.compile"),
        ("model.keras", {}, "must be a compiled Keras model"),
        (small(), {"micro_batches": 0}, "micro_batches must be .*got 0"),
        (small(), {"save_freq": "often"}, "save_freq must be .*got 'often'"),
        (small(), {"save_freq": 0}, "save_freq must be .*got 0"),
        (small(), {"keep": "yes"}, "keep must be True or False; got 'yes'"),
        (small(), {"isolated": "no"}, "isolated must be True or False; got 'no'"),
    ):
        with pytest.raises(UsageError, match=message):
            kerasmem.fit(model, X, X[:, :1], verbose=0, **options)


def test_a_checkpoint_that_is_none(tmp_path):
    path = tmp_path / "run.ckpt"
    for content in (b"", b"PK\x03\x04 and no more", b"\x80\x04\x95 pickle"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"run\.ckpt.*delete it to start over"):
            kerasmem.fit(small(), X, X[:, :1], verbose=0, checkpoint=path)


def test_a_checkpoint_of_another_run(tmp_path):
    path, data = tmp_path / "run.ckpt", {"x": X, "y": X[:, :1], "batch_size": 4}
    kerasmem.fit(small(), **data, verbose=0, checkpoint=path, keep=True)
    wide = keras.Sequential([keras.Input((8,)), L.Dense(2), L.Dense(1)])
    wide.compile("sgd", "mse", jit_compile=False)
    for model, other, message in (
        (small(), {"batch_size": 5}, "batch_size was 4 .* and is 5 now"),
        (small(), {"x": tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(4), "y": None}, "kind arrays"),
        (wide, {}, "model: the model saved in"),
    ):
        with pytest.raises(UsageError, match=message):
            kerasmem.fit(model, **{**data, **other}, epochs=2, verbose=0, checkpoint=path)
    done = small()
    history = kerasmem.fit(done, **data, verbose=0, checkpoint=path, keep=True)
    assert len(history.history["loss"]) == 1
    assert int(done.optimizer.iterations) == 6, "nothing was left to train; the model has what was saved"
    assert len(kerasmem.fit(done, **data, epochs=3, verbose=0, checkpoint=path).history["loss"]) == 3
    assert not path.exists()


def shuffled(change=lambda rows: rows):
    return change(tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shuffle(ROWS, seed=3)).batch(4)


def noisy(x, y):
    return x + tf.random.uniform([8], seed=5), y


def drawn():
    rng = np.random.default_rng(4)
    while True:
        rows = rng.integers(0, ROWS, 4)
        yield X[rows], X[rows, :1]


# Six batches each time the data is begun, and how often Keras begins it; with what `fit` is given.
STREAMS = {
    "known length": (shuffled, {}),
    "unknown length": (lambda: shuffled(lambda rows: rows.filter(lambda x, y: True)), {}),
    "random numbers": (lambda: shuffled(lambda rows: rows.map(noisy)), {}),
    "endless": (lambda: shuffled(lambda rows: rows.repeat()), {"steps_per_epoch": 5}),
    "half an epoch": (shuffled, {"steps_per_epoch": 3}),
    "an epoch": (shuffled, {"steps_per_epoch": 6}),
    "steps that do not divide": (shuffled, {"steps_per_epoch": 4}),
    "a generator": (drawn, {"steps_per_epoch": 5}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize(("stream", "at_once"), [*((name, 1) for name in STREAMS), ("known length", 2)])
def test_a_stream_goes_on_in_a_later_epoch(tmp_path, stream, at_once):
    make, options = STREAMS[stream]

    def run(**more):
        keras.utils.set_random_seed(2)
        model = small(steps_per_execution=at_once)
        kerasmem.fit(model, make(), epochs=4, verbose=0, **options, **more)
        return model.get_weights()

    whole, saving = run(), {"checkpoint": tmp_path / "run.ckpt", "save_freq": 2}
    with pytest.raises(KeyboardInterrupt):
        run(**saving, callbacks=[Stop(9 // at_once)])
    for here, there in zip(run(**saving), whole, strict=True):
        np.testing.assert_array_equal(here, there)


def test_keras_gets_its_own_functions_back():
    model = small()
    model.fit(X, X[:, :1], verbose=0)
    before = model.train_function
    kerasmem.fit(model, X, X[:, :1], verbose=0, validation_split=0.2)
    assert model.train_function is before, "traced as it is, for the next fit"
    assert not getattr(model.test_function, "is_kerasmem", False)
    model.fit(X, X[:, :1], epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 4


def test_activity_penalties_that_keras_adds_up_are_told(monkeypatch):
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, activity_regularizer="l1", name="penalised"), L.Dense(1)])
    assert (uneven_layers(model) is None) == AVERAGES
    monkeypatch.setattr(splitting, "SUMS_PENALTIES", True)
    assert "penalised: penalties" in uneven_layers(model)
