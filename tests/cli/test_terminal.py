"""Progress on a terminal and silence in a pipe."""

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

from kerasmem.cli.terminal import progress_bar, spinner

pytestmark = pytest.mark.usefixtures("loaded_python")

MODELS = Path(__file__).resolve().parent.parent / "support" / "small_models.py"


def errors_on_a_terminal(*arguments):
    """What a command writes to standard error, where that is a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
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
    assert program("-m", "kerasmem", *arguments).err == ""


def test_stages_are_named_and_quiet_is_silent(monkeypatch):
    from kerasmem.cli import cli as whole
    from kerasmem.cli.terminal import QUIET
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
