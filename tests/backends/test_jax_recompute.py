"""`kerasmem.recompute` through `jax.checkpoint`: `scripts/test --with jax`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

if os.environ.get("KERAS_BACKEND") != "jax":
    pytest.skip("of Keras on JAX: run by `scripts/test --with jax`", allow_module_level=True)

import jax
import keras
import numpy as np
from keras import layers

import kerasmem

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "advise.md"


def stack(width=64, depth=6):
    x = inputs = keras.Input((width,))
    for number in range(depth):
        x = layers.Dense(width, activation="gelu", kernel_regularizer="l2", name=f"dense_{number}")(x)
        if number % 2:
            x = layers.Dropout(0.3, seed=number, name=f"drop_{number}")(x)
            x = layers.BatchNormalization(name=f"norm_{number}")(x)
    return keras.Model(inputs, layers.Dense(1, activity_regularizer="l2", name="head")(x))


def masked():
    x = inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True, name="words")(x)
    x = layers.LSTM(8, return_sequences=True, name="first")(x)
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(8, name="second")(x)))


def assert_close(actual, expected):
    """Compare weights relative to the largest of their layer, because XLA rounds differently in another program."""
    for wanted, values in zip(expected, actual, strict=True):
        np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=2e-5 * np.abs(wanted).max())


def trained(model, x, y):
    model.compile("sgd", "mse")
    logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return logs, model.get_weights()


@pytest.mark.parametrize(("build", "cuts"), [(stack, ["dense_1", "drop_3"]), (masked, ["words", "first"])])
def test_recompute_trains_like_the_plain_model(build, cuts):
    draw = np.random.default_rng(0)
    x = draw.integers(0, 3, (24, 6)) if build is masked else draw.random((24, 64), "float32")
    y = draw.random((24, 1), "float32")
    keras.utils.set_random_seed(3)
    plain = build()
    keras.utils.set_random_seed(3)
    cut = kerasmem.recompute(build(), cuts=cuts)
    assert cut.cuts == tuple(cuts)
    (expected, weights), (losses, others) = trained(plain, x, y), trained(cut, x, y)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(others, weights)
    assert_close([cut.predict(x, verbose=0)], [plain.predict(x, verbose=0)])


def test_segments_are_recomputed_for_the_gradient():
    """On a CPU, XLA recomputes them too early to save memory: see docs/guides/jax.md."""
    model = kerasmem.recompute(stack(16, 6), segments=3)
    assert len(model.cuts) == 2 and model.recomputed == (True, True, False)

    def loss(values, x):
        return (model.stateless_call(values, frozen, x, training=True)[0] ** 2).sum()

    trained = [variable.value for variable in model.trainable_variables]
    frozen = [variable.value for variable in model.non_trainable_variables]
    program = str(jax.make_jaxpr(jax.grad(loss))(trained, np.ones((4, 16), "float32")))
    assert program.count("checkpoint[") + program.count("remat2[") + program.count("remat[") >= 2


def test_the_offloading_layer_of_the_guide_trains_like_its_block():
    """On a CPU, JAX has the host's memory as a memory kind too."""
    guide = {}
    (code,) = re.findall(r"^```py\n(import jax\n.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    exec(code, guide)

    def block():
        return keras.Sequential([layers.Dense(64, "gelu"), layers.BatchNormalization(), layers.Dense(64, "gelu")])

    def build(wrap):
        return keras.Sequential([keras.Input((32,)), wrap(block()), wrap(block()), layers.Dense(1)])

    draw = np.random.default_rng(0)
    x, y = draw.random((24, 32), "float32"), draw.random((24, 1), "float32")
    plain, offloaded = build(lambda block: block), build(guide["Offloaded"])
    offloaded.set_weights(plain.get_weights())
    (expected, weights), (losses, others) = trained(plain, x, y), trained(offloaded, x, y)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(others, weights)
