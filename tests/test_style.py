"""ruff and mypy are clean, with the settings of setup.cfg."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def lint_commands():
    loader = SourceFileLoader("lint", str(ROOT / "scripts" / "lint"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lint", loader))
    loader.exec_module(module)
    return module.commands(fix=False)


@pytest.mark.parametrize("command", lint_commands(), ids=["ruff check", "ruff format", "mypy"])
def test_clean(command):
    pytest.importorskip(command[2])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_fault_is_found(tmp_path):
    (tmp_path / "bad.py").write_text("import os\n")
    check = lint_commands()[0]
    command = [*check[: check.index("kerasmem")], str(tmp_path)]
    assert subprocess.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True).returncode == 1
