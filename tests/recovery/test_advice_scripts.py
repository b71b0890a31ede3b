"""Scripts compile the model as it was: losses, their weights and metrics by name or by place."""

from __future__ import annotations

import keras
import pytest

from kerasmem.compat.keras_compile import compile_arguments
from kerasmem.models.inputs import given_targets
from kerasmem.recovery.building import Origin
from kerasmem.recovery.script import script
from kerasmem.recovery.traits import Traits


def two_outputs():
    inputs = keras.Input((4,), name="x")
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    return keras.Model(inputs, outputs)


def written(source):
    origin = Origin(source, {}, None, None, None, given_targets(None, None))
    traits = Traits(origin, 8, False)
    return script(traits, [traits.change("batch_size", 4)], "smaller")


def recompiled(text):
    """What the script's own `compile` gives a model."""
    model = two_outputs()
    line = next(line for line in text.splitlines() if line.startswith("model.compile("))
    exec(line, {"keras": keras, "model": model})
    return compile_arguments(model)


@pytest.mark.parametrize("saved", [False, True])
def test_dicts_of_losses_weights_and_metrics_stay(saved, tmp_path):
    model = two_outputs()
    model.compile(
        "sgd",
        {"a": "mse", "b": keras.losses.BinaryCrossentropy(from_logits=True)},
        loss_weights={"a": 1.0, "b": 0.25},
        metrics={"a": ["mae", keras.metrics.RootMeanSquaredError()], "b": "mse"},
        jit_compile=False,
    )
    source = model
    if saved:
        source = str(tmp_path / "m.keras")
        model.save(source)
    found = recompiled(written(source))
    assert found["loss_weights"] == {"a": 1.0, "b": 0.25}
    assert found["loss"]["a"] == "mse" and found["loss"]["b"].get_config()["from_logits"]
    assert found["metrics"]["a"][0] == "mae" and isinstance(
        found["metrics"]["a"][1], keras.metrics.RootMeanSquaredError
    )
    assert found["metrics"]["b"] == ["mse"] or found["metrics"]["b"] == "mse"


def test_a_metric_that_is_not_keras_s_is_left_out_and_one_loss_has_no_weights():
    model = two_outputs()
    model.compile("sgd", "mse", metrics={"a": [lambda y, p: p], "b": ["mae"]}, jit_compile=False)
    text = written(model)
    assert "loss_weights" not in text and "lambda" not in text
    assert recompiled(text)["metrics"] == {"b": ["mae"]}
