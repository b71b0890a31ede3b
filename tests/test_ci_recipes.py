"""The files that others' CI runs: action.yml and .pre-commit-hooks.yaml, by their very commands."""

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
# answers as GitHub's does: a list of comments to the first call, then notes what it is given
GH = """#!/usr/bin/env bash
if [[ $* == *--paginate* ]]; then cat "$RUNNER_TEMP/old"; exit; fi
echo "$*" >>"$RUNNER_TEMP/calls"
"""


@pytest.fixture
def workplace(tmp_path):
    """A checkout with a model, and a machine with kerasmem, pip and gh on its path."""
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


def run_action(workplace, **given):
    """Run each step of the action as a runner does; return the exit code of the first that fails, and all output."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert set(given) <= set(action["inputs"])
    values = {f"inputs.{name}": given.get(name, each.get("default")) for name, each in action["inputs"].items()}
    values |= {"github.action_path": str(ROOT), "github.repository": "o/r", "github.event.number": "7",
               "github.token": "t", "github.event_name": "pull_request"}  # fmt: skip
    said = ""
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash" and "${{" not in step["run"]  # what a change may name is never pasted into code

        def value(found):
            if found[1].startswith("steps."):
                outputs = dict(line.split("=", 1) for line in (workplace / "output").read_text().splitlines())
                return outputs[found[1].rpartition(".")[2]]
            return values[found[1]]

        own = {name: re.sub(r"\$\{\{ *(.+?) *\}\}", value, str(text)) for name, text in step.get("env", {}).items()}
        if "if" in step and values["inputs.comment"] != "true":
            continue
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], cwd=workplace,
            env={**environment(workplace), **own}, text=True, capture_output=True, timeout=120,
        )  # fmt: skip
        said += done.stdout + done.stderr
        if done.returncode:
            return done.returncode, said
    return 0, said


def test_the_action_comments_and_refuses(workplace):
    arguments = "--method formula --batch-size 8"
    code, said = run_action(
        workplace, before="model.py:build", after="model.py:wide", arguments=f"{arguments} --max-increase 5%"
    )
    assert code == 3, said
    assert (workplace / "pip").read_text().split()[-1] == str(ROOT)  # kerasmem itself is what is installed
    comment = (workplace / "comment.md").read_text()
    assert comment.startswith("<!-- kerasmem compare -->\n### ❌ Memory of ") and "exceeds the limit" in comment
    assert (workplace / "summary").read_text() in comment
    assert (workplace / "calls").read_text().split()[:6] == [
        "api", "--silent", "-X", "POST", "repos/o/r/issues/7/comments", "-F",
    ]  # fmt: skip

    (workplace / "old").write_text("41\n42\n")  # the next time its own comment is written again
    code, said = run_action(workplace, before="model.py:build", after="model.py:build", arguments=arguments)
    assert code == 0, said
    assert "-X PATCH repos/o/r/issues/comments/41 -F" in (workplace / "calls").read_text()


def test_the_action_fails_where_there_is_nothing_to_compare(workplace):
    code, said = run_action(workplace, before="model.py:build", after="gone.keras", comment="false")
    assert code == 2 and "gone.keras" in said
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
    assert all(hook["pass_filenames"] is False for hook in hooks)  # the files that changed are no models
