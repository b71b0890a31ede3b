"""`kerasmem.recompute` gives a Keras model like any other: it fits, saves, loads, and shares its weights."""

from __future__ import annotations

import contextlib
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from recomputed_models import make

import kerasmem
from kerasmem.errors import UsageError
from kerasmem.models.vocabulary import configuration
from kerasmem.training.recompute.model import RecomputedFunctional


def mlp(depth=6, units=8):
    layers = [keras.layers.Dense(units, activation="gelu", name=f"dense_{number}") for number in range(depth)]
    return keras.Sequential([keras.Input((units,)), *layers, keras.layers.Dense(1, name="out")])


def data(rows=24, units=8):
    random = np.random.RandomState(0)
    return random.standard_normal((rows, units)).astype("float32"), random.standard_normal((rows, 1)).astype("float32")


def recomputations(model, x):
    """How many operations of the training step a recomputation made."""
    step = tf.function(lambda: model.train_step((tf.constant(x), tf.zeros((len(x), 1)))))
    return sum("recompute" in each.name for each in step.get_concrete_function().graph.get_operations())


class TestTraining:
    @pytest.mark.parametrize("options", [{"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
    def test_fit_is_the_same_run(self, options):
        weights = []
        for again in (False, True):
            model, x, y, cuts = make("skips")
            if again:
                model = kerasmem.recompute(model, cuts=cuts)
            model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse", metrics=["mae"], **options)
            model.fit(x, y, epochs=2, batch_size=6, shuffle=False, verbose=0)
            scores = model.evaluate(x, y, verbose=0)
            weights.append([*model.get_weights(), np.array(scores), model.predict(x, verbose=0)])
        for one, other in zip(*weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)

    def test_the_inside_is_computed_again_in_training_only(self):
        model = kerasmem.recompute(mlp(), segments=3)
        model.compile("sgd", "mse")
        assert recomputations(model, data()[0]) > 10
        step = tf.function(lambda x: model(x, training=False)).get_concrete_function(tf.TensorSpec((4, 8)))
        assert not any("recompute" in each.name or each.type == "IdentityN" for each in step.graph.get_operations())

    def test_gradients_of_a_gradient(self):
        plain = mlp()
        x = tf.constant(data()[0])
        found = []
        for model in (plain, kerasmem.recompute(plain, segments=3)):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(model(x, training=True))
                loss = tf.reduce_sum(inner.gradient(y, x) ** 2)
            found.append(outer.gradient(loss, [each.kernel.value for each in plain.layers]))
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class TestModel:
    def test_layers_weights_and_compiled_state_are_shared(self):
        plain = mlp()
        plain.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False)
        plain.fit(*data(), verbose=0)
        model = kerasmem.recompute(plain, segments=3)
        assert model.weights == plain.weights
        assert [each.name for each in model.layers[1:]] == [each.name for each in plain.layers]
        assert model.optimizer is plain.optimizer
        assert model.optimizer.iterations.numpy() == 1
        model.fit(*data(), verbose=0)
        assert plain.optimizer.iterations.numpy() == 2
        assert not model.jit_compile
        assert plain.evaluate(*data(), verbose=0) == pytest.approx(model.evaluate(*data(), verbose=0), rel=1e-5)

    def test_plan(self):
        model = kerasmem.recompute(mlp(), segments=3, batch_size=64)
        assert model.plan.batch_size == 64
        assert model.plan.cuts == model.cuts
        assert model.recomputed == (True, True, False)
        assert model.plan.activation_bytes < model.plan.plain_activation_bytes
        assert len(kerasmem.recompute(model, segments=4).plan.segments) == 4, "a recomputed model is cut anew"

    def test_files(self, tmp_path):
        x, y = data()
        model = kerasmem.recompute(mlp(), segments=3)
        model.compile("adam", "mse", jit_compile=False)
        model.fit(x, y, verbose=0)
        model.save(tmp_path / "model.keras")
        with zipfile.ZipFile(tmp_path / "model.keras") as archive:
            assert b"ecomputed" not in archive.read("config.json"), "it opens where kerasmem is not installed"
        plain = keras.saving.load_model(tmp_path / "model.keras")
        assert type(plain) is type(keras.Model(model.input, model.output))
        assert recomputations(plain, x) == 0
        assert plain.optimizer.iterations == model.optimizer.iterations > 0
        loaded = kerasmem.recompute(plain, cuts=model.cuts)
        assert loaded.cuts == model.cuts and loaded.recomputed == model.recomputed
        assert recomputations(loaded, x) > 10
        assert kerasmem.estimate(tmp_path / "model.keras", method="graph").bytes.total > 0
        for each in (model, plain, loaded):
            if each is not loaded:  # it shares the weights of the plain one
                each.fit(x, y, shuffle=False, verbose=0)
        for each in (plain, loaded):
            np.testing.assert_allclose(model.predict(x, verbose=0), each.predict(x, verbose=0), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("suffix", ["keras", "h5"])
    def test_one_inside_another_model_is_saved_as_the_plain_one(self, tmp_path, suffix):
        def outer(inner):
            inputs = keras.Input((8,))
            return keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))

        path = tmp_path / f"outer.{suffix}"
        inner = kerasmem.recompute(mlp(), segments=3)
        model = outer(inner)
        model.save(path)
        model.save_weights(tmp_path / "m.weights.h5")
        with zipfile.ZipFile(path) if suffix == "keras" else contextlib.nullcontext() as archive:
            written = archive.read("config.json") if archive else path.read_bytes()
        assert b"ecomputed" not in written and b"kerasmem" not in written and b"cuts" not in written
        plain = keras.saving.load_model(path)
        assert type(plain.layers[1]) is type(plain) and not isinstance(plain.layers[1], RecomputedFunctional)
        np.testing.assert_array_equal(plain.predict(data()[0], verbose=0), model.predict(data()[0], verbose=0))
        plain_inner = keras.Model(inner.input, inner.output, name=inner.name)
        outer(plain_inner).load_weights(tmp_path / "m.weights.h5")  # the names are the plain model's

    def test_kerasmem_itself_keeps_the_cuts_inside_another_model(self):
        inner = kerasmem.recompute(mlp(), segments=3)
        inputs = keras.Input((8,))
        outer = keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))
        outer.compile("sgd", "mse", jit_compile=False)
        assert recomputations(outer, data()[0]) > 10
        with_cuts = keras.saving.deserialize_keras_object(configuration(outer)).layers[1]
        assert isinstance(with_cuts, RecomputedFunctional) and with_cuts.plan is None
        assert with_cuts.cuts == inner.cuts

    @pytest.mark.usefixtures("mixed_float16")
    def test_the_models_own_policy_counts(self):
        plain = mlp()
        keras.config.set_dtype_policy("float32")
        model = kerasmem.recompute(plain, segments=3)
        for each in (plain, model):
            each.compile("sgd", "mse", jit_compile=False)
            assert each.dtype_policy.name == "mixed_float16"
            assert isinstance(each.optimizer, keras.optimizers.LossScaleOptimizer)

    @pytest.mark.parametrize("name", ["weights.weights.h5", "whole.keras"])
    def test_weights_are_interchangeable_both_ways(self, tmp_path, name):
        plain = mlp()
        path = tmp_path / name
        for saving, loading in (
            (plain, kerasmem.recompute(mlp(), segments=3)),
            (kerasmem.recompute(mlp(), segments=2), mlp()),
        ):
            saving.save_weights(path) if "weights" in name else saving.save(path)
            loading.load_weights(path)
            for one, other in zip(saving.get_weights(), loading.get_weights(), strict=True):
                np.testing.assert_array_equal(one, other)

    def test_training_checkpoints_of_tensorflow(self, tmp_path):
        plain = mlp()
        other = kerasmem.recompute(mlp(), segments=3)
        path = tf.train.Checkpoint(model=kerasmem.recompute(plain, segments=3)).save(str(tmp_path / "c"))
        tf.train.Checkpoint(model=other).restore(path).assert_existing_objects_matched()
        np.testing.assert_array_equal(plain.get_weights()[0], other.get_weights()[0])


