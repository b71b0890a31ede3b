"""The forks that tests run in place of a new Python do what that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import loaded_python
import pytest

pytestmark = pytest.mark.usefixtures("loaded_python")


def run(*arguments, **options):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False, **options
    )
    return done.returncode, done.stdout, done.stderr


def test_it_is_a_fork_that_has_loaded_tensorflow():
    code = "import sys; print('tensorflow' in sys.modules, sys.argv, sys.executable)"
    assert run("-c", code, "a", "-b") == (0, f"True ['-c', 'a', '-b'] {sys.executable}\n", "")
    assert sys.executable != loaded_python.NEW_PYTHON


def test_input_variables_folder_and_more_descriptors_arrive(tmp_path):
    code = "import os, sys; print(sys.stdin.read(), os.environ.get('GIVEN'), 'HOME' in os.environ, os.getcwd())"
    environ = {name: value for name, value in os.environ.items() if name != "HOME"} | {"GIVEN": "x" * 100_000}
    assert run("-c", code, input="in", env=environ, cwd=tmp_path)[1] == f"in {environ['GIVEN']} False {tmp_path}\n"
    ours, theirs = os.pipe()
    try:
        assert run("-c", f"import os; os.write({theirs}, b'piped')", pass_fds=[theirs])[0] == 0
        assert os.read(ours, 10) == b"piped"
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("import atexit; atexit.register(lambda: print('end', file=__import__('sys').stderr))", 0, "end\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_a_new_python_would(code, exit_code, said):
    assert run("-c", code) == (exit_code, "", said)
    code, _, errors = run("-c", "1 / 0")
    assert code == 1 and errors.endswith("ZeroDivisionError: division by zero\n")


def test_scripts_and_modules(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "script.py").write_text("import beside, sys; print(__name__, __file__, beside.VALUE, sys.argv[1:])\n")
    path = str(tmp_path / "script.py")
    assert run(path, "x")[1] == f"__main__ {path} 5 ['x']\n"
    assert run("-m", "script", "y", cwd=tmp_path)[1] == f"__main__ {path} 5 ['y']\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        assert loaded_python.fork_of(process.pid) == pid
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -number
    assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    with pytest.raises(ProcessLookupError):  # the server has seen to it
        for _ in range(200):
            os.kill(pid, 0)
            time.sleep(0.05)


def test_where_tensorflow_is_read_in_another_way_it_is_loaded_so():
    code = "import os, sys; print('tensorflow' in sys.modules, os.environ['KERAS_BACKEND'])"
    assert run("-c", code, env={**os.environ, "KERAS_BACKEND": "jax"})[1] == "False jax\n"
    assert run("-c", code, env={**os.environ, "KERAS_BACKEND": "tensorflow"})[1] == "True tensorflow\n"
