"""A model's step, prepared and traced: nothing is computed, nothing is allocated, nothing is changed."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from kerasmem.errors import ModelError
from kerasmem.estimation.estimating import estimate
from kerasmem.models.compiling import TrainingSettings
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import open_model
from kerasmem.models.step import TargetsError, prepare_step, trace_step

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers


def stepped(source, batch_size=4, mode="train", traces=True, **options):
    with open_model(source, **options) as opened:
        structure, inputs = model_inputs(opened.model, {})
        prepared = prepare_step(opened.model, TrainingSettings(), structure, inputs, batch_size, mode)
        return prepared, trace_step(prepared) if traces else None


def specs(data):
    return keras.tree.map_structure(lambda each: (tuple(each.shape), each.dtype), data)


def kinds(traced):
    return [traced.kinds[id(each)] for each in traced.variables]


def classifier(loss="sparse_categorical_crossentropy", optimizer="adam", activation="softmax", **options):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.Dense(3, activation=activation)])
    if loss is not None:
        model.compile(optimizer, loss, **options)
    return model


BIG = """
import resource, sys, keras
from kerasmem.models.compiling import TrainingSettings
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import open_model
from kerasmem.models.step import TargetsError, prepare_step, trace_step

def build():
    model = keras.Sequential([keras.Input((31_250,)), keras.layers.Dense(32_000), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

def trace(source):
    with open_model(source) as opened:
        structure, inputs = model_inputs(opened.model, {})
        return trace_step(prepare_step(opened.model, TrainingSettings(), structure, inputs, 4))

trace(lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
traced = trace(build)
print(sum(int(keras.ops.prod(each.shape)) for each in traced.variables))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_three_billion_numbers_cost_no_memory(program):
    result = program("-c", BIG, env={"CUDA_VISIBLE_DEVICES": "-1"})
    assert result.code == 0, result.err
    numbers, grown = map(int, result.out.split())
    assert numbers > 3 * 10**9  # a billion weights and two slots for each
    assert grown < 100 * 2**20


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (classifier, ((4,), "int32")),
        (lambda: classifier(keras.losses.SparseCategoricalCrossentropy()), ((4,), "int32")),
        (lambda: classifier("categorical_crossentropy"), ((4, 3), "float32")),
        (lambda: classifier("mse"), ((4, 3), "float32")),
    ],
)
def test_targets(build, expected):
    prepared, _ = stepped(build, traces=False)
    assert specs(prepared.y) == expected
    assert specs(prepared.x) == ((4, 6), "float32")


def several(outputs, loss, **options):
    a, b = keras.Input((4,), name="a"), keras.Input((5,), name="b")
    x = layers.Dense(2, activation="softmax", name="x")(a)
    y = layers.Dense(3, name="y")(layers.Concatenate()([a, b]))
    model = keras.Model([a, b], {"x": x, "y": y} if outputs == "dict" else [x, y])
    model.compile("sgd", loss, **options)
    return model


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize(
    ("outputs", "loss", "metrics"),
    [
        ("dict", {"x": "sparse_categorical_crossentropy", "y": "mse"}, {"x": ["accuracy"]}),
        ("dict", {"y": "mse", "x": "sparse_categorical_crossentropy"}, None),
        ("list", ["sparse_categorical_crossentropy", "mse"], [["accuracy"], None]),
        ("list", ["sparse_categorical_crossentropy", "mse"], None),
    ],
)
def test_targets_of_several_outputs(outputs, loss, metrics, is_live):
    def build():
        return several(outputs, loss, metrics=metrics)

    prepared, traced = stepped(build() if is_live else build)
    expected = (((4,), "int32"), ((4, 3), "float32"))
    assert specs(prepared.y) == (dict(zip("xy", expected, strict=True)) if outputs == "dict" else list(expected))
    assert specs(prepared.x) == [((4, 4), "float32"), ((4, 5), "float32")]
    assert len(traced.flat) == 4
    if metrics:
        assert "metrics" in kinds(traced)


@pytest.mark.parametrize(
    ("activation", "loss"),
    [("softmax", "sparse_categorical_crossentropy"), ("sigmoid", "binary_crossentropy"), (None, "mean_squared_error")],
)
def test_where_nothing_is_compiled_the_usual_is_assumed_and_said(activation, loss):
    prepared, traced = stepped(lambda: classifier(None, activation=activation))
    assert prepared.assumptions == (f"the model is not compiled: optimizer adam and loss {loss} are assumed",)
    assert traced.optimizers[0].startswith("adam")


def test_variables_and_what_they_are_for():
    _, traced = stepped(lambda: classifier(metrics=["accuracy"]))
    found = kinds(traced)
    assert found.count("weights") == 4
    assert found.count("optimizer") == 2 + 2 * 4  # the counter, the rate, two moments for each weight
    assert found.count("metrics") == 2 + 2  # loss and accuracy: total and count
    assert set(map(id, traced.captures.values())) <= set(map(id, traced.variables))


def test_frozen_layers_have_no_slots():
    def build():
        model = classifier(None)
        model.layers[0].trainable = False
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    assert kinds(stepped(build)[1]).count("optimizer") == 2 + 2 * 2
    assert kinds(stepped(build())[1]).count("optimizer") == 2 + 2 * 2


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, name="dense")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.erf(self(data, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own_step():
    model = OwnStep()
    model.build((None, 6))
    model.compile("sgd")
    return model


def test_a_step_of_the_models_own():
    prepared, traced = stepped(own_step)
    assert prepared.y is None
    types = {each.type for each in traced.function.graph.get_operations()}
    assert {"Erf", "AssignSubVariableOp"} <= types


def test_inference_has_no_optimizer_and_no_gradient():
    prepared, traced = stepped(classifier, mode="inference")
    assert prepared.y is None
    assert "optimizer" not in kinds(traced)
    assert not any(each.name.startswith("gradient_tape") for each in traced.function.graph.get_operations())
    _, evaluated = stepped(classifier, mode="evaluate")
    assert "metrics" in kinds(evaluated)
    assert not any(each.name.startswith("gradient_tape") for each in evaluated.function.graph.get_operations())


def test_states_that_are_no_weights_are_variables_too():
    def build():
        return keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), layers.LSTM(2, stateful=True), layers.Dense(1)])

    _, traced = stepped(build)
    assert sum(tuple(each.shape) == (4, 2) for each in traced.variables) == 2


