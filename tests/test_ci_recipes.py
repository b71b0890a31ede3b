"""Run the commands of action.yml and .pre-commit-hooks.yaml."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.usefixtures("loaded_python")
ROOT = Path(__file__).resolve().parent.parent
MODEL = """
import keras
def build(units=16):
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(units), keras.layers.Dense(4)])
def wide():
    return build(64)
"""
# a fake gh: lists comments, and records other calls
GH = """#!/usr/bin/env bash
if [[ $* == *--paginate* ]]; then cat "$RUNNER_TEMP/old"; exit; fi
echo "$*" >>"$RUNNER_TEMP/calls"
"""


@pytest.fixture
def workplace(tmp_path):
    """Return a folder with a model, and with kerasmem, pip and gh in bin/."""
    (tmp_path / "model.py").write_text(MODEL)
    programs = tmp_path / "bin"
    programs.mkdir()
    python = f'exec "{sys.executable}"'
    scripts = {
        "kerasmem": f'#!/usr/bin/env bash\n{python} -m kerasmem "$@"\n',
        "python": '#!/usr/bin/env bash\necho "$*" >>"$RUNNER_TEMP/pip"\n',
        "gh": GH,
    }
    for name, text in scripts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "old").touch()
    return tmp_path


def environment(workplace):
    return {
        **os.environ, "PATH": f"{workplace / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": str(workplace), "GITHUB_OUTPUT": str(workplace / "output"),
        "GITHUB_STEP_SUMMARY": str(workplace / "summary"), "CUDA_VISIBLE_DEVICES": "-1",
    }  # fmt: skip


def run_action(workplace, **inputs):
    """Run the steps of the action; return the exit code of the first failure, or 0, and the output."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert set(inputs) <= set(action["inputs"])
    values = {f"inputs.{name}": inputs.get(name, spec.get("default")) for name, spec in action["inputs"].items()}
    values |= {"github.action_path": str(ROOT), "github.repository": "o/r", "github.event.number": "7",
               "github.token": "t", "github.event_name": "pull_request"}  # fmt: skip
    output = ""
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash" and "${{" not in step["run"]  # inputs are never pasted into code

        def value(match):
            if match[1].startswith("steps."):
                outputs = dict(line.split("=", 1) for line in (workplace / "output").read_text().splitlines())
                return outputs[match[1].rpartition(".")[2]]
            return values[match[1]]

        variables = {
            name: re.sub(r"\$\{\{ *(.+?) *\}\}", value, str(text)) for name, text in step.get("env", {}).items()
        }
        if "if" in step and values["inputs.comment"] != "true":
            continue
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], cwd=workplace,
            env={**environment(workplace), **variables}, text=True, capture_output=True, timeout=120,
        )  # fmt: skip
        output += done.stdout + done.stderr
        if done.returncode:
            return done.returncode, output
    return 0, output


def test_the_action_comments_and_refuses(workplace):
    arguments = "--method formula --batch-size 8"
    limit = f"{arguments} --max-increase 5%"
    code, output = run_action(workplace, before="model.py:build", after="model.py:wide", arguments=limit)
    assert code == 3, output
    assert (workplace / "pip").read_text().split()[-1] == str(ROOT)  # installs kerasmem itself
    comment = (workplace / "comment.md").read_text()
    assert comment.startswith("<!-- kerasmem compare -->\n### ❌ Memory of ") and "exceeds the limit" in comment
    assert (workplace / "summary").read_text() in comment
    assert (workplace / "calls").read_text().split()[:6] == [
        "api", "--silent", "-X", "POST", "repos/o/r/issues/7/comments", "-F",
    ]  # fmt: skip

    (workplace / "old").write_text("41\n42\n")  # the next run updates its comment
    code, output = run_action(workplace, before="model.py:build", after="model.py:build", arguments=arguments)
    assert code == 0, output
    assert "-X PATCH repos/o/r/issues/comments/41 -F" in (workplace / "calls").read_text()


def test_the_action_fails_if_a_model_is_missing(workplace):
    code, output = run_action(workplace, before="model.py:build", after="gone.keras", comment="false")
    assert code == 2 and "gone.keras" in output
    assert not (workplace / "calls").exists()


def test_the_hooks_run(workplace):
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert {hook["language"] for hook in hooks} == {"python", "system"}
    (entry,) = {hook["entry"] for hook in hooks}
    arguments = ["model.py:build", "model.py:wide", "--method", "formula", "--max-increase", "5%"]
    done = subprocess.run(
        [*shlex.split(entry), *arguments], cwd=workplace, env=environment(workplace), text=True, capture_output=True
    )
    assert done.returncode == 3 and "exceeds the limit" in done.stdout, done.stderr
    assert all(hook["pass_filenames"] is False for hook in hooks)
