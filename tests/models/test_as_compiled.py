"""The step is the one that the user compiled: as a live object, from a function, from a file."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasmem
from kerasmem.errors import KerasmemError, UnknownLayerError, UsageError
from kerasmem.models.opening import NotRebuiltError, open_model
from kerasmem.models.spec import StepSpec

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers


class LargeMetric(keras.metrics.Metric):
    """A metric with a state of 4 MB."""

    def __init__(self, name="large", **options):
        super().__init__(name=name, **options)
        self.total = self.add_weight(shape=(1000, 1000), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        mean = keras.ops.mean(keras.ops.cast(y_pred, "float32"))
        self.total.assign_add(keras.ops.ones((1000, 1000)) * mean)

    def result(self):
        return keras.ops.mean(self.total)


class LargeAdam(keras.optimizers.Adam):
    """An optimizer of the user."""


def pairwise(y_true, y_pred):
    differences = keras.ops.expand_dims(y_pred, 0) - keras.ops.expand_dims(y_pred, 1)
    return keras.ops.mean(keras.ops.square(differences)) + 0 * keras.ops.mean(y_true)


class Pairwise(keras.losses.Loss):
    """The same loss as an object."""

    def call(self, y_true, y_pred):
        return pairwise(y_true, y_pred)


OBJECTS = {"LargeMetric": LargeMetric, "LargeAdam": LargeAdam, "pairwise": pairwise, "Pairwise": Pairwise}
FEATURES = {
    "metric": lambda: {"metrics": [LargeMetric()]},
    "weighted metric": lambda: {"weighted_metrics": [LargeMetric()]},
    "metrics by output": lambda: {"metrics": {"out": [LargeMetric(), "mae"]}},
    "loss function": lambda: {"loss": pairwise},
    "loss object": lambda: {"loss": Pairwise()},
    "losses by output": lambda: {"loss": {"out": pairwise}},
    "loss weights": lambda: {"loss": [pairwise], "loss_weights": [0.5]},
    "optimizer": lambda: {"optimizer": LargeAdam(0.01)},
    "accumulation": lambda: {"optimizer": keras.optimizers.Adam(gradient_accumulation_steps=2)},
    "average": lambda: {"optimizer": LargeAdam(use_ema=True)},
    "schedule": lambda: {"optimizer": keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10), 0.9)},
    "short names": lambda: {"loss": "mse", "metrics": ["mse", "accuracy"]},
}


def build(feature=None):
    inputs = keras.Input((32,))
    model = keras.Model(inputs, layers.Dense(64, name="out")(layers.Dense(48, activation="relu")(inputs)))
    if feature is not None:
        model.compile(**{"optimizer": "adam", "loss": "mse", **FEATURES[feature]()})
    return model


@pytest.mark.parametrize("feature", FEATURES)
def test_object_file_and_function_have_the_same_step(feature, tmp_path):
    options = {"batch_size": 64, "method": "graph"}
    expected = kerasmem.estimate(lambda: build(feature), **options)
    model = build(feature)
    assert kerasmem.estimate(model, **options).peak == pytest.approx(expected.peak, rel=0.02)
    for name in ("model.keras", "model.h5"):
        model.save(tmp_path / name)
        report = kerasmem.estimate(tmp_path / name, custom_objects=OBJECTS, **options)
        assert report.peak == pytest.approx(expected.peak, rel=0.02)
        assert not report.caveats
        assert report.settings.optimizer == expected.settings.optimizer
    if any(word in feature for word in ("metric", "pairwise", "optimizer")) and feature != "short names":
        with pytest.raises(UnknownLayerError, match="--custom-objects"):
            kerasmem.estimate(tmp_path / "model.keras", **options)


def test_a_replaced_loss_leaves_unknown_metrics_out_and_reports_it(tmp_path):
    build("metric").save(tmp_path / "m.keras")
    report = kerasmem.estimate(tmp_path / "m.keras", loss="mae", method="graph")
    assert "LargeMetric" in report.answer
    assert report.settings.loss == "mae"


def test_assumptions_are_in_the_first_line():
    assert "loss mean_squared_error are assumed" in str(kerasmem.estimate(build(), method="formula").answer)


def state(model, layer_name):
    optimizer = model.optimizer
    return (
        [np.array(variable) for variable in (*model.variables, *optimizer.variables, *model.metrics_variables)],
        [variable.path for variable in (*model.variables, *optimizer.variables, *model.metrics_variables)],
        layers.Dense(1).name.removeprefix(layer_name),
    )


@pytest.mark.parametrize("built", [True, False])
def test_a_run_with_estimates_equals_one_without(built):
    x, y = np.random.default_rng(0).random((2, 64, 8), "float32")

    def run(estimates):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        parts = [layers.Dense(16), layers.Dropout(0.4), layers.BatchNormalization(), layers.Dense(8)]
        model = keras.Sequential([keras.Input((8,)), *parts] if built else parts)
        model.compile(LargeAdam(use_ema=True), Pairwise(), metrics=["mae", LargeMetric()])
        peaks = []

        def ask():
            if estimates:
                peaks.append(
                    [kerasmem.estimate(model, data=(x, y), method=m).peak for m in ("graph", "xla", "formula")]
                )
                kerasmem.estimate(model, data=(x, y), optimizer="sgd", loss="mse", dtype_policy="mixed_bfloat16")

        ask()
        histories = [model.fit(x, y, batch_size=16, verbose=0).history]
        ask()
        histories.append(model.fit(x, y, batch_size=16, verbose=0).history)
        ask()
        assert all(row == peaks[0] for row in peaks)
        return histories, state(model, "dense_"), np.random.random(), float(tf.random.uniform(()))

    (plain, before, *drawn), (other, after, *drawn_after) = run(False), run(True)
    assert plain == other
    assert drawn == drawn_after
    assert before[1:] == after[1:]
    assert all(np.array_equal(a, b) for a, b in zip(before[0], after[0], strict=True))


def test_an_unbuilt_model_stays_unbuilt():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.calls = layers.Dense(16), []

        def train_step(self, data):
            self.calls.append(data)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.encoder(data)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Own()
    model.compile("adam")
    report = kerasmem.estimate(model, data=np.zeros((64, 8), "float32"), batch_size=16)
    assert report.settings.method == "graph"
    assert report.model.parameters == 8 * 16 + 16
    assert not (model.built or model.encoder.built or model.optimizer.built or model.calls or model.weights)
    model.fit(np.zeros((32, 8), "float32"), verbose=0)
    assert kerasmem.estimate(model, data=np.zeros((64, 8), "float32"), batch_size=16).peak == report.peak


def test_layers_without_a_configuration_are_traced_but_not_sent():
    class Scaled(layers.Layer):
        def __init__(self, values):
            super().__init__()
            self.values = values

        def call(self, x):
            return x * self.values

    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(Scaled(np.ones(4, "float32"))(inputs)))
    model.compile("sgd", "mse")
    assert kerasmem.estimate(model, method="graph").settings.method == "graph"


def test_settings_that_a_configuration_lacks_are_not_sent():
    class Weighted(keras.losses.Loss):
        def __init__(self, weight=1.0, **options):
            super().__init__(**options)
            self.weight = weight

        def call(self, y_true, y_pred):
            return self.weight * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    model = build()
    model.compile("sgd", Weighted(2.0))
    with pytest.raises(NotRebuiltError, match=r"Weighted lacks weight"):
        StepSpec(model).portable().model.built()
    model.compile("sgd", Weighted())
    assert StepSpec(model).portable().model.built().loss.weight == 1.0


def test_losses_by_name_of_listed_outputs_find_their_output():
    inputs = keras.Input((4,))
    outputs = [layers.Dense(3, name="b")(inputs), layers.Dense(2, name="a")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "sparse_categorical_crossentropy"})
    assert kerasmem.estimate(model, method="graph", batch_size=4).bytes.inputs == 4 * (4 * 4 + 4 + 2 * 4)


def test_eager_steps_are_not_simulated():
    model = build("short names")
    model.compile("adam", "mse", run_eagerly=True)
    with pytest.raises(UsageError, match="run_eagerly"):
        kerasmem.estimate(model, method="graph")
    assert kerasmem.estimate(model).settings.method == "probe"


def test_sparse_inputs_need_data():
    inputs = keras.Input((1000,), sparse=True)
    model = keras.Model(inputs, layers.Dense(4)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match="data="):
        kerasmem.estimate(model)


class Numbers(keras.utils.PyDataset):
    """Batches of 16 rows."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.zeros((16, 32)), np.zeros((16, 64), "float32"), np.ones(16)


