"""Trials of Optuna and KerasTuner that have no room fail alone, with the reason, and all give their memory back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import kerasmem
from kerasmem.errors import DoesNotFitError, MissingExtraError, UsageError
from kerasmem.training.isolation import DIED, DONE, OUT_OF_MEMORY, IsolatedRun

pytestmark = pytest.mark.usefixtures("loaded_python")

HERE = Path(__file__).parent
optuna = pytest.importorskip("optuna")
keras_tuner = pytest.importorskip("keras_tuner")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Return what came of a search; each is run once, in a process of its own."""
    import functools
    import os
    import subprocess
    import sys

    limits = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "192", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {**os.environ, **limits, "PYTHONPATH": str(HERE.parent.parent)}

    @functools.cache
    def result(name):
        done = subprocess.run(
            [sys.executable, str(HERE / "searched.py"), name],
            capture_output=True, text=True, timeout=500, env=environment, check=False,
            cwd=tmp_path_factory.mktemp("search"),
        )  # fmt: skip
        assert "RESULT " in done.stdout, done.stderr[-3000:]
        return json.loads(done.stdout.rpartition("RESULT ")[2])[name]

    return result


SLOW = pytest.mark.slow


def test_optuna_prunes_what_cannot_fit_before_it_trains(searched):
    found = searched("optuna")
    assert [state for state, _ in found["trials"]] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert found["started"] == [64, 64], "the one that cannot fit never trained"
    refused = found["trials"][1][1]
    assert "weights and its optimizer alone take" in refused["reason"] and refused["diagnosis"] is None


@SLOW
def test_optuna_prunes_what_runs_out(searched):
    found = searched("optuna runs out")
    states = [state for state, _ in found["trials"]]
    assert states == ["COMPLETE", "PRUNED", "PRUNED", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert found["started"] == [64, 290_000, 64, 64, 64], "the one that cannot fit never trained"
    ran_out = found["trials"][2][1]
    assert ran_out["diagnosis"]["out_of_memory"] and "out of memory" in ran_out["reason"].lower()


@pytest.mark.parametrize("name", ["random", pytest.param("hyperband", marks=SLOW)])
def test_keras_tuner_fails_what_cannot_fit_and_goes_on(searched, name):
    found = searched(name)
    for units, status, message in found["trials"]:
        assert status == ("COMPLETED" if units <= 128 else "FAILED"), message
        assert units <= 128 or ("FailedTrialError: model" in message and "its optimizer alone take" in message)
    assert {status for _, status, _ in found["trials"]} == {"COMPLETED", "FAILED"}
    assert found["best"] <= 128


@SLOW
def test_keras_tuner_fails_what_runs_out_with_the_diagnosis(searched):
    statuses = {units: (status, message) for units, status, message in searched("runs out")["trials"]}
    assert statuses[64][0] == "COMPLETED"
    assert statuses[290_000][0] == "FAILED" and "out of memory" in statuses[290_000][1].lower()


@pytest.mark.parametrize(
    "name",
    ["optuna", "random", *(pytest.param(each, marks=SLOW) for each in ("optuna runs out", "runs out", "hyperband"))],
)
def test_each_trial_gives_its_memory_back_to_the_byte(searched, name):
    left = searched(name)["left"]
    assert len(left) > 1 and len(set(left)) == 1, left


def trial():
    kept = {}
    return SimpleNamespace(set_user_attr=kept.__setitem__, kept=kept)


def test_a_process_of_its_own_is_a_value_or_prunes():
    assert kerasmem.optuna_objective(lambda _: IsolatedRun(DONE, 0.5))(trial()) == 0.5
    for status in (OUT_OF_MEMORY, DIED):
        given = trial()
        with pytest.raises(optuna.TrialPruned, match="it was too large"):
            kerasmem.optuna_objective(lambda _, status=status: IsolatedRun(status, reason="it was too large"))(given)
        assert given.kept["kerasmem"] == {"reason": "it was too large", "diagnosis": None}


def test_what_has_nothing_to_do_with_memory_is_raised_and_the_policy_stays():
    def objective(_):
        raise ZeroDivisionError("mine")

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with pytest.raises(ZeroDivisionError, match="mine"):
            kerasmem.optuna_objective(objective)(trial())
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")


def test_require_fit_tells_what_is_missing():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(500_000)], name="wide")
    model.compile("adam", "mse")
    assert kerasmem.require_fit(model, batch_size=4, device="16GB").device.verdict == "fits"
    with pytest.raises(DoesNotFitError, match=r"'wide': its weights and its optimizer alone take .*20.0 MiB"):
        kerasmem.require_fit(model, batch_size=4, device="20MiB")
    with pytest.raises(DoesNotFitError, match=r"'wide' at batch 4,096 takes .* by the estimate \(.*there are 1.00 GiB"):
        kerasmem.require_fit(model, batch_size=4096, device="1GiB")


def test_a_limit_of_the_cpus_allocator_leaves_xla_out(monkeypatch):
    """XLA's plan takes addresses for all variables there, and TensorFlow ends the process where there are none left."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1000)])
    model.compile("adam", "mse", jit_compile=False)
    assert kerasmem.require_fit(model, batch_size=4, device="16GB").alternatives == (), (
        "nor asked where it does not run"
    )
    monkeypatch.setattr("kerasmem.estimation.xla.cpu_allocator_room", lambda: 150_000)
    model.compile("adam", "mse", jit_compile=True)
    report = kerasmem.require_fit(model, batch_size=4, device="16GB", jit_compile=True)
    assert report.settings.method == "graph"
    assert any("xla has no answer" in note and "has 146 KiB left of its limit" in note for note in report.notes)


def test_a_data_sets_own_batch_counts():
    import tensorflow as tf

    from kerasmem.training.searches import _rows

    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones(8)))
    assert _rows(data.batch(4, drop_remainder=True)) == 4 and _rows(data.batch(4)) is None
    assert _rows(np.ones((8, 2))) == 32 and _rows(iter([])) is None
    open_rank = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=tf.TensorSpec(None, tf.float32))
    assert _rows(open_rank) is None and _rows(data) is not None


def test_wrong_usage(monkeypatch):
    with pytest.raises(UsageError, match="tuner_class: give a class of KerasTuner's"):
        kerasmem.tuner_class(dict)
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kerasmem\[searches\]'"):
        kerasmem.optuna_objective(lambda _: 0.0)
