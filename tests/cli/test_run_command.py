"""`kerasmem run`: real scripts in real processes, out of memory under XLA, killed, and otherwise at an end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kerasmem.monitoring.output import Output
from kerasmem.processes.children import GOES_ON
from kerasmem.training.run_folder import RAN_OUT, RunFolder, ScriptPosition
from kerasmem.training.supervising import Supervisor

pytestmark = pytest.mark.usefixtures("loaded_python")

SCRIPT = Path(__file__).parent / "trained.py"
ROOT = SCRIPT.parent.parent.parent
LIMITED = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "18"}


def run(folder, what, *options, script=SCRIPT, **env):
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "kerasmem", "run", "--save-freq", "3", *options, str(script), str(folder), what],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", **env},
    )
    said = (folder / "said").read_text().splitlines() if (folder / "said").exists() else []
    told = [line for line in done.stderr.splitlines() if line.startswith("kerasmem run: ")]
    return done.returncode, said, told, done.stderr


def test_a_killed_script_ends_as_one_that_was_not(tmp_path):
    code, whole, told, _ = run(tmp_path / "whole", "exit")
    assert code == 7 and not told
    code, killed, told, _ = run(tmp_path / "killed", "kill")
    assert code == 0
    assert killed == ["begun", whole[1], "begun", *whole[1:]], "the first two fits are over, the third goes on"
    assert len(told) == 1
    assert "in fit 3, epoch 1, batch 5, the script was ended by SIGKILL" in told[0]


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_python")
def test_a_script_that_runs_out_under_xla(tmp_path):
    code, said, _, _ = run(tmp_path / "whole", "xla")
    assert code == 0 and len(said) == 3
    code, said, told, errors = run(tmp_path / "limited", "xla", **LIMITED)
    assert code == 0, errors[-2000:]
    assert "want of memory" in told[0] and "micro-batches of 1024 rows" in told[0]
    with np.load(tmp_path / "whole" / "weights.npz") as one, np.load(tmp_path / "limited" / "weights.npz") as other:
        for name in one:
            scale = max(np.abs(one[name]).max(), 1e-2)
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-5 * scale)


def test_a_loop_of_ones_own_is_told(tmp_path):
    code, said, told, _ = run(tmp_path / "loop", "loop")
    assert code == 128 + 9
    assert said == ["begun"], "it is not run again for nothing"
    assert "outside of model.fit" in told[0] and "train_on_batch" in told[0]


@pytest.mark.usefixtures("loaded_python")  # Keras is imported before the script
def test_what_a_script_asks_of_kerasmem_fit_is_done(tmp_path):
    asked = SCRIPT.parent / "asked.py"
    code, said, told, errors = run(tmp_path / "killed", "kill", "--save-freq", "100", script=asked)
    assert code == 0, errors
    assert len(told) == 1
    first, again = said[:5], said[5:]
    assert [line.split(",")[0] for line in first] == [f"batch {n}: step {n + 1}" for n in range(5)]
    assert [line.split(",")[0] for line in again[:-1]] == [
        *(f"batch {n}: step 0" for n in range(4)), *(f"batch {n}: step {n + 1}" for n in range(4, 8)),
    ], "gone on with from its own checkpoint, which was written every other batch"  # fmt: skip
    assert first[0].endswith("0 other process, True") and again[-1] == "left: True"
    code, said, _, errors = run(tmp_path / "isolated", "isolated", script=asked)
    assert code == 0, errors
    assert said[-2].endswith("1 other process, True") and said[-1] == "left: False"


def test_wrong_usage(cli, tmp_path):
    missing = cli("run", tmp_path / "none.py")
    assert missing.code == 2 and "no such script" in missing.err
    assert cli("run").code == 2


@pytest.fixture
def supervisor(tmp_path):
    told, folder = [], RunFolder(str(tmp_path))
    return lambda restarts=5: Supervisor(["train.py"], folder, told.append, restarts), folder, told


def test_pieces_are_halved_where_it_is_known_or_comes_again(supervisor):
    make, folder, told = supervisor
    made, at = make(), ScriptPosition(2, 0, 5, 64, 0, in_fit=True)
    assert made.plan(-9, at, {}) is None and folder.read("plan") == {}
    assert made.plan(-9, at, {}) is None and folder.read("plan") == {"2 train": 32}
    known = {"certain": True, "diagnosis": {"summary": "It ran out."}}
    assert made.plan(RAN_OUT, ScriptPosition(2, 0, 6, 64, 32, in_fit=True), known) is None
    assert folder.read("plan") == {"2 train": 16}
    assert "one row at a time too" in made.plan(RAN_OUT, ScriptPosition(2, 0, 6, 64, 1, in_fit=True), known)
    assert "as many restarts" in make(restarts=0).plan(-9, ScriptPosition(2, 1, 0, 64, 16, in_fit=True), {})
    assert len(told) == 3


def test_the_position_survives_and_reads_back(tmp_path):
    at, folder = ScriptPosition(3, 1, 7, 64, 16, in_fit=True), RunFolder(str(tmp_path))
    folder.note(at)
    assert RunFolder(str(tmp_path)).position() == at
    folder.write("plan", {"1": 2})
    assert folder.read("plan") == {"1": 2}
    (tmp_path / "plan").write_text(json.dumps([1]))
    assert folder.read("plan") == {} == folder.read("none")


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
        output = Output(tmp_path / "log.jsonl", append=False)
        output.start_run(output.open(None, False, None), [], None)
        output.close()
        return [json.loads(line)["run"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]

    assert write() == write() == [0], "a new process begins the file again"
    monkeypatch.setenv(GOES_ON, "1")
    assert write() == [0, 1]