X, Y, W = np.zeros((64, 32)), np.zeros((64, 64), "float32"), np.ones(64)


@pytest.mark.parametrize(
    ("data", "inputs"),
    [
        (lambda: (X, Y), 16 * (32 + 64) * 4),
        (lambda: (X, Y, W), 16 * (32 + 64 + 1) * 4),
        (lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(8).batch(16).prefetch(1), 16 * (32 * 8 + 64 * 4)),
        (Numbers, 16 * (32 * 8 + 64 * 4 + 8)),
        (lambda: ((X[:16], Y[:16]) for _ in range(3)), 16 * (32 * 8 + 64 * 4)),
    ],
)
def test_the_batch_is_the_one_that_fit_passes(data, inputs):
    model = build("short names")
    batches = []
    report = kerasmem.estimate(model, data=data(), batch_size=16 if isinstance(data(), tuple) else None, method="graph")
    assert report.settings.batch_size == 16
    step = type(model).train_step
    model.train_step = lambda batch: batches.append(batch) or step(model, batch)
    passed = data() if isinstance(data(), tuple) else (data(),)
    model.fit(**dict(zip(("x", "y", "sample_weight"), passed, strict=False)), batch_size=16, verbose=0)
    assert report.bytes.inputs == inputs
    passed = keras.tree.flatten(batches[0])
    assert sum(tensor.dtype.size * int(np.prod([16, *tensor.shape[1:]])) for tensor in passed) == inputs


