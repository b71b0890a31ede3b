"""The `compile` of a file runs no code and imports no module."""

from __future__ import annotations

import contextlib
import json

import keras
import pytest

import kerasmem
from kerasmem.errors import KerasmemError, ModelFileError
from kerasmem.models.opening import open_model

pytestmark = pytest.mark.usefixtures("loaded_python")

SYSTEM = {"module": "os", "class_name": "system", "config": "touch ran", "registered_name": "system"}
HOSTILE = [
    {"loss": SYSTEM},
    {"loss": {"class_name": "function", "module": "os", "config": "system", "registered_name": "system"}},
    {"metrics": [{"class_name": "MeanMetricWrapper", "config": {"fn": SYSTEM}}]},
    {"metrics": [[{"class_name": "__lambda__", "config": {"code": "4wAA"}}]]},
    {"optimizer": {"class_name": "Adam", "config": {"learning_rate": SYSTEM}}},
    {"optimizer": {"class_name": "Muon", "config": {"exclude_layers": ["(a+)+$"]}}},
    {"optimizer": {"class_name": "Adam", "config": {"inner_optimizer": 3}}},
    {"optimizer": {"class_name": "Dense", "config": {"units": 10**9}}},
    {"loss": {"class_name": "Dense", "config": {"units": 10**9}}},
]


@pytest.mark.parametrize("compiled", HOSTILE)
@pytest.mark.parametrize("unsafe", [False, True])
def test_a_hostile_compile_is_refused(compiled, unsafe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = json.loads(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).to_json())
    config["compile_config"] = {"optimizer": "adam", "loss": "mse", **compiled}
    (tmp_path / "m.json").write_text(json.dumps(config))
    if unsafe:
        keras.config.enable_unsafe_deserialization()
    try:
        with pytest.raises(ModelFileError), open_model("m.json"):
            pass
    finally:
        keras.src.saving.serialization_lib.global_state.set_global_attribute("safe_mode_saving", None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "compiled",
    [{"loss": {"a": {"b": ["mse", {"class_name": 3}]}}}, {"loss_weights": {"x": "y"}}, {"steps_per_execution": "many"}],
)
def test_an_odd_compile_is_an_error_or_an_answer(compiled, tmp_path):
    config = json.loads(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).to_json())
    config["compile_config"] = {"optimizer": "adam", "loss": "mse", **compiled}
    (tmp_path / "m.json").write_text(json.dumps(config))
    with contextlib.suppress(KerasmemError):
        assert kerasmem.estimate(tmp_path / "m.json", method="graph").peak > 0
