"""The two scripts that do all the set-up."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path):
    """The files that git would give a stranger."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        target = tmp_path / "kerasmem" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return tmp_path / "kerasmem"


def run(script, *arguments, **env):
    return subprocess.run(
        [str(script), *arguments], capture_output=True, text=True, timeout=900, env={**os.environ, **env}
    )


def test_no_python_is_one_clear_message(checkout):
    done = run(checkout / "scripts" / "kerasmem", "--help", KERASMEM_PYTHON="/no/such/python")
    assert done.returncode == 1
    assert "KERASMEM_PYTHON=/no/such/python is not a Python 3.10 or newer" in done.stderr


def test_a_failed_installation_is_said_and_tried_again(checkout):
    """With a package index that does not answer: a message, no traceback, and no mark of success."""
    (checkout / "setup.cfg").write_text((checkout / "setup.cfg").read_text().replace("click>", "no-such-package-xyz>"))
    done = run(
        checkout / "scripts" / "kerasmem", "--help",
        KERASMEM_PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_RETRIES="0",
    )  # fmt: skip
    assert done.returncode == 1
    assert "the installation failed" in done.stderr
    assert not list((checkout / ".venv").glob("kerasmem-installed*"))


def test_every_file_of_the_package_is_installed():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    patterns = settings["options.package_data"]["kerasmem"].replace(",", " ").split()
    listed = subprocess.run(["git", "ls-files", "kerasmem"], cwd=ROOT, capture_output=True, text=True)
    data = [Path(name).relative_to("kerasmem") for name in listed.stdout.split() if not name.endswith(".py")]
    left_out = [str(path) for path in data if not any(path.match(pattern) for pattern in patterns)]
    assert not left_out, "setup.cfg's package_data does not name them"


def test_the_workflows_can_be_read():
    yaml = pytest.importorskip("yaml")
    paths = [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"]
    assert len(paths) >= 6
    assert all(isinstance(yaml.safe_load(path.read_text()), dict) for path in paths)


@pytest.mark.slow
def test_a_fresh_checkout_needs_nothing_but_python(checkout, tmp_path):
    script = checkout / "scripts" / "kerasmem"
    first = run(script, "--help", KERASMEM_PYTHON=sys.executable)
    assert first.returncode == 0, first.stderr
    assert "estimate" in first.stdout
    start = time.monotonic()
    again = run(script, "devices", "--json")
    assert time.monotonic() - start < 5  # nothing is installed twice; the bench has the true figure
    assert (again.returncode, again.stderr) == (0, "")
    test = run(checkout / "scripts" / "test", "tests/test_units.py", "tests/cli")
    assert test.returncode == 0, test.stdout[-3000:] + test.stderr[-3000:]