def test_a_dataset_with_known_shapes_is_not_iterated():
    read = []

    def batches():
        read.append(1)
        yield X[:16], Y[:16]

    specs = tuple(tf.TensorSpec((16, width), "float32") for width in (32, 64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=specs)
    model = build("short names")
    assert kerasmem.estimate(model, data=dataset, method="formula").settings.batch_size == 16
    larger = kerasmem.estimate(model, data=dataset, batch_size=64, method="graph")
    assert (larger.settings.batch_size, larger.bytes.inputs) == (64, 64 * (32 + 64) * 4)
    assert not read


@pytest.mark.parametrize("data", [3, "no.module:function", (), [], lambda: 1 / 0, iter(())])
def test_other_data_is_refused(data):
    with pytest.raises(KerasmemError, match="data"):
        kerasmem.estimate(build("short names"), data=data)


def test_a_model_of_several_inputs_and_outputs_takes_nested_data():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.user, self.item = layers.Embedding(10, 8), layers.Embedding(20, 8)
            self.rating, self.liked = layers.Dense(1), layers.Dense(1)

        def call(self, x):
            user, item = x
            both = self.user(user) * self.item(item)
            return self.rating(both), self.liked(both)

    model = Two()
    model.compile("adam", ["mse", "mse"])
    users, items, labels = np.zeros(64, "int32"), np.zeros(64, "int64"), np.zeros((64, 1), "float32")
    dataset = tf.data.Dataset.from_tensor_slices(((users, items), (labels, labels))).batch(32)
    report = kerasmem.estimate(model, data=dataset)
    assert (report.settings.method, report.bytes.inputs) == ("graph", 32 * (4 + 8 + 4 + 4))


def test_another_policy_of_an_object_needs_no_copy():
    model = build("metric")
    with open_model(model, dtype_policy="mixed_bfloat16") as opened:
        assert opened.model.layers[1].compute_dtype == "bfloat16"
    assert model.layers[1].compute_dtype == "float32"
