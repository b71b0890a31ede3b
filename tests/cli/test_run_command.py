"""`kerasmem run`: real scripts in real processes, out of memory under XLA, killed, and otherwise at an end."""

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
import tensorflow as tf
from programs import ROOT, run_python

import kerasmem
from kerasmem.monitoring.recorder import Recorder
from kerasmem.processes.children import GOES_ON
from kerasmem.training import supervising
from kerasmem.training.run_state import RunState
from kerasmem.training.supervising import replace_fit
from kerasmem.training.trainer import FitOptions

pytestmark = pytest.mark.usefixtures("loaded_python")

SCRIPT = Path(__file__).parent / "trained.py"
LIMITED = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "18"}


def run(folder, what, *options, **env):
    folder.mkdir()
    command = ("-m", "kerasmem", "run", "--save-freq", "3", *options, SCRIPT, folder, what)
    done = run_python(*command, env={"CUDA_VISIBLE_DEVICES": "-1", **env}, timeout=600)
    said = (folder / "said").read_text().splitlines() if (folder / "said").exists() else []
    told = [line for line in done.err.splitlines() if line.startswith("kerasmem run: ")]
    return done.code, said, told, done.err


def test_a_killed_script_ends_as_one_that_was_not(tmp_path):
    code, whole, told, _ = run(tmp_path / "whole", "exit", "--checkpoint", str(tmp_path / "kept"))
    assert code == 7 and not told
    assert sorted(os.listdir(tmp_path / "kept")) == [f"fit-{number}" for number in range(1, 6)]
    code, killed, told, _ = run(tmp_path / "killed", "kill", "--checkpoint", str(tmp_path / "runs"))
    assert code == 0 and not (tmp_path / "runs").exists()
    assert killed == ["begun", whole[1], "begun", *whole[1:]], "the first two fits are over, the third resumes"
    assert len(told) == 1 and "in fit-3" in told[0] and "SIGKILL" in told[0]
    code, again, _, _ = run(tmp_path / "again", "exit", "--checkpoint", str(tmp_path / "kept"))
    assert code == 7 and again == whole, "all five fits are over"


@pytest.mark.slow
def test_a_script_that_runs_out_under_xla(tmp_path):
    code, said, _, _ = run(tmp_path / "whole", "xla")
    assert code == 0 and len(said) == 3
    code, said, _, errors = run(tmp_path / "limited", "xla", **LIMITED)
    assert code == 0, errors[-2000:]
    assert "ran out of memory" in errors and "micro-batches of" in errors
    with np.load(tmp_path / "whole" / "weights.npz") as one, np.load(tmp_path / "limited" / "weights.npz") as other:
        for name in one:
            scale = max(np.abs(one[name]).max(), 1e-2)
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-5 * scale)


def test_a_loop_of_ones_own_is_told(tmp_path):
    code, said, told, _ = run(tmp_path / "loop", "loop", "--checkpoint", str(tmp_path / "runs"))
    assert code == 128 + 9
    assert said == ["begun"], "it is not started again for nothing"
    assert "train_on_batch" in told[0]


def test_wrong_usage(cli, tmp_path):
    missing = cli("run", tmp_path / "none.py")
    assert missing.code == 2 and "script not found" in missing.err
    assert cli("run").code == 2


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """Return a function that runs a script which is killed, with what each start writes; and the pieces of each."""
    (tmp_path / "train.py").touch()
    pieces, told = [], []

    def run(*starts, **options):
        ends = iter(starts)

        def start(module, given, *command, **_):
            pieces.append(json.loads(given)["micro_batches"])
            written = next(ends)
            if written is not None:
                (tmp_path / "runs" / "fit-1").write_text(written)
            return len(pieces)

        monkeypatch.setattr(supervising, "start_module", start)
        monkeypatch.setattr(supervising, "_wait", lambda number: -9 if number < len(starts) else 0)
        monkeypatch.setattr(supervising, "_checkpoints", lambda folder: {
            path.name: hash(path.read_text()) for path in Path(folder).iterdir()
        })  # fmt: skip
        script = str(tmp_path / "train.py")
        code = supervising.supervise(script, [], say=told.append, folder=str(tmp_path / "runs"), **options)
        return code, pieces, told

    return run


def test_batches_are_halved_if_the_script_dies_twice_without_a_checkpoint(supervised):
    code, pieces, told = supervised("1", None, None, "2", None, None)
    assert code == 0 and pieces == [None, None, 2, 4, None, 2]
    assert "divided by 4" in told[2] and "divided" not in told[3]


def test_a_script_is_started_again_so_often_at_most(supervised):
    code, pieces, told = supervised(*"12345", restarts=2)
    assert code == 137 and len(pieces) == 3 and "--restarts" in told[-1]


def test_a_script_that_dies_again_and_again_at_one_place_is_given_up(supervised):
    code, pieces, told = supervised("1", *[None] * 20)
    assert code == 137 and pieces[-1] == 2**10 and "12 times since the last checkpoint" in told[-1]


