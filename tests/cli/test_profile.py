"""`kerasmem profile`: real steps in a process of their own."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import pytest

from kerasmem.estimation.report import DeviceVerdict, MemoryReport
from kerasmem.profiling.results import PeakBytes, StepProfile
from kerasmem.rendering.estimate_tables import profile_table
from kerasmem.rendering.formatting import plain_text

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(__file__).resolve().parent.parent / "support" / "small_models.py"
CATEGORIES = PeakBytes.CATEGORIES


@pytest.fixture(autouse=True)
def names_as_in_a_new_process():
    keras.backend.clear_session()  # Keras counts layers' names on from model to model


def adds_up(data):
    need = data["bytes"]
    in_layers = sum(row["bytes_at_peak"] for row in data["layers"])
    return (
        sum(need[name] for name in CATEGORIES) == need["total"]
        and in_layers + sum(each["bytes"] for each in data["shares"]) == need["total"]
    )


def test_a_profile_on_a_cpu_is_not_passed_off_as_a_cards(cli, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    result = cli("profile", f"{MODELS}:perceptron", "--batch-size", 16, "--steps", 2, "--device", "t4")
    assert result.code == 0, result.err
    first = result.out.splitlines()[0]
    assert "fits Tesla T4" in first and "(measured on this CPU, not on the card)" in first


@pytest.mark.usefixtures("x86_kernels")
def test_a_step_in_graph_mode(cli, tmp_path):
    path = tmp_path / "profile.json"
    result = cli("profile", f"{MODELS}:convnet", "--batch-size", 16, "--steps", 3, "--device", "2GB", "--json")
    assert result.code == 0, result.err
    path.write_text(result.out)
    data = json.loads(result.out)
    assert data["measured"] is True
    assert (data["settings"]["method"], data["settings"]["execution"]) == ("profile", "graph")
    need = data["bytes"]
    assert adds_up(data)
    assert data["named_share"] > 0.999
    assert need["low"] <= need["total"] <= need["high"]
    parameters = data["model"]["parameters"]
    weights = {row["name"]: row["parts"].get("weights", 0) for row in data["layers"]}
    assert sum(weights.values()) == parameters * 4
    assert need["weights"] - parameters * 4 == 8  # the loss's own two numbers
    assert need["optimizer"] > 2 * 4 * data["model"]["trainable_parameters"]
    assert need["inputs"] == 16 * 24 * 24 * 3 * 4 + 16 * 4
    assert weights["eyes"] == (27 * 16 + 16) * 4
    assert data["requested"] <= need["total"]
    assert data["timeline"][0]["bytes"] == data["before"]
    assert max(point["bytes"] for point in data["timeline"]) == need["total"]
    assert data["instant"]["layer"] in weights
    assert data["live"][0]["layer"] in weights
    assert data["device"]["verdict"] == "fits"
    assert StepProfile.from_dict(data).bytes.total == need["total"]
    shown = plain_text(profile_table(StepProfile.from_dict(data), device=DeviceVerdict(**data["device"])))
    for text in ("fits 2GB: took", "method profile", "Measured", "eyes (Conv2D)", "In no layer"):
        assert text in shown, text
    # It is read where an estimate is.
    assert MemoryReport.from_dict(data).bytes.total == need["total"]
    compared = cli("compare", path, path, "--json")
    assert compared.code == 0, compared.err


def test_a_step_that_xla_compiles(cli):
    """XLA's steps repeat to the byte; the profiler adds some small objects of TensorFlow's own."""
    options = (f"{MODELS}:perceptron", "--jit-compile", "--steps", 1, "--json")
    result, measured = cli("profile", *options), cli("measure", *options)
    assert (result.code, measured.code) == (0, 0), result.err + measured.err
    data = json.loads(result.out)
    assert data["settings"]["execution"] == "xla"
    assert adds_up(data)
    assert data["named_share"] > 0.99
    total = json.loads(measured.out)["bytes"]["total"]
    assert data["bytes"]["low"] == data["bytes"]["high"] == data["bytes"]["total"]
    assert abs(data["bytes"]["total"] - total) <= 4096
    first = next(row["parts"] for row in data["layers"] if row["class"] == "Dense")
    assert first["activations"] >= 32 * 256 * 4  # inside XLA's one buffer
    assert any("buffer assignment" in note for note in data["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("m.h5", "--steps", 0), 2, "--steps"),
        ((f"{MODELS}:perceptron", "--optimizer", "momentum"), 2, "momentum"),
        ((f"{MODELS}:perceptron", "--timeout", 0.3), 1, "--timeout"),
    ],
)
def test_what_goes_wrong_is_one_clear_message(cli, arguments, code, words):
    result = cli("profile", *arguments)
    assert result.code == code, result.err
    assert words in result.err
    assert "Traceback" not in result.err
