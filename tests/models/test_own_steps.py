"""Models that say how they are trained and not what they compute: a `train_step` without `call()`."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import kerasmem
from kerasmem.errors import ModelError, UsageError
from kerasmem.models.compiling import TrainingSettings
from kerasmem.models.inputs import model_inputs, normalise_input_shapes, read_targets
from kerasmem.models.opening import open_model
from kerasmem.models.own_step import keeps_optimizers, optimizers_of
from kerasmem.models.step import prepare_step, step_targets, trace_step

layers = keras.layers


class Gan(keras.Model):
    """Two networks, two optimizers in attributes, `compile` with arguments of its own."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.Dense(1)], name="critic")
        self.generator = keras.Sequential([layers.Dense(6)], name="generator")  # built by its first call
        self.seed_generator = keras.random.SeedGenerator(1)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.of_both = {"d": d_optimizer, "g": g_optimizer}
        self.d_loss = keras.metrics.Mean(name="d_loss")

    def train_step(self, real):
        made = self.generator(keras.random.normal((keras.ops.shape(real)[0], 3), seed=self.seed_generator))
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(self.critic(real) - self.critic(made))
        weights = self.critic.trainable_weights
        self.of_both["d"].apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(self.critic(self.generator(made[:, :3])))
        weights = self.generator.trainable_weights
        self.of_both["g"].apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.d_loss.update_state(loss)
        return {"d_loss": self.d_loss.result()}


def gan():
    model = Gan()
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9))
    return model


class Pairs(keras.Model):
    """Takes two images and a number; its loss is Keras's, of what the step itself makes."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)
        self.seen = []

    def train_step(self, data):
        (left, right), y = data
        self.seen.append((left.shape, right.shape, y.shape, y.dtype.name))
        with tf.GradientTape() as tape:
            loss = self.loss(self.dense(left), self.dense(right)) + keras.ops.mean(keras.ops.cast(y, "float32"))
        weights = self.dense.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def pairs():
    model = Pairs()
    model.compile("adam", keras.losses.MeanSquaredError())
    return model


def traced(build, shape, mode="train", **targets):
    with open_model(build) as opened:
        structure, inputs = model_inputs(opened.model, normalise_input_shapes(shape))
        training = TrainingSettings(targets=read_targets(**targets))
        prepared = prepare_step(opened.model, training, structure, inputs, 8, mode)
        return opened.model, prepared, trace_step(prepared)


def test_what_the_step_makes_when_it_is_run_first_has_no_memory_and_a_kind():
    model, _, step = traced(gan, (6,))
    kinds = [(tuple(each.shape), step.kinds[id(each)]) for each in step.variables]
    assert kinds.count(((6, 5), "optimizer")) == 2  # Adam's two
    assert kinds.count(((3, 6), "optimizer")) == 1  # the momentum of the other, for a layer built by the step
    assert kinds.count(((3, 6), "weights")) == 1
    assert any(kind == "metrics" for _, kind in kinds)
    assert all(each._value is None for each in model.generator.variables)
    assert not model.optimizer.built  # Keras's default, which such a `compile` leaves behind
    assert [type(each).__name__ for each in optimizers_of(model)] == ["RMSprop", "Adam", "SGD"]
    assert keeps_optimizers(model)


def test_one_input_is_passed_as_fit_passes_it():
    class Seen(keras.Model):
        def train_step(self, data):
            given.append(keras.tree.map_structure(lambda each: tuple(each.shape), data))
            return {"loss": tf.constant(0.0)}

    def build():
        model = Seen()
        model.compile()
        return model

    given = []
    build().fit(tf.zeros((8, 6)), batch_size=8, verbose=0)
    traced(build, (6,))
    build().fit((tf.zeros((8, 6)), tf.zeros((8, 2))), batch_size=8, verbose=0)
    traced(build, {"0": (6,), "1": (2,)})
    build().fit(tf.zeros((8, 6)), tf.zeros((8, 3)), batch_size=8, verbose=0)
    traced(build, (6,), target_shape=(3,))
    assert given[0::2] == given[1::2] == [(8, 6), (((8, 6), (8, 2)),), ((8, 6), (8, 3))]


def test_targets_that_the_user_says():
    model, prepared, _ = traced(pairs, {"0": (6,), "1": (6,)}, target_shape="()", target_dtype="int32")
    assert prepared.y.shape == (8,)
    assert model.seen == [((8, 6), (8, 6), (8,), "int32")]
    with pytest.raises(ModelError, match=r"cannot be traced.*see --input-shape and --target-shape"):
        traced(pairs, {"0": (6,), "1": (6,)})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target_shape": "3,y"}, "--target-shape .*got '3,y'"),
        ({"target_dtype": "int33"}, "--target-dtype .*got 'int33'"),
        ({"target_shape": "none", "target_dtype": "int32"}, "choose one"),
        ({"target_shape": 5}, "--target-shape .*got 5"),
    ],
)  # fmt: skip
def test_targets_that_cannot_be(given, words):
    with pytest.raises(UsageError, match=words):
        read_targets(**given)


def test_a_loss_is_given_another_dtype_or_no_targets():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.raises(UsageError, match="--target-shape and --target-dtype must match the outputs and the loss"):
        kerasmem.estimate(model, target_shape="x=3")
    model.compile(loss="mse")
    output = keras.KerasTensor((8, 3))
    assert step_targets(model, read_targets(None, "float16"), lambda: output, 8).dtype == "float16"
    assert step_targets(model, read_targets("none"), lambda: output, 8) is None
    named = step_targets(model, read_targets({"a": (2,), "b": (4,)}), lambda: output, 8)
    assert {name: each.shape for name, each in named.items()} == {"a": (8, 2), "b": (8, 4)}


@pytest.mark.parametrize("mode", ["inference", "evaluate"])
def test_there_is_nothing_else_to_run(mode):
    with pytest.raises(ModelError, match=r"does not have a `call\(\)` method"):
        kerasmem.estimate(gan, input_shape=(6,), mode=mode, method="formula")


def test_a_compile_of_its_own_is_not_called_again():
    with pytest.raises(UsageError, match=r"compile\(\) of model .* has other arguments"):
        kerasmem.estimate(gan, input_shape=(6,), optimizer="lion", method="graph")


def test_every_method_of_this_machine_answers():
    by_formula, graph, xla = (
        kerasmem.estimate(gan, batch_size=8, input_shape=(6,), method=method) for method in ("formula", "graph", "xla")
    )
    rows = [row.name.partition("/")[0] for row in graph.layers]
    assert list(dict.fromkeys(rows)) == ["input", "generator", "critic"]
    assert by_formula.formula.activation_elements_per_sample > 0
    assert by_formula.settings.optimizer == "adam, sgd"
    for report in (graph, xla):
        assert report.bytes.optimizer >= 4 * (2 * (6 * 5 + 5 + 5 + 1) + 3 * 6 + 6)
        assert report.bytes.low <= report.bytes.total <= report.bytes.high
        assert graph.bytes.weights == xla.bytes.weights
    auto = kerasmem.estimate(gan, batch_size=8, input_shape=(6,))
    assert auto.settings.method == "graph"


class Halves(keras.Model):
    """A functional model whose step takes two of its images at once, and a model whose call is for something else."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(self(data[:, 0]) * self(data[:, 1]))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def test_a_step_may_take_something_else_than_the_model_does():
    def build():
        image = keras.Input((6,))
        model = Halves(image, layers.Dense(4, name="head")(image))
        model.compile("adam")
        return model

    report = kerasmem.estimate(build, batch_size=8, input_shape=(2, 6), method="graph")
    assert report.bytes.inputs == 8 * 2 * 6 * 4
    assert next(row for row in report.layers if row.name == "head").uses == 2