class TestRefusals:
    def test_a_functional_model_with_a_step_of_its_own(self):
        class Stepping(keras.Model):
            def train_step(self, data):
                return {}

        inputs = keras.Input((2,))
        with pytest.raises(UsageError, match=r"kerasmem.recompute\(keras.Model\(model.inputs, model.outputs\)\)"):
            kerasmem.recompute(Stepping(inputs, keras.layers.Dense(1)(inputs)))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"segments": 0}, "segments must be .*got 0"),
            ({"segments": 99}, "from 1 to 7"),
            ({"segments": "some"}, "segments .*some"),
            ({"cuts": ["nowhere"]}, "cuts must be layers that model .* calls .dense_0"),
            ({"cuts": ["dense_3", "dense_1"]}, "in the order of the model's calls"),
            ({"cuts": ["dense_1"], "segments": 2}, "cuts and segments"),
            ({"cuts": [3]}, "cuts must be layers.*got 3"),
            ({"batch_size": 0}, "batch_size must be .*got 0"),
            ({"memory": "2MB", "batch_size": 65536}, "use a smaller batch"),
            ({"memory": "no card"}, "no card"),
        ],
        ids=str,
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(UsageError, match=message):
            kerasmem.recompute(mlp(), **arguments)

    def test_a_target_is_met_by_the_estimate_too(self):
        layers = [keras.layers.Dense(128, activation="gelu", name=f"dense_{n}") for n in range(24)]
        model = keras.Sequential([keras.Input((128,)), *layers])
        model.compile("sgd", "mse")
        plain = kerasmem.estimate(model, batch_size=1024).bytes
        target = plain.total // 2
        made = kerasmem.recompute(model, memory=target, batch_size=1024)
        assert kerasmem.estimate(made, batch_size=1024).bytes.high <= target < plain.low
        assert made.plan.target_bytes == target
        lowest = kerasmem.recompute(model, batch_size=1024)
        assert made.plan.extra_time < 0.9 * lowest.plan.extra_time, "it recomputes no more than it must"

    def test_no_model_and_no_shape(self):
        with pytest.raises(UsageError, match=r"must be a Keras model.*load a file"):
            kerasmem.recompute("model.keras")
        with pytest.raises(UsageError, match="not built yet"):
            kerasmem.recompute(keras.Sequential([keras.layers.Dense(1)]))
        with pytest.raises(UsageError, match="Functional or Sequential"):
            kerasmem.recompute(type("Subclassed", (keras.Model,), {})())
        open_sizes = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(2), keras.layers.Dense(1)])
        with pytest.raises(UsageError, match="unknown dimensions"):
            kerasmem.recompute(open_sizes, segments=2)
        assert kerasmem.recompute(open_sizes, segments=2, input_shape=(6, 4)).plan is not None


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "SimpleRNN"])
def test_what_a_loop_keeps_grows_with_its_turns(layer):
    from kerasmem.training.recompute.tracing import trace_chain

    def kept(turns):
        cell = getattr(keras.layers, layer)(16)
        model = keras.Model(inputs := keras.Input((turns, 8)), keras.layers.Dense(1)(cell(inputs)))
        return sum(each.bytes for each in trace_chain(model, 32)[0].kept_tensors)

    few, many = kept(20), kept(40)
    assert few > 20 * 32 * 16 * 4  # the states of all turns at least
    assert many == pytest.approx(2 * few, rel=0.1)
