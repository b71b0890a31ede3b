"""A recomputed model trains as the plain one does: gradients, masks of dropout, statistics, losses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from recomputed_models import MODELS, make

import kerasmem
from kerasmem.models.recomputed import RecomputedFunctional

# Cuts inside segments while those run again: across skip connections, in nested models, of layers without weights.
TWICE = {
    "skips": [("dense_0", "norm_0", "add_0"), "add_1", "drop_2"],
    "losses": [("a", "b"), "c", "d"],
    "masks": [("embed",), "drop", "norm"],
    "shared": [("inner",), "d"],
    "tied": [("embed", "less"), "inside"],
    "frozen": [("c0", "n0", "r0"), "n1"],
    "global_seed": [("a", "noise_0"), "b0", ("noise_1",), "b1"],
    "nested": [
        "stem",
        "backbone/functional/inner/norm",
        "backbone/functional",
        ("backbone/last/dense",),
        "backbone/last/norm",
    ],
    "transfer": ["backbone/n0", ("backbone/c1",), "backbone/n1", "backbone", ("pool",), "drop"],
}


@pytest.fixture(params=["eager", "graph", "xla"])
def mode(request):
    """How a step runs. Graphs are optimised differently, so that only in float64 is their rounding below 1e-6."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32" if request.param == "eager" else "float64")
    yield request.param
    keras.config.set_dtype_policy(before)


def gradients(model, x, y, mode):
    """Loss, gradients and the model's other states after one step that changes no weight."""

    def step():
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(x, training=True))
            pairs = zip(outputs, tf.nest.flatten(y), strict=True)
            loss = tf.add_n([*(tf.reduce_mean((a - tf.cast(b, a.dtype)) ** 2) for a, b in pairs), *model.losses])
        return loss, tape.gradient(loss, [each.value for each in model.trainable_variables])

    run = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    loss, found = run()
    states = [each.numpy() for each in model.non_trainable_variables]
    return float(loss), [tf.convert_to_tensor(each).numpy() for each in found], states


def assert_close(one, other, tolerance=1e-6):
    for a, b in zip(one, other, strict=True):
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(a), 1e-6)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_states_are_those_of_the_plain_model(name, levels, mode):
    plain, x, y, _ = make(name)
    expected = gradients(plain, x, y, mode)
    model, x, y, cuts = make(name)
    if levels > 1:
        cuts = TWICE[name]
    recomputed = kerasmem.recompute(model, cuts=cuts)
    assert isinstance(recomputed, RecomputedFunctional)
    found = gradients(recomputed, x, y, mode)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert_close(expected[1], found[1])
    assert_close(expected[2], found[2])