@pytest.mark.parametrize(("saved", "rows"), [(None, 16), (20, 16), (5, 5)])
def test_pieces_are_no_larger_than_those_of_the_checkpoint(saved, rows):
    assert FitOptions(micro_batches=4).piece_rows(RunState(micro_batch_rows=saved), 64) == rows


class Forwarding(keras.Sequential):
    def fit(self, *arguments, **named):
        return super().fit(*arguments, **named)


@pytest.fixture
def replaced(monkeypatch, tmp_path):
    """Keras with `fit` replaced; the folder of its checkpoints."""
    monkeypatch.setattr(keras.Model, "fit", keras.Model.fit)
    replace_fit(keras, folder=str(tmp_path), micro_batches=None, save_freq=2)
    return tmp_path


def small(cls=keras.Sequential, **options):
    model = cls([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False, **options)
    return model


ROWS = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


@pytest.mark.parametrize("cls", [keras.Sequential, Forwarding])
def test_each_fit_of_a_script_has_a_checkpoint(replaced, cls):
    for _ in range(2):
        assert small(cls).fit(*ROWS, verbose=0).recoveries == []
    assert sorted(os.listdir(replaced)) == ["fit-1", "fit-2"]


def test_a_scripts_own_kerasmem_fit_is_left_alone(replaced):
    kerasmem.fit(small(), *ROWS, verbose=0)
    assert os.listdir(replaced) == []


class Unsendable(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)


def test_a_model_that_cannot_be_made_in_another_process_trains_in_this_one(replaced):
    model = Unsendable(1)
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.warns(RuntimeWarning, match="steps run in this process.*get_config"):
        history = model.fit(*ROWS, epochs=2, verbose=0, validation_data=ROWS)
    assert len(history.history["val_loss"]) == 2 and os.listdir(replaced) == ["fit-1"]


def test_what_kerasmem_fit_refuses_runs_as_keras_has_it(replaced):
    cell = keras.layers.SimpleRNN(2, stateful=True)
    model = keras.Sequential([keras.Input((2, 4), batch_size=8), cell, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.warns(RuntimeWarning, match="fit 1 of the script runs without recovery.*stateful"):
        model.fit(np.ones((8, 2, 4)), ROWS[1], batch_size=8, verbose=0)
    with pytest.warns(RuntimeWarning, match="fit 2 of the script cannot be resumed"):
        small().fit(tf.sparse.from_dense(ROWS[0]), ROWS[1], verbose=0)
    assert os.listdir(replaced) == []


SHOW = """
import sys
print(__file__, sys.argv, sys.path[0], __name__, __package__, __spec__ and __spec__.name, flush=True)
{more}
def fail():
    raise ValueError("of the script")
try:
    fail()
except ValueError as error:
    raise RuntimeError("and another") from error
"""


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.usefixtures("new_python")
def test_a_script_sees_what_python_shows_it_and_its_errors_are_its_own(program, tmp_path, as_module):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "data.py").write_text("VALUE = 3\n")
    more = "from .data import VALUE; print(VALUE, flush=True)" if as_module else "import package.data"
    file = tmp_path / ("package/train.py" if as_module else "train.py")
    file.write_text(SHOW.format(more=more))
    script = ["package.train" if as_module else "train.py", "--epochs", "2", "-m"]
    there = {"env": {"PYTHONPATH": str(ROOT)}, "cwd": tmp_path}
    plain = program(*["-m"][: int(as_module)], *script, **there)
    ours = program("-m", "kerasmem", "run", *["--module"][: int(as_module)], *script, **there)
    assert (ours.code, ours.out) == (plain.code, plain.out) == (1, plain.out)
    shown = [line for line in plain.err.splitlines() if "<frozen runpy>" not in line]
    assert ours.err.splitlines() == shown
    assert "of the script" in ours.err and "kerasmem" not in ours.err


WAIT = """
import sys, time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("cleaned up", flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize(("number", "code", "said"), [(signal.SIGINT, 7, "cleaned up\n"), (signal.SIGTERM, 143, "")])
@pytest.mark.usefixtures("new_python")
def test_a_signal_to_the_command_alone_reaches_the_script(tmp_path, number, code, said):
    (tmp_path / "wait.py").write_text(WAIT)
    command = [sys.executable, "-m", "kerasmem", "run", "wait.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.read() == said
        assert process.wait() == code


def test_a_log_is_added_to_by_a_script_that_is_run_again(tmp_path, monkeypatch):
    def write():
        recorder = Recorder(tmp_path / "log.jsonl", nvml=False, sampling=0)
        recorder.begin_run()
        recorder.end_run()
        return {json.loads(line)["run"] for line in (tmp_path / "log.jsonl").read_text().splitlines()}

    assert write() == write() == {0}, "a new process begins the file again"
    monkeypatch.setenv(GOES_ON, "1")
    assert write() == {0, 1}
