"""Every kind of Keras 3 model, opened from every kind of file, is the model that was saved; mutated files never are."""

from __future__ import annotations

import functools
import json
import re

import keras
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerasmem.errors import KerasmemError
from kerasmem.estimation import estimating

layers = keras.layers


def estimate(source, **options):
    """Estimate by the formula unless a test says otherwise: most here are about shapes."""
    return estimating.estimate(source, **{"method": "formula", **options})


def sequential():
    return keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(2)], name="m")


def nested():
    image = keras.Input((8, 8, 1))
    inner = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(2, 3), layers.BatchNormalization()])
    tower = keras.Model(image, layers.Flatten()(inner(image)), name="tower")
    a, b = keras.Input((8, 8, 1), name="a"), keras.Input((8, 8, 1), name="b")
    shared = layers.Dense(3)
    return keras.Model([a, b], {"x": shared(tower(a)), "y": shared(tower(b) * 2.0)}, name="m")


def text():
    ids = keras.Input((20,), dtype="int32", name="ids")
    x = layers.Embedding(50, 8, mask_zero=True)(ids)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.MultiHeadAttention(2, 4)(x, x) + x
    x = layers.TimeDistributed(layers.Dense(4))(layers.LayerNormalization()(x))
    x = layers.RNN([layers.GRUCell(3), layers.LSTMCell(2)])(x)
    return keras.Model(ids, x, name="m")


def several_outputs():
    image = keras.Input((16, 3), name="series")
    outputs, *states = layers.LSTM(4, return_state=True, return_sequences=True)(image)
    return keras.Model(image, [outputs, *states, keras.ops.mean(outputs, axis=1)], name="m")


def mixed():
    image = keras.Input((8, 8, 3), dtype="uint8")
    x = layers.Rescaling(1 / 255.0, dtype="float32")(image)
    x = layers.SeparableConv2D(
        4, 3, dtype="mixed_float16", pointwise_regularizer="l2", depthwise_constraint="max_norm"
    )(x)
    return keras.Model(image, layers.Activation("softmax", dtype="float32")(x), name="m")


def preprocessing():
    image = keras.Input((16, 16, 3))
    x = layers.RandomFlip()(layers.Resizing(8, 8)(image))
    x = layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[1.0, 1.0, 2.0])(x)
    x = layers.SpectralNormalization(layers.Conv2D(2, 3))(x)
    return keras.Model(image, layers.LeakyReLU()(layers.UnitNormalization()(x)), name="m")


BUILDERS = [sequential, nested, text, several_outputs, mixed, preprocessing]


@pytest.mark.parametrize("build", BUILDERS)
def test_files_give_what_the_object_gives(build, tmp_path):
    model = build()
    (tmp_path / "m.json").write_text(model.to_json())
    model.save(tmp_path / "m.keras")
    model.save(tmp_path / "m.h5")
    expected = estimate(model, batch_size=5)
    assert expected.model.parameters == model.count_params()
    assert expected.model.trainable_parameters == sum(weight.shape.num_elements() for weight in trained(model))
    for name in ("m.keras", "m.h5", "m.json"):
        report = estimate(tmp_path / name, batch_size=5)
        assert report.notes == expected.notes, name
        assert [(r.output_shape, r.parameters, r.bytes, r.uses) for r in report.layers] == [
            (r.output_shape, r.parameters, r.bytes, r.uses) for r in expected.layers
        ], name
        assert (report.bytes, report.formula) == (expected.bytes, expected.formula)


def trained(model):
    return [weight.value for weight in model.trainable_weights]


ODD_VALUES = (
    None, -1, 0, 1, 2.5, 10**9, 1e308, "", "x", "a" * 1000, "../../etc", [], {}, [1, [2]], {"class_name": "X"}, True,
)  # fmt: skip


def places(node):
    """Yield the container and the key of each value in a tree."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield node, key
        yield from places(child)


@functools.cache
def described(build):
    return build().to_json()


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(build=st.sampled_from([nested, text, mixed]), data=st.data())
def test_a_mutated_configuration_is_an_error_or_a_model_and_nothing_else(tmp_path, build, data):
    config = json.loads(described(build))
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(config))
        node, key = found[data.draw(st.integers(0, len(found) - 1))]
        if data.draw(st.booleans()) or isinstance(node, list):
            node[key] = data.draw(st.sampled_from(ODD_VALUES))
        else:
            del node[key]
    (tmp_path / "m.json").write_text(json.dumps(config))
    try:
        estimate(tmp_path / "m.json")
    except KerasmemError as error:
        assert re.search(r"m\.json|model|input|batch", str(error)), str(error)
        assert len(str(error)) < 1500
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