def test_inputs_in_a_dict_keep_their_shapes_whatever_their_order():
    class Named(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x["image"]) + keras.ops.sum(x["caption"], axis=-1, keepdims=True)

    report = kerasmem.estimate(Named, batch_size=8, input_shape={"image": (6,), "caption": (4,)}, method="formula")
    assert {row.name: row.output_shape for row in report.layers if row.kind == "input"} == {
        "image": (None, 6), "caption": (None, 4),
    }  # fmt: skip
    assert report.model.parameters == 6 * 2 + 2


def test_layers_that_are_built_by_a_call_on_shapes_get_stand_ins_too():
    class Inner(layers.Layer):  # without `build`, so that Keras calls it on shapes first
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, pair):
            return self.dense(pair[0]) + pair[1]

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Inner(), layers.Dense(2)

        def call(self, pair):
            return self.head(self.inner(pair))

        def train_step(self, wanted):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self([tf.ones((8, 6)), tf.ones((8, 3))]) * keras.ops.cast(wanted, "float32"))
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    def build():
        model = Outer()
        model.compile("adam")
        return model

    report = kerasmem.estimate(build, batch_size=8, input_shape="1:int32", method="graph")
    assert report.model.parameters == 6 * 3 + 3 + 3 * 2 + 2
    assert report.bytes.optimizer >= 2 * 4 * report.model.parameters


def test_inner_layers_that_a_step_builds_get_stand_ins_too():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(4)  # built by the shapes of `call`, inside the trace

        def call(self, x):
            return self.inner(x)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.block(data))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Own()
    model.compile("sgd")
    assert kerasmem.estimate(model, input_shape=(3,), method="graph").model.parameters == 3 * 4 + 4
