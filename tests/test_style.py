"""ruff and mypy are clean, with the settings of pyproject.toml and setup.cfg."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parent.parent
RUFF = [sys.executable, "-m", "ruff", "check"]


def lint_commands():
    loader = SourceFileLoader("lint", str(ROOT / "scripts" / "lint"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lint", loader))
    loader.exec_module(module)
    return module.commands(fix=False)


@pytest.mark.parametrize("command", lint_commands(), ids=["ruff check", "ruff format", "mypy"])
def test_clean(command):
    pytest.importorskip(command[2])
    if "mypy" in command and numpy.__version__.startswith("1."):
        pytest.skip("types are checked against the latest versions")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


BRANCHES = "".join(f"    if x == {number}:\n        print(x)\n" for number in range(10))
FAULTS = {
    "F401": "import os\n",
    "SLF001": 'def look(model: object) -> object:\n    """Look."""\n    return model._layers\n',
    "C901": f'def look(x: int) -> None:\n    """Look."""\n{BRANCHES}',
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_is_found(code):
    """As it would be in a file of the package."""
    pytest.importorskip("ruff")
    name = ROOT / "kerasmem" / "made_up.py"
    command = [*RUFF, "--output-format", "json", "--stdin-filename", str(name), "-"]
    done = subprocess.run(command, cwd=ROOT, input=f'"""Made up."""\n\n{FAULTS[code]}', capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert {found["code"] for found in json.loads(done.stdout)} == {code}


def test_private_names_are_allowed_in_compat_alone():
    pytest.importorskip("ruff")
    name = ROOT / "kerasmem" / "compat" / "made_up.py"
    command = [*RUFF, "--stdin-filename", str(name), "-"]
    done = subprocess.run(
        command, cwd=ROOT, input=f'"""Made up."""\n\n{FAULTS["SLF001"]}', capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_no_room_but_compat_is_excused():
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert [each for each in settings["per-file-ignores"] if each.startswith("kerasmem")] == ["kerasmem/compat/*"]
