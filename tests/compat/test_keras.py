"""Private attributes of Keras's objects, and behaviours, that the modules of compat rest on."""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasmem.compat import keras_layers, keras_state, keras_training
from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.keras_state import (
    give_value,
    handle_only,
    has_value,
    raw_value,
    stand_ins_for,
    wraps_container,
)
from kerasmem.compat.keras_training import compile_arguments, compute_loss, loss_and_metrics_built, user_metrics
from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.estimation.estimating import estimate

layers = keras.layers


@pytest.fixture
def compiled():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"], loss_weights=2.0)
    return model


def test_the_class_of_a_functional_model():
    tensor = keras.Input((1,))
    assert type(keras.Model(tensor, layers.Dense(2)(tensor))) is keras_layers.functional_class()


def test_the_calls_of_a_functional_model(compiled):
    calls = keras_layers.calls_of(keras_layers.graph_of(compiled))
    assert [each.operation for each in calls] == compiled.layers
    assert keras_layers.graph_of(keras.Sequential([layers.Dense(3)])) is None


def test_layers_inside_layers(compiled):
    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(2)
            self.others = [layers.Dense(2), compiled]

    block = Block()
    inside = {block, block.first, *block.others, compiled.layers[0]}
    assert inside < set(keras_layers.flatten_layers(block))
    assert block not in keras_layers.flatten_layers(block, include_self=False)


def test_what_a_model_was_compiled_with(compiled):
    assert loss_and_metrics_built(compiled) == (False, False)
    assert user_metrics(compiled) == ["mae"]
    arguments = compile_arguments(compiled)
    assert (arguments["metrics"], arguments["weighted_metrics"], arguments["loss_weights"]) == (["mae"], ["mse"], 2.0)
    compiled.compile(**arguments)
    assert user_metrics(keras.Sequential([layers.Dense(3)])) is None
    assert float(compute_loss(compiled, x=None, y=keras.ops.ones((2, 3)), y_pred=keras.ops.zeros((2, 3)))) == 2.0


def test_variables_behind_keras_variables(compiled):
    with keras.StatelessScope(initialize_variables=False), keras_state.variables_stay_uninitialized():
        bare = keras.Variable("zeros", shape=(2, 3), dtype="float16")
    assert raw_value(bare) is None
    with stand_ins_for([bare], handle_only):
        assert (tuple(raw_value(bare).shape), raw_value(bare).dtype.name) == ((2, 3), "float16")
    assert raw_value(bare) is None
    assert tuple(raw_value(compiled.weights[0]).shape) == (4, 3)
    with keras.StatelessScope():
        pass
    assert raw_value(bare) is None, "a later scope has initialised it"


