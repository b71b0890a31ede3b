"""A recomputed model trains as the plain one does: gradients, masks of dropout, statistics, losses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from recomputed_models import MODELS, make

import kerasmem
from kerasmem.training.recompute.model import RecomputedFunctional


@pytest.fixture
def dtype(mode):
    """The policy of a case. Graphs sum in another order, which float32 shows as rounding.

    Where sums of a gradient nearly cancel, that rounding is as large as any tolerance that would still find a mistake,
    and it depends on the kernels. In float64 both are far apart.
    """
    before = keras.config.dtype_policy()
    chosen = "float32" if mode == "eager" else "float64"
    keras.config.set_dtype_policy(chosen)
    yield chosen
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


def assert_close(one, other, tolerance):
    for a, b in zip(one, other, strict=True):
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(a), 1e-6)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_states_are_those_of_the_plain_model(name, mode, dtype):
    tolerance = {"float32": 1e-6, "float64": 1e-12}[dtype]
    plain, x, y, _ = make(name)
    expected = gradients(plain, x, y, mode)
    model, x, y, cuts = make(name)
    recomputed = kerasmem.recompute(model, cuts=cuts)
    assert isinstance(recomputed, RecomputedFunctional)
    found = gradients(recomputed, x, y, mode)
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert_close(expected[1], found[1], tolerance)
    assert_close(expected[2], found[2], tolerance)
