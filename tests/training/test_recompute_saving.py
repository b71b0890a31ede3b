"""A plan saves what it says, by the estimate of the step itself, or the model is left as it is."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import pytest

import kerasmem
from kerasmem.training.recompute import building


def small_vgg():
    """First layers that keep most, and last layers whose weights are most."""
    parts = [keras.layers.Conv2D(16 * step, 3, padding="same", activation="relu") for step in (1, 1, 2, 2)]
    head = [keras.layers.MaxPooling2D(4), keras.layers.Flatten()]
    head += [keras.layers.Dense(1024, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *parts, *head], name="vgg")
    model.compile("sgd", "mse", jit_compile=False)
    return model


def test_the_weights_that_are_updated_while_activations_are_kept_count():
    model = small_vgg()
    made = kerasmem.recompute(model, batch_size=16)
    assert made.cuts
    ours, plain = (kerasmem.estimate(each, batch_size=16, method="graph").bytes.total for each in (made, model))
    assert ours < 0.9 * plain


def test_what_saves_nothing_by_the_estimate_is_left_as_it_is(monkeypatch):
    model, asked = small_vgg(), []

    def estimate(each, **_):
        asked.append(each)
        return SimpleNamespace(bytes=SimpleNamespace(total=100))

    monkeypatch.setattr(building, "estimate", estimate)
    with pytest.warns(UserWarning, match="saves nothing in model 'vgg'"):
        made = kerasmem.recompute(model, batch_size=16)
    assert made.cuts == () and made.recomputed == (False,) and len(asked) == 2
    assert made.plan.activation_bytes == made.plan.plain_activation_bytes and made.plan.extra_time == 0
    assert kerasmem.recompute(model, segments=3, batch_size=16).cuts, "as asked for"
