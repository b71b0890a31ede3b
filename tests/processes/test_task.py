"""Work in a process of its own: answers, errors, limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from kerasmem.errors import KerasmemError, MissingExtraError, ModelFileError, UsageError
from kerasmem.processes import task
from kerasmem.processes.task import ChildFailure, run_child, started_ahead

WORKER = """
import json, os, signal, subprocess, sys, time
from kerasmem.errors import MissingExtraError, ModelFileError, UsageError
from kerasmem.processes.task import ChildFailure, serve

class OwnError(ModelFileError):
    pass

def work(request):
    print("noise on standard output")
    if "code" in request:
        exec(request["code"])
    return {"echo": request.get("value"), "keras": "keras" in sys.modules, "extra": os.environ.get("EXTRA")}

serve(work, load=lambda: os.environ.get("EXTRA") == "load" and __import__("colorsys"))
if os.environ.get("EXTRA") == "crash at exit":
    os._exit(3)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "child_worker.py").write_text(textwrap.dedent(WORKER))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(code="", timeout=20.0, **options):
        return run_child("child_worker", {"code": code, "value": "é\n"}, timeout=timeout, **options)

    return run


def test_an_answer_comes_back_beside_noise(run):
    answer = run("os.write(1, b'more noise')", env={"EXTRA": "given"})
    assert answer == {"echo": "é\n", "keras": False, "extra": "given"}


def test_a_child_that_was_started_ahead_has_loaded_what_it_needs(run):
    env, code = {"EXTRA": "load"}, "request['value'] = [os.getpid(), 'colorsys' in sys.modules]"
    with started_ahead("child_worker", env):
        waiting = task._waiting["child_worker"]
        assert run(code, env=env)["echo"] == [waiting.pid, True]
        assert run(code)["echo"][1] is False  # the next one is another
    with started_ahead("child_worker", env):
        waiting = task._waiting["child_worker"]
    assert waiting.poll() is not None
    assert not task._waiting


def test_an_answer_counts_where_the_process_then_ends_badly(run):
    assert run(env={"EXTRA": "crash at exit"})["echo"]


@pytest.mark.parametrize(
    ("code", "cls", "text"),
    [
        ("raise UsageError('wrong: mend it')", UsageError, "wrong: mend it"),
        ("raise OwnError('m.h5: damaged')", ModelFileError, "m.h5: damaged"),
        ("raise MissingExtraError('this', 'gpu-targets')", MissingExtraError, r"kerasmem\[gpu-targets\]"),
        ("raise ChildFailure('no ptxas')", ChildFailure, "no ptxas"),
    ],
)
def test_errors_of_kerasmem_come_through(run, code, cls, text):
    with pytest.raises(KerasmemError, match=text) as caught:
        run(code)
    assert type(caught.value) is cls
    assert caught.value.exit_code == cls.exit_code


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('first line\\nsecond')", r"^ValueError: first line$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"SIGKILL, as the system does when memory runs out"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"ended by SIGSEGV"),
        ("print('what happened', file=sys.stderr); sys.stderr.flush(); os._exit(7)", "exit code 7 .*what happened"),
        ("raise MemoryError", "out of host memory"),
        ("return_value = json.dumps(object())", "TypeError"),
    ],
)
def test_other_failures_have_a_reason(run, code, reason):
    with pytest.raises(ChildFailure, match=reason) as caught:
        run(code)
    assert "\n" not in caught.value.reason


def test_a_module_that_is_not_there():
    with pytest.raises(ChildFailure, match="No module named"):
        run_child("no_such_module_here", {}, timeout=20)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pid):
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_the_time_limit_ends_the_whole_group(run, tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        f"child = subprocess.Popen(['sleep', '60']); open({str(pid_file)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    start = time.monotonic()
    with pytest.raises(ChildFailure, match="longer than 2 s"):
        run(code, timeout=2)
    assert time.monotonic() - start < 10
    assert wait_until_gone(int(pid_file.read_text()))


def test_the_memory_limit(run):
    with pytest.raises(ChildFailure, match="more than the 200 MiB"):
        run("hold = bytearray(400 * 2**20); time.sleep(20)", memory_limit=200 * 2**20)
    assert run("hold = bytearray(2**20)", memory_limit=200 * 2**20)["echo"]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_the_child_does_not_outlive_its_parent(run, tmp_path, ending):
    """Ctrl-C ends the group; a parent that is killed outright takes its child along."""
    pid_file = tmp_path / "pid"
    code = f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    script = (
        f"from kerasmem.processes.task import run_child; run_child('child_worker', {{'code': {code!r}}}, timeout=60)"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 10
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(pid_file.read_text())
    assert alive(pid)
    parent.send_signal(ending)
    parent.wait(10)
    assert wait_until_gone(pid)
