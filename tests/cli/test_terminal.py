"""Progress on a terminal and silence in a pipe; the cache from the command line."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kerasmem.cli.estimate_command import command as estimate_command
from kerasmem.cli.terminal import progress_bar, spinner
from kerasmem.estimation import arguments

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(__file__).resolve().parent.parent / "support" / "small_models.py"


def test_the_methods_of_the_command_line_are_the_estimators():
    (method,) = (each for each in estimate_command.params if each.name == "method")
    assert tuple(method.type.choices) == arguments.METHODS


def errors_on_a_terminal(*arguments):
    """What a command writes to standard error, where that is a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "KERASMEM_CACHE": "off"}
    done = subprocess.Popen(
        [sys.executable, "-m", "kerasmem", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    text = b""
    try:
        while piece := os.read(ours, 65536):
            text += piece
    except OSError:  # the other end was closed
        pass
    out, _ = done.communicate(timeout=120)
    os.close(ours)
    return text.decode("utf-8", "replace"), out.decode()


def test_a_spinner_on_a_terminal_only(program):
    shown, out = errors_on_a_terminal("estimate", f"{MODELS}:perceptron", "--method", "graph", "--json")
    assert "estimating" in shown
    assert any(f": {stage}" in shown for stage in ("opening", "tracing", "optimising", "simulating step"))
    assert "0:00:0" in shown
    assert json.loads(out)["settings"]["method"] == "graph"  # nothing of it in the result
    assert shown.rstrip().endswith("\x1b[2K")  # and it is wiped
    arguments = ("estimate", f"{MODELS}:perceptron", "--method", "graph", "--json")
    assert program("-m", "kerasmem", *arguments, env={"KERASMEM_CACHE": "off"}).err == ""


def test_stages_are_named_and_quiet_is_silent(monkeypatch):
    from kerasmem.cli import cli as whole
    from kerasmem.cli.vocabulary import QUIET
    from kerasmem.processes.guarding import note_stage

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Screen())
    with spinner("advising") as say:
        say("half precision\x1b[2J")
        note_stage("simulating step 3 of 5")
    note_stage("nobody listens any more")
    assert "half precision\\x1b[2J: simulating step 3 of 5" in sys.stderr.getvalue()
    assert "nobody" not in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", Screen())
    with click.Context(whole) as context:
        context.meta[QUIET] = True
        with spinner("advising") as say, progress_bar() as progress:
            say("more")
        assert progress is None and sys.stderr.getvalue() == ""


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_the_formula_needs_no_spinner_and_names_are_escaped(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for method in ("graph", "formula"):
        monkeypatch.setattr(sys, "stderr", Screen())
        with spinner("estimating [red]m\x1b[2J.h5", method):
            pass
        shown.append(sys.stderr.getvalue())
    assert "estimating [red]m\\x1b[2J.h5" in shown[0]
    assert shown[1] == ""


@pytest.mark.parametrize("command", ["estimate", "max-batch", "compare"])
@pytest.mark.usefixtures("new_python")
def test_a_cached_answer_says_so(cli, mnist_cnn, tmp_path, monkeypatch, command):
    mnist_cnn.save(tmp_path / "m.keras")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KERASMEM_CACHE", raising=False)
    model = tmp_path / "m.keras"
    arguments = {
        "estimate": ("estimate", model, "--method", "graph", "--json"),
        "max-batch": ("max-batch", model, "--method", "graph", "--maximum", 2, "--device", "t4", "--json"),
        "compare": ("compare", model, model, "--method", "graph", "--json"),
    }[command]

    def is_cached(data):
        report = {"estimate": data, "max-batch": data.get("report"), "compare": data.get("before")}[command]
        return any("cache" in note for note in report["notes"])

    first = json.loads(cli(*arguments).out)
    assert not is_cached(first)
    assert len(list((tmp_path / "cache" / "kerasmem" / "estimates").iterdir())) == (2 if command == "max-batch" else 1)
    second = json.loads(cli(*arguments).out)
    assert is_cached(second)
    assert not is_cached(json.loads(cli(*arguments, "--no-cache").out))


@pytest.mark.usefixtures("new_python")
def test_a_cached_answer_needs_no_tensorflow(program, mnist_cnn, tmp_path):
    mnist_cnn.save(tmp_path / "m.keras")
    script = (
        "import sys\nfrom kerasmem.cli import main\n"
        "try: main(['estimate', 'm.keras', '--method', 'graph', '--json'])\nexcept SystemExit: pass\n"
        "print('tensorflow' in sys.modules, file=sys.stderr)"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "KERASMEM_CACHE": "on"}
    first, second = (program("-c", script, cwd=tmp_path, env=environment) for _ in range(2))
    assert (first.err.split()[-1], second.err.split()[-1]) == ("True", "False")
    assert json.loads(first.out)["bytes"] == json.loads(second.out)["bytes"]
