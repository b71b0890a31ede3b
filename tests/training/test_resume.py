"""Training that is killed and started again, against training that never was: real processes, real SIGKILL."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import keras
import numpy as np
import pytest
from programs import json_of
from stopped import Stop

from kerasmem import H5ChunkSequence, ResumeTraining
from kerasmem.errors import DataError, UsageError

pytestmark = pytest.mark.usefixtures("loaded_python")

HERE = Path(__file__).parent
ROWS = 203


def labelled(numbered, rows=ROWS):
    import h5py

    path = numbered(rows=rows, chunks=4)
    with h5py.File(path, "a") as file:
        file["label"] = (np.arange(rows) * 7 // 5) % 2
    return path


def run(path, folder, **settings):
    settings.setdefault("sequence", {})
    settings["sequence"] = {"batch_size": 8, "memory_budget": "3kB", **settings["sequence"]}
    return json_of(HERE / "killed.py", path, folder, json.dumps(settings))


def check(result, kills, save_freq=3, counted=True):
    assert result["ended"] == [0, *[signal.SIGKILL] * kills, 0]
    whole, killed = result["whole"], result["killed"]
    assert killed["digest"] == whole["digest"], "weights, statistics, random states and optimizer, bit for bit"
    assert killed["steps"] == whole["steps"], "every step once, with the very same loss"
    assert killed["logs"] == whole["logs"], "the last epoch's logs too, the metrics of all its batches"
    if counted:
        assert killed["epoch"] == whole["epoch"]
    assert killed["repeated"] <= kills * save_freq
    assert killed["left"] == whole["left"] == [], "the file is gone when fit has ended"


def test_killed_at_any_step(numbered, tmp_path):
    kills = [[1, "step"], [9, "step"], [14, "saving"], [20, "saved"], [26, "step"], [27, "step"], [51, "epoch"]]
    check(run(labelled(numbered), tmp_path, fit={"epochs": 3}, kills=kills), len(kills))  # 26 batches an epoch


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"fit": {"epochs": 6, "steps_per_epoch": 10}},
        {"fit": {"epochs": 3, "shuffle": False}, "sequence": {"workers": 3}},
        {"fit": {"epochs": 3}, "valid": True, "sequence": {"rows": [10, 190]}},
        {"fit": {"epochs": 3}, "compiled": {"steps_per_execution": 4}},
        {"fit": {"epochs": 4, "steps_per_epoch": 15}, "compiled": {"steps_per_execution": 4}},
        {"fit": {"epochs": 3}, "compiled": {"run_eagerly": True}, "sequence": {"shuffle": False}},
        {"fit": {"epochs": 3}, "dataset": True},
        {"fit": {"epochs": 3}, "sequence": {"seed": None}, "seedless": True},
        {"fit": {"epochs": 5}, "sequence": {"shard": [1, 2]}},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()).replace(" ", ""),
)
def test_killed_in_every_kind_of_fit(numbered, tmp_path, settings):
    seedless = settings.pop("seedless", False)
    moments = ["step", "saving", "saved", "step", "validation" if settings.get("valid") else "epoch"]
    kills = [[7 + 9 * number, moment] for number, moment in enumerate(moments)]
    result = run(labelled(numbered), tmp_path, kills=kills, **settings)
    if seedless:
        assert result["ended"] == [0, *[signal.SIGKILL] * len(kills), 0]
        assert result["killed"]["digest"] != result["whole"]["digest"], "another seed is drawn for another training"
        assert [step[0] for step in result["killed"]["steps"]] == list(range(1, 79)), "and each goes on with its own"
        return
    ahead = "dataset" in settings  # the last epoch begun may have been begun by TensorFlow's reading ahead
    check(result, len(kills), save_freq=3 if "compiled" not in settings else 4, counted=not ahead)


def stream(path, **settings):
    return H5ChunkSequence(path, **{"batch_size": 8, "memory_budget": "3kB", **settings})


def small_model(units=2):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def test_refusals(numbered, tmp_path):
    path, saved = labelled(numbered), tmp_path / "deep" / "run.resume"

    def resume(model=None, settings=None, callbacks=(), **fit):
        sequence = stream(path, y="label", **(settings or {}))
        resuming = ResumeTraining(saved, sequence, save_freq=2)
        (model or small_model()).fit(sequence, verbose=0, callbacks=[resuming, *callbacks], **fit)

    with pytest.raises(KeyboardInterrupt):
        resume(callbacks=[Stop(6)], epochs=2)
    assert saved.exists()
    with pytest.raises(UsageError, match=r"batch_size was 8 .* is 16"):
        resume(settings={"batch_size": 16}, steps_per_epoch=26)
    with pytest.raises(UsageError, match=r"steps_per_epoch was 26 batches .* is 10 batches now"):
        resume(steps_per_epoch=10)
    with pytest.raises(UsageError, match=r"model: the model saved .* float32 \(3, 2\), now .*\(3, 4\)"):
        resume(small_model(4))
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(UsageError, match="must be built"):
        resume(unbuilt)
    with pytest.raises(UsageError, match="sequence must be the H5ChunkSequence"):
        ResumeTraining(saved, [1, 2])
    whole = saved.read_bytes()
    for damaged in (b"", whole[:300], whole[:-9], whole[:200] + b"xxxx" + whole[204:]):
        saved.write_bytes(damaged)
        with pytest.raises(DataError, match="delete it to start over"):
            resume()
    saved.write_bytes(whole)
    resume(epochs=2)
    assert not saved.exists()


def test_a_kept_file_ends_a_second_run_at_once(numbered, tmp_path):
    path, saved = labelled(numbered), tmp_path / "run.resume"
    sequence, model = stream(path, y="label"), small_model()
    saver = ResumeTraining(saved, sequence, keep=True)
    model.fit(sequence, epochs=2, callbacks=[saver], verbose=0)
    assert saved.exists()
    steps = int(model.optimizer.iterations)
    model.fit(sequence, epochs=2, callbacks=[saver], verbose=0)
    assert int(model.optimizer.iterations) == steps == 52
    model.fit(sequence, epochs=3, callbacks=[saver], verbose=0)
    assert int(model.optimizer.iterations) == 78
    model.fit(sequence, epochs=1, verbose=0)
    assert int(model.optimizer.iterations) == 104, "a fit without the callback begins at Keras's epoch 0 again"
