"""The same model with one number of one layer changed, from files and from Python; what cannot be is said clearly."""

from __future__ import annotations

import copy

import keras
import pytest

from kerasmem.errors import KerasmemError, ModelFileError, UnknownLayerError, UsageError
from kerasmem.models.opening import open_model
from kerasmem.models.variation import reshaping, with_number

layers = keras.layers


def small():
    inner = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3, name="conv"), layers.Flatten()], name="tower")
    image = keras.Input((8, 8, 3), name="image")
    x = layers.Dense(16, name="dense.v1")(inner(image))
    model = keras.Model(image, layers.Dense(2, name="head")(x), name="small")
    model.compile("adam", "mse")
    return model


def parameters(source):
    with open_model(source) as opened:
        return opened.model.count_params(), opened.training.optimizer


def expected(filters=4, units=16):
    return (27 * filters + filters) + (36 * filters * units + units) + (2 * units + 2)


@pytest.mark.parametrize("kind", ["model.h5", "model.keras", "object", "function"])
@pytest.mark.parametrize(
    ("vary", "number", "counted"),
    [("dense.v1.units", 64, expected(units=64)), ("tower/conv.filters", 9, expected(filters=9)),
     ("conv.filters", 1, expected(filters=1))],
)  # fmt: skip
def test_one_number_is_changed_and_what_follows_is_built_anew(tmp_path, kind, vary, number, counted):
    source = small()
    if kind.startswith("model"):
        source.save(tmp_path / kind)
        source = tmp_path / kind
    elif kind == "function":
        source = small
    with reshaping(source, vary)(number) as changed:
        assert parameters(changed) == (counted, "adam")
    assert parameters(source) == (expected(), "adam")


@pytest.mark.parametrize(
    ("vary", "message"),
    [("absent.units", "'absent' is no layer of the model"), ("head.unit", "no whole number 'unit'; it has: units"),
     ("head.name", "no whole number"), ("head.use_bias", "no whole number"), ("small.trainable", "no layer")],
)  # fmt: skip
def test_what_is_not_there(vary, message):
    with pytest.raises(UsageError, match=message):
        reshaping(small, vary)


def test_a_name_that_several_layers_have_needs_its_path():
    config = keras.saving.serialize_keras_object(small())
    config["config"]["layers"].append(copy.deepcopy(config["config"]["layers"][1]))
    config["config"]["layers"][-1]["config"]["name"] = "second"
    with pytest.raises(UsageError, match="several layers; write its path"):
        with_number(config, "conv.filters", 2)
    changed = with_number(config, "second/conv.filters", 2)
    assert changed["config"]["layers"][-1]["config"]["layers"][1]["config"]["filters"] == 2
    assert config["config"]["layers"][-1]["config"]["layers"][1]["config"]["filters"] == 4


def test_hostile_and_odd_configurations_are_clear_errors():
    for config in ({}, {"config": None}, {"config": {"layers": None}}, {"config": [1, None, {"config": 3}]}):
        with pytest.raises(UsageError, match="is no layer"):
            with_number(config, "a.units", 3)


def test_a_changed_file_is_opened_with_the_same_care(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="d"), layers.Lambda(lambda x: x * 2)])
    model.save(tmp_path / "code.keras")
    change = reshaping(tmp_path / "code.keras", "d.units")
    with pytest.raises(ModelFileError, match=r"code\.keras with d\.units = 3: .*trust"), change(3) as changed:
        parameters(changed)
    text = small().to_json().replace('"Dense"', '"Dence"')
    (tmp_path / "unknown.json").write_text(text)
    with pytest.raises(UnknownLayerError), reshaping(tmp_path / "unknown.json", "head.units")(3) as changed:
        parameters(changed)


def test_a_size_that_the_model_refuses(tmp_path):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(6, name="d"), layers.Reshape((2, 3))])
    model.save(tmp_path / "m.keras")
    for source in (tmp_path / "m.keras", model):
        with pytest.raises(KerasmemError, match=r"d\.units = 7"), reshaping(source, "d.units")(7) as changed:
            parameters(changed)
