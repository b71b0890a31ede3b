"""The two scripts that do all the set-up."""

from __future__ import annotations

import configparser
import importlib.util
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


def test_tests_with_more_packages_run_with_the_arguments_given(tmp_path):
    for venv in ("venv", "venv-jax"):
        python = tmp_path / venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\necho "$@"\n')
        python.chmod(0o700)
    done = run(ROOT / "scripts" / "test", "--with", "jax", "-k", "resume", KERASMEM_VENV=str(tmp_path / "venv"))
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    assert words[:2] == ["-m", "pytest"] and "tests/backends" in words and words[-2:] == ["-k", "resume"]


def test_the_lowest_versions_are_those_of_setup_cfg():
    spec = importlib.util.spec_from_file_location("lowest_versions", ROOT / "scripts" / "lowest_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made_up = """
[options]
install_requires =
    some-name>=3.12,!=3.13.*,<4
    other.name>=0.7; sys_platform == "linux"
    free
[options.extras_require]
plot =
    drawing[all]
    ink>=2
test =
    kerasmem[plot]
    pytest>=8
"""
    assert module.constraints(made_up) == ["some-name==3.12", "other.name==0.7", "ink==2"]
    found = module.constraints((ROOT / "setup.cfg").read_text())
    assert {"tensorflow", "keras", "h5py", "numpy"} <= {line.split("==")[0] for line in found}


def test_every_file_of_the_package_is_installed():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    patterns = settings["options.package_data"]["kerasmem"].replace(",", " ").split()
    listed = subprocess.run(["git", "ls-files", "kerasmem"], cwd=ROOT, capture_output=True, text=True)
    data = [Path(name).relative_to("kerasmem") for name in listed.stdout.split() if not name.endswith(".py")]
    left_out = [str(path) for path in data if not any(path.match(pattern) for pattern in patterns)]
    assert not left_out, "setup.cfg's package_data does not name them"


def test_the_files_that_run_first_are_there(request):
    conftest = next(each for each in request.config.pluginmanager.get_plugins() if hasattr(each, "LONGEST"))
    assert [name for name in conftest.LONGEST if not (ROOT / "tests" / name).exists()] == []


def test_the_architecture_page_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = [path for path in (ROOT / "kerasmem").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = {path.name if path.suffix else f"{path.name}/" for path in paths} - {"__main__.py"}
    assert {name for name in names if f"`{name}`" not in page} == set()


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
