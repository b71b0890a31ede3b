"""What is frozen in a live model is frozen in its copies."""

from __future__ import annotations

import keras
import pytest

import kerasmem
from kerasmem.models.opening import NotRebuiltError
from kerasmem.models.spec import StepSpec

layers = keras.layers


def attention_model(freeze):
    """Every layer has its name, since Grappler orders operations by names."""
    inputs = keras.Input((32, 512), name="words")
    hidden = layers.MultiHeadAttention(8, 64, name="attention")(inputs, inputs)
    outputs = layers.Dense(1, name="head")(layers.GlobalAveragePooling1D(name="pool")(hidden))
    model = keras.Model(inputs, outputs, name="classifier")
    freeze(model)
    model.compile("adam", "mse")
    return model


def freeze_layer(model):
    model.get_layer("attention").trainable = False


def freeze_inner_layer(model):
    model.get_layer("attention").query_dense.trainable = False


def freeze_single_weight(model):
    model.get_layer("head").kernel.trainable = False


def train_single_weight(model):
    model.trainable = False
    model.get_layer("head").bias.trainable = True


def adapt_head(model):
    model.get_layer("head").enable_lora(4)


@pytest.mark.parametrize(
    "freeze", [freeze_layer, freeze_inner_layer, freeze_single_weight, train_single_weight, adapt_head]
)
def test_copies_train_the_same_weights(freeze):
    model = attention_model(freeze)
    paths = [weight.path for weight in model.trainable_weights]
    with StepSpec(model).portable().open_model() as opened:
        assert [weight.path for weight in opened.model.trainable_weights] == paths


def test_frozen_attention_is_estimated_as_frozen():
    function = kerasmem.estimate(lambda: attention_model(freeze_layer), batch_size=8, method="graph").bytes
    model = kerasmem.estimate(attention_model(freeze_layer), batch_size=8, method="graph").bytes
    assert (model.total, model.optimizer) == (function.total, 4_116)


def test_frozen_parts_that_no_configuration_has_are_refused():
    def adapt_inside(model):
        model.get_layer("attention").query_dense.enable_lora(4)

    model = attention_model(adapt_inside)
    with pytest.raises(NotRebuiltError, match=r"lora_kernel_a.*pass a function"):
        StepSpec(model).portable().model.built()
