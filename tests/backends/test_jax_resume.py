"""Resume stopped training on JAX: `scripts/test --with jax`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("KERAS_BACKEND") != "jax":
    pytest.skip("of Keras on JAX: run by `scripts/test --with jax`", allow_module_level=True)

import h5py
import keras
import numpy as np
from jax_resumed import KillAt
from keras import layers

import kerasmem
from kerasmem.errors import UsageError


@pytest.fixture
def file(tmp_path):
    path, draw = tmp_path / "data.h5", np.random.default_rng(0)
    with h5py.File(path, "w") as out:
        out["x"], out["y"] = draw.random((70, 6), "float32"), draw.integers(0, 2, 70)
    return path


def compiled_model(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.4),
         layers.Dense(2, "softmax")]
    )  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Killed(Exception):
    """Stands for the end of the process."""


def end():
    raise Killed


def trained(model, file, checkpoint, kill=0):
    data = kerasmem.H5ChunkSequence(file, batch_size=8, seed=4, memory_budget="2kB")
    resume = kerasmem.ResumeTraining(checkpoint, data, save_freq=2)
    model.fit(data, epochs=3, verbose=0, callbacks=[KillAt(kill, end), resume])
    return resume.run.history


def test_stopped_training_resumes_to_the_same_weights(file, tmp_path):
    whole = compiled_model(0)
    expected = trained(whole, file, tmp_path / "whole.resume")
    killed = tmp_path / "killed.resume"
    for seed, step in ((0, 5), (1, 3)):  # in the first epoch, and in a resumed one
        with pytest.raises(Killed):
            trained(compiled_model(seed), file, killed, step)
        assert killed.exists()
    model = compiled_model(2)
    history = trained(model, file, killed)
    for one, other in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(whole.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.value, other.value)
    assert history == expected
    assert not killed.exists(), "training is over"


def run_two(file, saved, kill):
    """Train in two processes and return their exit codes and last lines."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = Path(__file__).with_name("jax_resumed.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(file), str(saved), str(index), address, str(kill)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        lines = [process.communicate(timeout=300)[0].splitlines()[-1:] for process in reversed(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], lines


@pytest.mark.slow
def test_two_processes_resume_together(file, tmp_path):
    codes, expected = run_two(file, tmp_path / "whole.resume", 0)
    assert codes == [0, 0] and expected[0] == expected[1]
    codes, _ = run_two(file, tmp_path / "killed.resume", 13)
    assert codes[1] == -signal.SIGKILL and codes[0] != 0  # JAX ends the others
    assert (tmp_path / "killed.rank0.resume").exists()
    assert run_two(file, tmp_path / "killed.resume", 0) == ([0, 0], expected)
    assert not list(tmp_path.glob("killed*"))


def test_fit_with_jax_names_resume_training():
    with pytest.raises(UsageError, match="ResumeTraining"):
        kerasmem.fit(compiled_model(0), np.ones((8, 6), "float32"), np.zeros(8, "int32"))
