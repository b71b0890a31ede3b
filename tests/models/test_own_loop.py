"""Training loops of the user's own: a factory that returns the step function in place of a model."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import kerasmem
from kerasmem.errors import ModelError, UsageError
from kerasmem.estimation.real_steps import give_values
from kerasmem.models.compiling import TrainingSettings
from kerasmem.models.inputs import model_inputs, normalise_input_shapes
from kerasmem.models.opening import open_model
from kerasmem.models.own_step import as_loop
from kerasmem.models.step import prepare_step, trace_step

layers = keras.layers


def classifier(cls=keras.Model):
    image = keras.Input((28, 28, 1))
    x = layers.Conv2D(16, 3, strides=2, activation="relu")(image)
    return cls(image, layers.Dense(10)(layers.Flatten()(x)))


def loop(jit_compile=None):
    """As in Keras's guide to training loops from scratch."""
    model, optimizer = classifier(), keras.optimizers.Adam()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function(jit_compile=jit_compile)
    def train_step(x, y):
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = loss_of(y, found)
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        accuracy.update_state(y, found)
        return loss

    return train_step


class SameStep(keras.Model):
    """The same as `loop` in a `train_step`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.loss(y, found)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.accuracy.update_state(y, found)
        return {"output_0": loss}


def same_step():
    model = classifier(SameStep)
    model.accuracy = keras.metrics.SparseCategoricalAccuracy()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Trainer:
    """Two networks and two optimizers; the step is a method that goes by its numbers."""

    def __init__(self):
        self.nets = {"a": keras.Sequential([keras.Input((6,)), layers.Dense(5)]), "b": layers.Dense(3)}
        self.slow, self.fast = keras.optimizers.SGD(momentum=0.9), keras.optimizers.Adam()

    def apply(self, tape, loss, optimizer, net):
        optimizer.apply(tape.gradient(loss, net.trainable_weights), net.trainable_weights)

    @tf.function
    def step(self, batch):
        with tf.GradientTape(persistent=True) as tape:
            made = self.nets["b"](self.nets["a"](batch["values"]))
            loss = keras.ops.mean(made)
            if loss > 0:
                loss = 2 * loss
        self.apply(tape, loss, self.slow, self.nets["a"])
        self.apply(tape, loss, self.fast, self.nets["b"])
        return loss, batch["labels"]


def of_a_method():
    trainer = Trainer()
    return trainer, trainer.step


def traced(build, shapes):
    with open_model(build) as opened:
        structure, inputs = model_inputs(opened.model, normalise_input_shapes(shapes))
        return opened, trace_step(prepare_step(opened.model, TrainingSettings(), structure, inputs, 8))


def test_a_step_function_is_estimated_as_the_same_train_step():
    found = kerasmem.estimate(loop, batch_size=64, input_shape={"x": (28, 28, 1), "y": "():int32"})
    same = kerasmem.estimate(same_step, batch_size=64)
    assert (found.settings.method, found.settings.optimizer) == ("graph", "adam")
    assert found.bytes == same.bytes
    assert [each.class_name for each in found.layers] == [
        "InputLayer", "InputLayer", "Conv2D", "Flatten", "Dense"
    ]  # fmt: skip
    # The only model says what `x` is; the loss is not known.
    assert kerasmem.estimate(loop, batch_size=64, target_shape="():int32").bytes == found.bytes


def test_its_tf_function_says_whether_xla_compiles_it():
    def compiled(jit_compile):
        dense = layers.Dense(2)
        return tf.function(lambda x: dense(x), jit_compile=jit_compile)

    def asked(jit_compile, **options):
        arguments = {"jit_compile": jit_compile}
        return kerasmem.estimate(compiled, batch_size=8, factory_args=arguments, input_shape=(3,), **options)

    report = asked(None, device="t4")  # where Keras would have it compiled
    assert report.settings.execution == "graph"
    assert any("jit_compile=False" in note for note in report.notes)
    assert asked(True).settings.method == "xla"


def test_what_a_method_uses_is_found_and_its_control_flow_converted():
    opened, step = traced(of_a_method, {"values": (6,), "labels": "2:int32"})
    assert [each.shape for each in step.flat] == [(8, 2), (8, 6)]  # by name
    kinds = [(tuple(each.shape), step.kinds[id(each)]) for each in step.variables]
    assert kinds.count(((6, 5), "weights")) == kinds.count(((6, 5), "optimizer")) == 1
    assert kinds.count(((5, 3), "optimizer")) == 2
    assert len(step.optimizers) == 2
    assert opened.notes == ()


def test_a_step_that_is_no_graph_and_one_without_an_optimizer():
    dense = layers.Dense(4)

    def step(values, more):
        return [None, dense(values) + more]

    _, found = traced(lambda: step, {"0": (3,), "1": (4,)})
    assert found.optimizers == ()
    assert [tuple(each.shape) for each in found.function.outputs] == [(8, 4)]


@pytest.mark.parametrize(
    ("made", "given", "error", "words"),
    [
        (lambda: 3, {}, ModelError, "must return a Keras model or a step function; got int"),
        (lambda: (3, keras.Sequential()), {}, ModelError, "must return .*got tuple"),
        (loop, {"input_shape": "28,28,1"}, ModelError, "--target-shape.*missing 1 required positional argument: 'y'"),
        (of_a_method, {}, UsageError, "does not declare the shape of batch.*--input-shape batch=224"),
        (loop, {"target_shape": "()", "mode": "evaluate"}, ModelError, r"does not have a `call\(\)` method"),
        (loop, {"target_shape": "()", "optimizer": "sgd"}, UsageError, "in the function that builds"),
    ],
)
def test_what_is_missing_is_said(made, given, error, words):
    with pytest.raises(error, match=words):
        kerasmem.estimate(made, method="graph", **given)


def test_how_the_batch_reaches_the_step():
    def seen(function, data):
        return keras.tree.map_structure(lambda each: each.shape, list(as_loop(function).train_step(data).values()))

    x, y = tf.zeros((8, 3)), tf.zeros((8,))
    assert seen(lambda x: x, x) == [(8, 3)]
    assert seen(lambda x, y: [y, x], (x, y)) == seen(lambda x, y: [y, x], ((x, y),)) == [(8,), (8, 3)]
    assert seen(lambda batch: [batch[1], batch[0]], (x, y)) == seen(lambda x, y: [y, x], {"x": x, "y": y})
    assert (
        seen(lambda x, y: [y, x], (x, {"y": y})) == seen(lambda x, y=0, z=1: [y, x], {"y": y, "x": x}) == [(8,), (8, 3)]
    )
    assert seen(lambda batch: batch["b"], {"a": x, "b": y}) == [(8,)]


def test_what_a_function_refers_to_through_others_and_globals():
    def inner(x):
        return hidden(x)

    hidden, metric, never = layers.Dense(2), keras.metrics.Mean(), layers.Dense(3)

    def step(x, measure=metric):
        measure.update_state(inner(x))

    used = as_loop(step)
    assert (used.loop_layers, used.loop_metrics) == ([hidden], [metric])
    assert never not in used.layers


def built_optimizer():
    """A trainer that builds its optimizer in `__init__`, and a step that another `tf.function` calls."""

    class Built:
        def __init__(self):
            self.net, self.optimizer = classifier(), keras.optimizers.Adam()
            self.optimizer.build(self.net.trainable_variables)

        @tf.function
        def inner(self, x):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self.net(x))
            weights = self.net.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        @tf.function
        def outer(self, x):
            return self.inner(x)

    trainer = Built()
    return trainer, trainer.outer


def test_an_optimizer_built_with_the_model_knows_its_weights_in_a_real_step():
    with open_model(built_optimizer) as opened:
        model = opened.model
    give_values(model)
    x = tf.zeros((4, 28, 28, 1))
    assert "output_0" in model.train_step(x)


def test_a_step_inside_another_tf_function_is_traced_again():
    reports = [
        kerasmem.estimate(built_optimizer, batch_size=8, method="graph", input_shape={"x": (28, 28, 1)})
        for _ in range(2)
    ]
    assert reports[0].settings.method == "graph"
    assert reports[0].bytes == reports[1].bytes


@pytest.mark.parametrize("as_text", [False, True])
def test_numbers_and_scalars_as_arguments(as_text):
    seen = []

    def build():
        dense = layers.Dense(2)

        def step(x, times, rate):
            seen.append((times, rate.shape, rate.dtype))
            return dense(x) * times * rate

        return step

    shapes = {"x": (3,), "times": 3, "rate": "scalar"}
    if as_text:
        shapes = ["x=3", "times=number:3", "rate=scalar:float32"]
    report = kerasmem.estimate(build, batch_size=8, method="graph", input_shape=shapes)
    assert report.bytes.inputs == 8 * 3 * 4 + 4
    assert set(seen) == {(3, (), tf.float32)}


def test_numbers_for_no_argument_of_a_step_are_refused():
    with pytest.raises(UsageError, match="argument of a step function"):
        kerasmem.estimate(classifier, input_shape={"image": 3})
    with pytest.raises(UsageError, match="number:3"):
        normalise_input_shapes("x=number:many")