class Broken(OwnStep):
    def train_step(self, data):
        self(data)
        raise ZeroDivisionError("no way\nat all")


def broken():
    model = Broken()
    model.build((None, 6))
    model.compile("sgd")
    return model


def keras_state():
    from keras.src.backend.common import global_state

    return (
        global_state.get_global_attribute("stateless_scope"), keras.Layer._open_name_scope, keras.Variable.__init__,
        keras.Optimizer.add_variable_from_reference, keras.Optimizer._var_key, keras.config.dtype_policy().name,
    )  # fmt: skip


@pytest.mark.parametrize("build", [classifier, own_step, broken])
def test_keras_is_left_as_it_was(build):
    before = keras_state()
    try:
        with open_model(build) as opened:
            inside = keras_state()
            structure, inputs = model_inputs(opened.model, {})
            prepared = prepare_step(opened.model, TrainingSettings(), structure, inputs, 4)
            try:
                trace_step(prepared)
            finally:
                assert keras_state() == inside
                assert all(each._value is None for each in opened.model.trainable_variables)
                assert all(each._value is None for each in opened.model.optimizer.variables[2:])
    except ModelError as error:
        assert build is broken
        assert "no way" in str(error)
    else:
        assert build is not broken
    assert keras_state() == before
    layer = layers.Dense(2)
    layer.build((None, 3))
    assert layer.kernel.numpy().shape == (3, 2)  # Keras still makes variables


@pytest.mark.parametrize("method", ["graph", "xla"])
def test_a_live_model_is_not_touched(method):
    model = classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])
    x, y = np.ones((4, 6), "float32"), np.zeros((4,), "int32")
    model.evaluate(x, y, verbose=0)
    weights = [each.copy() for each in model.get_weights()]
    logs, optimizer, loss = model.get_metrics_result(), model.optimizer, model.loss
    logs = {name: float(value) for name, value in logs.items()}
    jit, function = model.jit_compile, model.train_function
    assert not optimizer.built
    estimate(model, method=method, batch_size=64)
    assert not optimizer.built
    assert (model.optimizer, model.loss, model.jit_compile, model.train_function) == (optimizer, loss, jit, function)
    assert {name: float(value) for name, value in model.get_metrics_result().items()} == logs
    assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights(), strict=True))
    model.fit(x, y, verbose=0)
    before = [np.array(each) for each in optimizer.variables]
    weights = model.get_weights()
    estimate(model, method=method, optimizer="sgd", mode="inference")
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, optimizer.variables, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights(), strict=True))
    assert model.optimizer is optimizer
    model.fit(x, y, verbose=0)


class Unpacking(keras.Model):
    """A model whose own step unpacks its argument."""

    def train_step(self, data):
        x, y, weights = data
        return super().train_step((x, y, weights))


@pytest.mark.parametrize("options", [{"target_shape": "none"}, {"data": np.ones((4, 6), "float32")}])
@pytest.mark.parametrize("method", ["auto", "graph"])
def test_a_step_without_targets_names_the_missing_argument(options, method):
    name = next(iter(options))
    with pytest.raises(TargetsError, match=rf"^{name}.*targets \(y\).*mse.*data=\(x, y\)"):
        estimate(classifier("mse"), batch_size=4, method=method, **options)


def test_a_step_of_its_own_names_the_arguments_that_it_got():
    inputs = keras.Input((6,))
    model = Unpacking(inputs, layers.Dense(3)(inputs))
    model.compile("sgd", "mse")
    x, y = np.ones((4, 6), "float32"), np.ones((4, 3), "float32")
    for data, known in ((x, "x"), ((x, y), "x, y")):
        with pytest.raises(ModelError, match=rf"traced on \({known}\); pass data=\(x, y\)"):
            estimate(model, data=data, method="graph")
    assert estimate(model, data=(x, y, np.ones(4, "float32")), method="graph").settings.loss == "mse"