class Adds(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


def test_the_loss_that_a_layer_adds():
    layer = Adds()
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(keras.ops.ones((2,)))
        (loss,) = scope.losses
        assert keras_layers.loss_owner(loss, [layers.Dense(1), layer]) is layer
        keras_layers.replace_losses(layer, other := keras.ops.ones(()))
        assert keras_layers.loss_owner(loss, [layer]) is None
        assert keras_layers.loss_owner(other, [layer]) is layer


def test_scopes_of_keras():
    with keras_state.attributes_set(stateless_scope="here"):
        assert keras_state.attribute("stateless_scope") == "here"
    assert keras_state.attribute("stateless_scope") is None
    assert keras_state.autocast_dtype() is None
    with keras_state.autocast("float16"):
        assert keras_state.autocast_dtype() == "float16"
    tensor = keras.ops.ones((2,))
    keras_state.set_mask(tensor, mask := keras.ops.ones((2,), "bool"))
    assert keras_state.mask_of(tensor) is mask and keras_state.mask_of(None) is None
    assert not keras_state.in_training_call() and not keras_state.in_symbolic_scope()


def missing(self):
    raise NotAvailableError(f"{self.feature} does not work here")


def test_a_model_file_opens_and_the_formula_works_without_any_private_part(tmp_path, monkeypatch, mnist_cnn):
    inputs = keras.Input((8,), name="image")
    branch = layers.Dense(4, activation="gelu")(keras.ops.tile(inputs, (1, 2)))
    model = keras.Model(inputs, {"a": layers.Dense(2)(branch), "b": layers.BatchNormalization()(branch)})
    model.compile("adam", {"a": "mse", "b": "mae"})
    model.save(tmp_path / "graph.keras")
    mnist_cnn.save(tmp_path / "m.h5")
    (tmp_path / "m.json").write_text(mnist_cnn.to_json())
    before = {name: estimate(tmp_path / name, method="formula") for name in ("graph.keras", "m.h5", "m.json")}
    monkeypatch.setattr(Borrowed, "get", missing)
    for name, report in before.items():
        assert estimate(tmp_path / name, method="formula").to_dict() == report.to_dict()


def test_a_file_with_recomputed_segments_says_what_is_missing(tmp_path, monkeypatch):
    config = {"class_name": "RecomputedFunctional", "config": {}, "registered_name": "kerasmem>RecomputedFunctional"}
    (tmp_path / "m.json").write_text(json.dumps({**config, "module": "kerasmem.training.recompute.model"}))
    monkeypatch.setattr(Borrowed, "get", missing)
    monkeypatch.delitem(sys.modules, "kerasmem.training.recompute.model", raising=False)
    with pytest.raises(NotAvailableError, match=r"kerasmem\.recompute does not work"):
        estimate(tmp_path / "m.json", method="formula")


def test_the_seed_generator_that_layers_share():
    keras.random.uniform((2,))
    state = keras_state.global_seed_state()
    before = state.numpy().copy()
    keras.random.uniform((2,))
    assert (state.numpy() != before).any()


def test_asking_for_the_functional_class_names_no_layer():
    """Keras numbers the layers without a name in the order they are made."""
    keras.backend.clear_session()
    keras_layers.functional_class.cache_clear()
    keras_layers.functional_class()
    assert keras.Input((1,)).name.startswith("keras_tensor")
    tensor = keras.Input((1,))
    model = keras.Model(tensor, layers.Identity()(tensor))
    assert (model.name, model.layers[-1].name) == ("functional", "identity")


def test_graphs_of_layers():
    inputs = keras.Input((3,))

    class Own(keras.Model):
        def call(self, x):
            return x

    assert isinstance(keras.Model(inputs, layers.Dense(2)(inputs)), keras_layers.functional_class())
    assert not isinstance(Own(), keras_layers.functional_class())
    assert not isinstance(layers.Dense(2), keras_layers.functional_class())
    assert keras_layers.supports_jit(Own())


def test_names_that_tensorflow_refuses():
    layer = layers.Dense(2, name="my layer (v2)")
    layer.build((None, 3))
    with keras_layers.without_name_scopes():
        traced = tf.function(layer).get_concrete_function(tf.TensorSpec((1, 3)))
    assert traced.structured_outputs.shape == (1, 2)


def test_layers_with_a_generator_of_their_own():
    assert keras_layers.draws_numbers(layers.Dropout(0.5))
    assert not keras_layers.draws_numbers(layers.Dense(1))


def test_a_variable_without_a_value_is_known():
    with keras.StatelessScope():
        variable = keras.Variable(keras.initializers.Ones(), shape=(2,), dtype="float32")
        assert not has_value(variable)
        with pytest.raises(ValueError, match="stateless scope"):  # Keras's own refusal to give it one in here
            give_value(variable)
    assert has_value(variable)  # Keras gives it one where the scope ends
    give_value(variable)


def test_a_started_device_is_seen():
    tf.constant(1.0)
    assert devices_are_started()


def test_losses_reduce_by_the_function_that_is_replaced():
    def doubled(reduce, values, **how):
        assert set(how) == {"sample_weight", "mask", "reduction", "dtype"}
        return 2 * reduce(values, **how)

    loss, values = keras.losses.MeanSquaredError(), (np.ones((4, 1)), np.zeros((4, 1)))
    with keras_training.reduction_replaced(doubled):
        assert float(loss(*values)) == 2
    assert float(loss(*values)) == 1


def test_masked_weights_are_zero():
    weights = keras_training.masked_weights(
        keras.ops.ones((4,)), keras.ops.array([True, True, True, False]), "float32", "sum_over_batch_size"
    )
    assert float(weights[3]) == 0


def test_trackers_of_each_output():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in "ab"})
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((2, 3)), {name: np.ones((2, 1)) for name in "ab"})
    loss, tracker = keras_training.loss_and_tracker(model)
    assert tracker.name == "loss"
    assert sorted(each.name for each in loss.metrics) == ["a_loss", "b_loss"]


def test_losses_that_layers_add():
    layer = Adds()
    layer(np.ones((2, 3)))
    assert keras_training.has_added_losses(layer)
    assert not keras_training.has_added_losses(layers.Dense(1, kernel_regularizer="l2"))


def test_lists_in_attributes_are_recognised():
    optimizer = keras.optimizers.Adam()
    optimizer.build([keras.Variable([1.0])])
    kinds = [type(value) for value in vars(optimizer).values() if isinstance(value, list)]
    assert any(wraps_container(value) for value in vars(optimizer).values()), kinds
