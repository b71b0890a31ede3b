"""Functions in forks of a process that has loaded TensorFlow: answers, errors, limits."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from kerasmem.errors import KerasmemError, MissingExtraError, ModelFileError, UsageError
from kerasmem.processes import forking
from kerasmem.processes.children import ChildFailure, Limits, child_environment
from kerasmem.processes.forking import run_child, start_server


class OwnError(ModelFileError):
    pass


def work(code="", value=None):
    """Runs in the child, with separate standard output and error."""
    print("noise on standard output")
    exec(code, globals())
    return {"echo": value, "extra": os.environ.get("EXTRA"), "pid": os.getpid()}


def run(code="", *, seconds=20.0, host_bytes=None, **options):
    return run_child(work, code, "é\n", limits=Limits(seconds, host_bytes), **options)


def test_answer_is_separate_from_output(capfd):
    answer = run("os.write(1, b'more noise')", environ=child_environment(EXTRA="given"))
    assert (answer["echo"], answer["extra"]) == ("é\n", "given")
    assert capfd.readouterr() == ("", "")


def test_server_is_shared_unless_startup_variables_differ(monkeypatch):
    monkeypatch.setattr(forking, "_servers", {})
    monkeypatch.setattr(forking, "start_module", lambda *args, **options: SimpleNamespace(poll=lambda: None))
    environ = child_environment()
    server = start_server(environ)
    assert server is start_server({**environ, "EXTRA": "other", "TF_FORCE_GPU_ALLOW_GROWTH": "false"})
    assert server is not start_server({**environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    ("code", "cls", "text"),
    [
        ("raise UsageError('wrong: mend it')", UsageError, "wrong: mend it"),
        ("raise OwnError('m.h5: damaged')", OwnError, "m.h5: damaged"),
        ("raise MissingExtraError('this', 'gpu-targets')", MissingExtraError, r"kerasmem\[gpu-targets\]"),
        ("raise ChildFailure('no ptxas')", ChildFailure, "no ptxas"),
    ],
)
def test_kerasmem_errors_keep_their_type(code, cls, text):
    with pytest.raises(KerasmemError, match=text) as caught:
        run(code)
    assert type(caught.value) is cls
    assert caught.value.exit_code == cls.exit_code


@pytest.mark.parametrize(
    ("code", "reason", "number"),
    [
        ("raise ValueError('first line\\nsecond')", r"^ValueError: first line$", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"SIGKILL, as the system does when memory runs out", signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"ended by SIGSEGV", signal.SIGSEGV),
        ("os.write(2, b'what happened\\n'); os._exit(7)", "exit code 7: what happened", None),
        ("raise MemoryError", "^MemoryError$", None),
        ("os.no_such_name", "AttributeError", None),
    ],
)
def test_other_failures_have_a_reason(code, reason, number):
    with pytest.raises(ChildFailure, match=reason) as caught:
        run(code)
    assert "\n" not in caught.value.reason
    assert caught.value.signal == number


def test_limits_of_time_and_memory():
    with pytest.raises(ChildFailure, match=r"longer than 0.5 s") as caught:
        run("signal.pause()", seconds=0.5)
    assert caught.value.timed_out
    size = 500 * 2**20
    with pytest.raises(ChildFailure, match="more than the limit of 500 MiB"):
        run(f"hold = bytearray({2 * size}); signal.pause()", host_bytes=size)
    assert run("hold = bytearray(2**20)", host_bytes=size)["echo"]
