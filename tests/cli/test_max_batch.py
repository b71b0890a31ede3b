"""`kerasmem max-batch`."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import pytest

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(__file__).resolve().parent.parent / "support" / "small_models.py"


@pytest.fixture
def model_file(request, tmp_path):
    keras.backend.clear_session()  # names are counted from the beginning
    request.getfixturevalue("mnist_cnn").save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


def test_by_simulated_steps(cli):
    result = cli("max-batch", f"{MODELS}:perceptron", "--device", "2MB", "--method", "graph", "--maximum", 64, "--json")
    data = json.loads(result.out)
    assert data["report"]["settings"]["method"] == "graph"
    assert {each["size"] for each in data["evaluations"]} >= {1, 32}
    assert all(each["low"] <= each["total"] <= each["high"] for each in data["evaluations"])


def test_exit_codes(cli, model_file):
    assert cli("max-batch", model_file, "--device", "1MiB", "--method", "formula").code == 3
    close = cli("max-batch", model_file, "--device", "8MB", "--method", "formula")
    assert close.code == 4
    assert "too close to call" in close.out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["m.h5"], "--device t4"), (["m.h5", "--device", "t4", "--maximum", "0"], "not in the range")],
)  # fmt: skip
def test_wrong_usage(cli, arguments, message):
    result = cli("max-batch", *arguments)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""


def test_verified_by_real_steps(cli, model_file):
    arguments = ("max-batch", model_file, "--method", "formula", "--maximum", 4, "--confirm")
    result = cli(*arguments, "--device", "64MB", "--margin", "0.1")
    assert result.code == 0
    assert result.out.splitlines()[0].startswith("64MB (54.9 MiB for TensorFlow): batch size 4 ran, ")
    lines = [line.split() for line in result.out.splitlines()]
    assert any(line[:1] == ["4"] and line[-1] == "ran" for line in lines)
