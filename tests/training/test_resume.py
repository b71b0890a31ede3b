"""Training that is killed and started again, against training that never was: real processes, real SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

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
    done = subprocess.run(
        [sys.executable, str(HERE / "killed.py"), str(path), str(folder), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


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
        {"fit": {"epochs": 2, "steps_per_epoch": 40}, "sequence": {"workers": 3}},
        {"fit": {"epochs": 3, "shuffle": False}, "sequence": {"workers": 3}},
        {"fit": {"epochs": 3}, "valid": True, "sequence": {"rows": [10, 190]}},
        {"fit": {"epochs": 3}, "compiled": {"steps_per_execution": 4}},
        {"fit": {"epochs": 4, "steps_per_epoch": 15}, "compiled": {"steps_per_execution": 4}},
        {"fit": {"epochs": 3}, "compiled": {"run_eagerly": True}, "sequence": {"shuffle": False}},
        {"fit": {"epochs": 3}, "dataset": True},
        {"fit": {"epochs": 6, "steps_per_epoch": 10}, "dataset": True, "sequence": {"remainder": "drop"}},
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


# ---- states, without a model


def targets(batches):
    return [batch[1].tolist() for batch in batches]


def stream(path, **settings):
    return H5ChunkSequence(path, **{"batch_size": 8, "memory_budget": "3kB", **settings})


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 25, 26, 40])
def test_a_state_goes_on_with_the_very_next_batch(numbered, tmp_path, at, workers):
    path = numbered(rows=ROWS, chunks=4)
    whole = stream(path)
    expected = targets(whole.next_epoch()) + targets(whole.next_epoch())
    first = stream(path, workers=workers)
    got, epoch = [], first.next_epoch()
    while len(got) < at:
        batch = next(epoch, None)
        if batch is None:
            epoch = first.next_epoch()
        else:
            got.append(batch[1].tolist())
    text = json.dumps(first.state_dict())
    assert len(text.encode()) < 1024
    os.rename(path, tmp_path / "moved.h5")
    second = stream(tmp_path / "moved.h5", workers=workers)
    second.load_state_dict(json.loads(text))
    while len(got) < 52:
        got += targets(second.next_epoch())
    assert got == expected
    first.close(), second.close()


def test_a_state_in_tf_data(numbered):
    path = numbered(rows=ROWS, chunks=4)
    expected = targets(stream(path).next_epoch())
    second = stream(path)
    second.load_state_dict(second.state_dict(epoch=0, batch=20))
    data = second.as_tf_dataset()
    assert targets(data.as_numpy_iterator()) == expected[20:]
    assert len(targets(data.as_numpy_iterator())) == 26


def test_a_loaded_state_in_fit_without_the_callback(numbered, recwarn):
    from streams import RowModel

    path = numbered(rows=ROWS, chunks=4)
    expected = [row for epoch in range(2) for place in range(26) for row in stream(path).batch_rows(place, epoch)]
    for shuffle in (True, False):
        sequence, model = stream(path), RowModel()
        sequence.load_state_dict(sequence.state_dict(epoch=0, batch=20))
        model.fit(sequence, epochs=2, shuffle=shuffle, verbose=0)
        assert model.trained == expected[160:]


def test_a_drawn_seed_is_taken_over(numbered):
    path = numbered(rows=ROWS, chunks=4)
    first, second = stream(path, seed=None), stream(path, seed=None)
    assert targets(first) != targets(second)
    second.load_state_dict(first.state_dict())
    assert targets(first) == targets(second)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch_size": 9}, "batch_size was 8 when it was saved and is 9 now"),
        ({"seed": 1}, "seed was 0 when it was saved and is 1 now"),
        ({"shuffle": False}, "shuffle was True"),
        ({"remainder": "drop"}, "remainder was 'keep'"),
        ({"rows": (0, 100)}, "selection was .*`rows`"),
        ({"memory_budget": "1MB"}, "windows was .*memory_budget"),
        ({"shard": (1, 2)}, r"shard was \[0, 1\] .* and is \[1, 2\]"),
        ({"y": "x"}, "datasets was"),
    ],
)
def test_what_has_to_agree(numbered, settings, text):
    path = numbered(rows=ROWS, chunks=4)
    state = json.loads(json.dumps(stream(path).state_dict()))
    with pytest.raises(UsageError, match=f"state: {text}"):
        stream(path, **settings).load_state_dict(state)
    stream(path, scale=0.5, workers=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format_version": 2}, "format_version 2 is not known"),
        ({"epoch": -1}, "epoch -1"),
        ({"batch": 26}, "batch 26 does not exist; an epoch has 26"),
        ({"batch": "1"}, "batch '1' is not a whole number"),
        ({"agrees": None}, "not what state_dict"),
    ],
)
def test_what_is_no_state(numbered, change, text):
    sequence = stream(numbered(rows=ROWS, chunks=4))
    with pytest.raises(DataError, match=text):
        sequence.load_state_dict({**sequence.state_dict(), **change})
    with pytest.raises(UsageError, match="both epoch and batch"):
        sequence.state_dict(epoch=1)


# ---- the callback's refusals


def small_model(units=2):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            raise KeyboardInterrupt


def interrupt(path, saved, **fit):
    sequence = stream(path, y="label")
    with pytest.raises(KeyboardInterrupt):
        small_model().fit(sequence, verbose=0, callbacks=[ResumeTraining(saved, sequence, save_freq=2), Stop()], **fit)
    assert saved.exists()


def test_refusals(numbered, tmp_path):
    path, saved = labelled(numbered), tmp_path / "deep" / "run.resume"
    interrupt(path, saved, epochs=2)

    def resume(model=None, settings=None, **fit):
        sequence = stream(path, y="label", **(settings or {}))
        (model or small_model()).fit(sequence, verbose=0, callbacks=[ResumeTraining(saved, sequence)], **fit)

    with pytest.raises(UsageError, match=r"batch_size was 8 .* is 16"):
        resume(settings={"batch_size": 16}, steps_per_epoch=26)
    with pytest.raises(UsageError, match=r"steps_per_epoch was 26 batches .* is 10 batches now"):
        resume(steps_per_epoch=10)
    with pytest.raises(
        UsageError, match=r"model: the model saved .* float32 \(3, 2\) where the one given has .*\(3, 4\)"
    ):
        resume(small_model(4))
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(UsageError, match="not built"):
        resume(unbuilt)
    with pytest.raises(UsageError, match="give the H5ChunkSequence"):
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
