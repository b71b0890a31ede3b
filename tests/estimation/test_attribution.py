"""From operations' names to layers and phases."""

from __future__ import annotations

import keras
import pytest

from kerasmem.estimation.layers import infer_layers
from kerasmem.models.compiling import TrainingSettings
from kerasmem.models.inputs import model_inputs
from kerasmem.models.op_names import Attribution, Origin
from kerasmem.models.opening import open_model
from kerasmem.models.step import prepare_step, trace_step

layers = keras.layers
ATTRIBUTION = Attribution(
    {
        "net_1": ("net",),
        "net_1/conv_1": ("net", "conv"),
        "net_1/conv_2": ("net", "conv"),
        "net_1/tower_1": ("net", "tower"),
        "net_1/tower_1/dense_1": ("net", "tower", "dense"),
        "net_1/block_1": ("net", "block"),
        "net_1/block_1/inner_1": ("net", "block", "inner"),
    },
    ["conv", "tower/dense", "block"],
    ("adam", "loss_scale"),
)


@pytest.mark.parametrize(
    ("name", "layer", "phase"),
    [
        ("net_1/conv_1/Conv2D", "conv", "forward"),
        ("net_1/conv_2/BiasAdd", "conv", "forward"),  # called a second time
        ("gradient_tape/net_1/conv_1/Conv2DBackpropFilter", "conv", "backward"),
        ("net_1/tower_1/dense_1/MatMul", "tower/dense", "forward"),
        ("gradient_tape/net_1/tower_1/dense_1/MatMul/MatMul_1", "tower/dense", "backward"),
        ("net_1/block_1/inner_1/MatMul", "block", "forward"),  # a layer inside a layer counts as that layer
        ("net_1/tower_1/reshape", None, "forward"),  # the nested model has no row of its own
        ("gradient_tape/loss/div", None, "backward"),
        ("compile_loss/mse/sub", None, "forward"),
        ("adam/Mul", None, "optimizer"),
        ("adam_3/Mul", None, "optimizer"),
        ("loss_scale/cond/Switch", None, "optimizer"),
        ("adam_x/Mul", None, "forward"),
        ("adamant/Mul", None, "forward"),
        ("while/body/net_1/conv_1/Conv2D", "conv", "forward"),
    ],
)
def test_origins(name, layer, phase):
    assert ATTRIBUTION.origin(name) == Origin(layer, phase)


def test_a_real_step():
    def build():
        image = keras.Input((8, 8, 1), name="image")
        inner = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(2, 3, name="c")], name="inner")
        tower = keras.Model(image, layers.Flatten(name="f")(inner(image)), name="tower")
        a, b = keras.Input((8, 8, 1), name="a"), keras.Input((8, 8, 1), name="b")
        shared = layers.Dense(3, name="shared")
        model = keras.Model([a, b], shared(tower(a)) + shared(tower(b)), name="m")
        model.compile("adam", "mse")
        return model

    with open_model(build) as opened:
        structure, inputs = model_inputs(opened.model, {})
        rows = [row.name for row in infer_layers(opened.model, structure, inputs, 4).layers]
        traced = trace_step(prepare_step(opened.model, TrainingSettings(), structure, inputs, 4))
    assert {"tower/inner/c", "shared"} <= set(rows)
    attribution = Attribution(traced.scopes, rows, traced.optimizers)
    origins = {}
    for operation in traced.function.graph.get_operations():
        origins.setdefault(operation.type, []).append(attribution.origin(operation.name))
    assert origins["Conv2D"] == [Origin("tower/inner/c", "forward")] * 2  # both calls of the shared tower
    assert set(origins["MatMul"]) == {Origin("shared", "forward"), Origin("shared", "backward")}
    assert set(origins["Conv2DBackpropFilter"]) == {Origin("tower/inner/c", "backward")}
    assert set(origins["AssignSubVariableOp"]) == {Origin(None, "optimizer")}
