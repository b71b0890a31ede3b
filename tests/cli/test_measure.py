"""`kerasmem measure`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kerasmem.cli import main
from kerasmem.errors import KerasmemError

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(__file__).resolve().parent.parent / "support" / "small_models.py"


def test_real_steps_as_json(cli):
    result = cli("measure", f"{MODELS}:perceptron", "--batch-size", 32, "--steps", 3, "--device", "2GB", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert (data["settings"]["method"], data["settings"]["execution"]) == ("measure", "graph")
    assert (data["settings"]["batch_size"], data["settings"]["optimizer"]) == (32, "sgd")
    parameters = 64 * 256 + 256 + 256 * 10 + 10
    assert data["bytes"]["weights"] == parameters * 4
    need = data["bytes"]
    assert parameters * 4 * 2 < need["low"] <= need["total"] <= need["high"] < 20 * parameters * 4
    assert need["activations"] is None
    assert data["device"]["verdict"] == "fits"
    assert "3 steps" in data["notes"][0]


def test_what_goes_wrong_is_one_clear_message(cli):
    result = cli("measure", f"{MODELS}:perceptron", "--timeout", 0.1)
    assert result.code == 1
    assert "took longer than 0.1 s" in result.err
    assert "--timeout" in result.err


def test_the_process_that_runs_steps_sees_the_cards_that_the_command_hides(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("kerasmem.processes.forking._servers", {})
    seen = {}

    def start_module(*command, environ, **options):
        seen.update(environ, hidden_here=os.environ["CUDA_VISIBLE_DEVICES"])
        raise KerasmemError("no process is started")

    monkeypatch.setattr("kerasmem.processes.forking.start_module", start_module)
    with pytest.raises(SystemExit):
        main(["measure", f"{MODELS}:perceptron"])
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["hidden_here"]) == ("1", "-1")
    assert "JAX_PLATFORMS" not in seen
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
