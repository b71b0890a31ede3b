"""`kerasmem.fit` where memory really runs out and processes are really killed, against runs that nothing befell."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from loaded_python import NEW_PYTHON
from programs import json_of

pytestmark = pytest.mark.usefixtures("loaded_python")

HERE = Path(__file__).parent
KILLED = signal.SIGKILL
LIMIT = 16  # MB; a whole batch of the wide model takes more, in graph mode and under XLA
SMALL = {"model": "small", "rows": 1000, "size": 64}  # 16 batches an epoch, the last of 40 rows


def saving(name, **more):
    return {"checkpoint": f"{name}.ckpt", "save_freq": 4, **more}


def run_all(folder, runs):
    env = {"TF_ENABLE_ONEDNN_OPTS": "0", "NEW_PYTHON": NEW_PYTHON}
    found = json_of(HERE / "fitted.py", folder, json.dumps(runs), env=env, timeout=900)
    return found["ended"], found["runs"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All runs, of one start of TensorFlow."""
    folder = tmp_path_factory.mktemp("fitted")
    runs = [
        {"name": "graph", "plain": True, "optimizer": "sgd", "fit": {"shuffle": False}},
        {"name": "graph, limited", "limit": LIMIT, "optimizer": "sgd", "fit": {"shuffle": False}},
        {"name": "xla", "xla": True, "plain": True, "optimizer": "sgd", "fit": {"shuffle": False}},
        {"name": "xla, limited", "xla": True, "limit": LIMIT, "optimizer": "sgd", "fit": {"shuffle": False}},
        {"name": "arrays", **SMALL, "fit": saving("a")},
        {"name": "arrays, killed", **SMALL, "fit": saving("b"), "kill": 7},
        {"name": "arrays, killed", **SMALL, "seed": 8, "fit": saving("b")},
        {"name": "worker, killed", **SMALL, "fit": saving("c", isolated=True), "kill": 21},
    ]
    ended, found = run_all(folder, runs)
    return folder, [end for end, each in zip(ended, runs, strict=True)], found


def difference(folder, one, other):
    """Return the largest difference of weights and slots, relative to the largest value, and that of their norm."""
    with np.load(folder / f"{one}.npz") as first, np.load(folder / f"{other}.npz") as second:
        pairs = [(first[name], second[name]) for name in first]
    scale = max(np.abs(a).max() for a, _ in pairs if a.dtype.kind == "f" and a.ndim > 1)
    assert all((a == b).all() for a, b in pairs if a.dtype.kind != "f")
    floats = [(a.astype("f8"), b.astype("f8")) for a, b in pairs if a.dtype.kind == "f"]
    norm = np.sqrt(sum(((a - b) ** 2).sum() for a, b in floats) / sum((a**2).sum() for a, _ in floats))
    return max(np.abs(a - b).max() for a, b in floats) / scale, norm


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_a_run_that_ran_out_ends_as_one_that_did_not(outcomes, mode):
    folder, _, found = outcomes
    whole, limited = found[mode], found[f"{mode}, limited"]
    assert limited["recoveries"] and not whole["recoveries"]
    first = limited["recoveries"][0]
    assert first["rows"] == 2048 and first["micro_batch_rows"] <= 1024
    assert "ran out of memory" in first["summary"]
    ran_out = [each for each in limited["warnings"] if "ran out of memory" in each]
    assert "one row is tried first" in ran_out[0] and len(ran_out) <= 4
    assert first["micro_batch_rows"] >= 128, "no smaller than needed"
    largest, norm = difference(folder, mode, f"{mode}, limited")
    assert norm < 1e-5 and largest < 1e-5
    for key, values in whole["history"].items():
        np.testing.assert_allclose(values, limited["history"][key], rtol=1e-5)


def test_a_killed_run_goes_on_with_the_very_next_batch(outcomes):
    folder, ended, found = outcomes
    assert ended[4:7] == [0, KILLED, 0]
    whole, killed = found["arrays"], found["arrays, killed"]
    assert killed["digest"] == whole["digest"], "weights, statistics, random states and optimizer, bit for bit"
    assert killed["history"] == whole["history"] and killed["epochs"] == [0, 1]
    assert killed["left"] == []
    steps = (folder / "arrays, killed.steps").read_text().splitlines()
    assert set((folder / "arrays.steps").read_text().splitlines()) <= set(steps)


def test_a_process_that_takes_the_steps_may_be_killed(outcomes):
    _, ended, found = outcomes
    assert ended[7] == 0
    whole, killed = found["arrays"], found["worker, killed"]
    assert killed["digest"] == whole["digest"]
    assert killed["history"] == whole["history"]
    assert [each["step"] > 20 for each in killed["recoveries"]] == [True]
    assert killed["recoveries"][0]["micro_batch_rows"] is None, "it was not known to be memory"


@pytest.mark.slow
@pytest.mark.parametrize("data", ["arrays", "h5"])
def test_killed_at_random_points(tmp_path, data):
    places = np.random.default_rng(5).integers(1, 30, 5 if data != "arrays" else 20)
    whole = {"name": "whole", **SMALL, "data": data, "fit": saving("w")}
    runs = [whole]
    for place in places:
        runs.append({"name": "killed", **SMALL, "data": data, "fit": saving("k", save_freq=2), "kill": int(place)})
    runs.append({"name": "killed", **SMALL, "data": data, "fit": saving("k", save_freq=2)})
    ended, found = run_all(tmp_path, runs)
    assert ended[0] == ended[-1] == 0
    assert found["killed"]["digest"] == found["whole"]["digest"]
    assert found["killed"]["history"] == found["whole"]["history"]


SCRIPT = """
import keras, numpy as np, kerasmem

print("started", flush=True)


class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x


def own_loss(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)


def trained(**options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Twice(), keras.layers.Dense(1)])
    model.compile("sgd", own_loss)
    x = np.random.default_rng(0).random((64, 4), "float32")
    history = kerasmem.fit(model, x, x.sum(1, keepdims=True), batch_size=16, shuffle=False, verbose=0, **options)
    return history.history["loss"]


print(trained() == trained(isolated=True))
"""


def test_an_isolated_fit_takes_classes_of_a_script_without_a_guard(program, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = program("script.py", cwd=tmp_path)
    assert done.code == 0, done.err[-3000:]
    assert done.out.split() == ["started", "True"], "the script itself runs once"
