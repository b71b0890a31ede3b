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


def test_a_spinner_on_a_terminal():
    shown, out = errors_on_a_terminal("estimate", f"{MODELS}:perceptron", "--method", "formula", "--json")
    assert "estimating" in shown
    assert "0:00:0" in shown
    assert json.loads(out)["settings"]["method"] == "formula"  # nothing of it in the result
    assert shown.rstrip().endswith("\x1b[2K")  # and it is wiped


def test_progress_is_escaped_and_quiet_is_silent(monkeypatch):
    from kerasmem.cli import cli as whole
    from kerasmem.cli.terminal import QUIET

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Screen())
    with spinner("advising [red]m\x1b[2J.h5") as say:
        assert "advising [red]m\\x1b[2J.h5" in sys.stderr.getvalue()
        say("half precision\x1b[2J")
    assert "half precision\\x1b[2J" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", Screen())
    with click.Context(whole) as context:
        context.meta[QUIET] = True
        with spinner("advising") as say, progress_bar() as progress:
            say("more")
        assert progress is None and sys.stderr.getvalue() == ""


class Screen(io.StringIO):
    def isatty(self):
        return True
