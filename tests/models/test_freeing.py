"""Models that were trained are freed, and those that live train on as if nothing had been."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasmem
from kerasmem.compat import gradients
from kerasmem.devices.host import held_bytes
from kerasmem.errors import UsageError
from kerasmem.models.freeing import Freed, kept_bytes

X, Y = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8), np.arange(8) % 4
PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4


def compiled(seed=0, jit_compile=False):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit_compile)
    return model


def trained(**settings):
    model = compiled(**settings)
    model.fit(X, Y, verbose=0)
    return model


def handles(model):
    """Return weak references to the memory behind the variables."""
    return [weakref.ref(variable.value.handle) for variable in [*model.variables, *model.optimizer.variables]]


def alive(references):
    return sum(reference() is not None for reference in references)


@pytest.fixture(autouse=True)
def a_clear_beginning():
    kerasmem.clear_session()


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_keras_keeps_what_clear_session_frees(jit_compile):
    model = trained(jit_compile=jit_compile)
    behind = handles(model)
    del model
    keras.utils.clear_session()
    gc.collect()
    assert alive(behind) >= 3 * 4, "weights and Adam's slots: TensorFlow has mended it? Then docs should say so"
    assert kept_bytes() >= 3 * 4 * PARAMETERS
    freed = kerasmem.clear_session()
    assert alive(behind) == 0
    assert freed.gradients
    assert freed.variable_bytes >= 3 * 4 * PARAMETERS
    assert "variables freed" in str(freed)
    assert kept_bytes() == 0
    assert Freed.from_dict(freed.to_dict()) == freed


@pytest.mark.slow
def test_two_hundred_models_leave_nothing_on_the_device_and_little_on_the_host():
    held = []
    for seed in range(200):
        behind = handles(trained(seed=seed))
        kerasmem.clear_session()
        assert alive(behind) == 0
        held.append(held_bytes())
    assert held[-1] - held[10] < 10 * 2**20, "TensorFlow's own 25 KB a model; 6 MB a model were it kept"


def test_a_living_model_trains_on_bit_for_bit():
    undisturbed = trained()
    undisturbed.fit(X, Y, epochs=2, verbose=0)
    model = trained()
    lost = handles(trained(seed=1))
    keras.utils.set_random_seed(0)  # the other model drew from the same generator; nothing here draws any more
    kerasmem.clear_session()
    assert alive(lost) == 0
    for _ in range(2):
        model.fit(X, Y, verbose=0)
        kerasmem.clear_session()
    assert all(np.array_equal(*pair) for pair in zip(model.get_weights(), undisturbed.get_weights(), strict=True))


def test_clear_session_of_a_model_drops_its_functions_and_keeps_keras_state():
    keras.utils.clear_session()
    model, other = trained(), trained(seed=1)
    step = other.train_function
    behind = handles(model)
    assert kerasmem.clear_session(model).gradients
    assert model.train_function is None
    assert other.train_function is step
    assert keras.layers.Dense(2).name == "dense_4"
    assert alive(behind) == len(behind)
    model.fit(X, Y, verbose=0)
    kerasmem.clear_session(model)
    del model
    gc.collect()
    assert alive(behind) == 0


def test_a_recomputed_model_lives_and_dies_as_others_do():
    model = kerasmem.recompute(compiled(), segments=2)
    model.fit(X, Y, verbose=0)
    kerasmem.clear_session()
    before = model.evaluate(X, Y, verbose=0)
    model.fit(X, Y, epochs=5, verbose=0)
    assert model.evaluate(X, Y, verbose=0) < before
    behind = handles(model)
    del model
    kerasmem.clear_session()
    kerasmem.clear_session()
    assert alive(behind) == 0


def test_gradients_through_a_living_model_and_its_export_are_the_same(tmp_path):
    model = trained()

    @tf.function
    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(y, x)

    x = tf.constant(X)
    before = slope(x)
    kerasmem.clear_session()
    assert np.array_equal(before, slope(x))
    model.export(str(tmp_path / "exported"), verbose=False)
    model.save(tmp_path / "model.keras")
    assert np.array_equal(tf.saved_model.load(str(tmp_path / "exported")).serve(x), model(x))


def test_clear_session_refuses_other_objects():
    with pytest.raises(UsageError, match="models must be Keras models; got str"):
        kerasmem.clear_session("model")


def test_where_tensorflow_has_no_such_registry_a_warning_says_so(monkeypatch):
    gone = gradients.Borrowed("json:no_registry", feature=gradients._FEATURE)
    monkeypatch.setattr(gradients, "_REGISTRY", gone)
    with pytest.warns(RuntimeWarning, match=r"freeing trained models .* does not work with json"):
        assert kerasmem.clear_session() == Freed()
    assert kept_bytes() is None


def test_an_estimate_leaves_nothing_behind():
    model = compiled()
    before = gradients.custom_gradients().keys()
    kerasmem.estimate(model, batch_size=8, method="graph")
    assert gradients.custom_gradients().keys() == before
