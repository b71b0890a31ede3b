"""`kerasmem measure`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kerasmem.cli import main
from kerasmem.errors import KerasmemError
from kerasmem.estimation.probe.running import MeasuredSteps, Run

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


def test_a_table_of_what_the_process_found(cli, monkeypatch):
    asked = {}

    def run_steps(request, runs, **options):
        asked.update(options, request=request, runs=runs)
        run = Run(32, 9000, 100_000, 450_000, (200_000, 420_000, 210_000, 190_000), 0.25)
        return MeasuredSteps("GPU:0", "xla", 76_840, 76_844, ("a note",), (run,))

    monkeypatch.setattr("kerasmem.estimation.measuring.run_steps", run_steps)
    arguments = (
        "measure",
        f"{MODELS}:perceptron",
        "--optimizer",
        "momentum",
        "--steps",
        4,
        "--timeout",
        5,
        "--jit-compile",
        "-v",
    )
    assert cli(*arguments).code == 2  # no such optimizer
    result = cli(*(each if each != "momentum" else "adam" for each in arguments))
    assert result.code == 0, result.err
    request = asked["request"]
    assert (request.optimizer, request.jit_compile, request.batch_size) == ("adam", True, 32)
    assert (asked["runs"], asked["timeout"]) == ([(32, 4)], 5)
    assert "adam · method: measure" in result.out
    assert "measured on GPU:0 through TensorFlow's allocator: 4 steps of 0.25 s" in result.out
    assert "205,000" in result.out  # the median
    assert "186 KiB to 410 KiB (the least and the most that a step took)" in result.out
    assert "Note: a note." in result.out
    assert "Not in the total" not in result.out


def test_what_goes_wrong_is_one_clear_message(cli):
    result = cli("measure", f"{MODELS}:perceptron", "--timeout", 0.3)
    assert result.code == 1
    assert "took longer than 0.3 s" in result.err
    assert "--timeout" in result.err
    assert (cli("measure").code, cli("measure", "m.h5", "--json", "--csv").code) == (2, 2)
    assert "kerasmem measure -h" in cli("measure").err
    assert cli("measure", "no_such_file.keras").code == 2
    assert cli("measure", "m.h5", "--steps", 0).code == 2
    assert cli("measure", "m.h5", "--device", "no-such-card").code == 2


def test_the_process_that_runs_steps_sees_the_cards_that_the_command_hides(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    seen = {}

    def start_module(module, *, environ, **options):
        seen.update(environ, hidden_here=os.environ["CUDA_VISIBLE_DEVICES"])
        raise KerasmemError("no process is started")

    monkeypatch.setattr("kerasmem.processes.task.start_module", start_module)
    with pytest.raises(SystemExit):
        main(["measure", f"{MODELS}:perceptron"])
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["hidden_here"]) == ("1", "-1")
    assert "JAX_PLATFORMS" not in seen
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
