"""`kerasmem advise`."""

from __future__ import annotations

import json
import sys

import pytest

from kerasmem.recovery.advice import Advice

NET = """
import keras

def build(width=256):
    model = keras.Sequential(
        [keras.Input((32,)), *[keras.layers.Dense(width, activation="gelu") for _ in range(2)], keras.layers.Dense(4)],
        name="net",
    )
    model.compile("adam", "mse")
    return model
"""
ARGUMENTS = ("advise", "net.py:build", "--device", "9MB", "--batch-size", 1024, "--method", "graph")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.delitem(sys.modules, "net", raising=False)  # another test's


def test_data_a_table_and_code(cli, monkeypatch):
    result = cli(*ARGUMENTS, "--json")
    data = json.loads(result.out)
    assert (result.code, data["verdict"], data["device"]["verdict"]) == (0, "fits", "does not fit")
    advice = Advice.from_dict(data)
    plan = advice.plans[0]
    assert (plan.verdict, advice.model.name) == ("fits", "net")
    monkeypatch.setattr("kerasmem.recovery.advising.advise", lambda *_, **__: advice)
    brief, table, code = cli(*ARGUMENTS), cli(*ARGUMENTS, "-v"), cli(*ARGUMENTS, "--code")
    assert table.code == brief.code == code.code == 0
    assert "\x1b" not in table.out + code.out
    for shown in (brief.out, table.out):
        answer, line, *_ = shown.splitlines()
        assert answer.startswith(f"✔ fits 9MB with {plan.name}: needs ") and answer.endswith("of 8.58 MiB")
        assert line.startswith("  ") and line.strip() in plan.code
        assert "\nnet · batch 1,024 · training · float32 · adam · method graph\n\nNow: " in shown
    assert "-v shows costs" in brief.out and len(brief.out.splitlines()) <= 24
    assert code.out.startswith(f"# {plan.name}: fits, same training trajectory\n{plan.code}")
    assert all(each.code in code.out for each in (*advice.remedies, *advice.plans))
    compile(code.out, "code", "exec")


def test_exit_codes(cli):
    arguments = ("--batch-size", 8, "--method", "graph", "--budget-seconds", 0)
    assert cli("advise", "net.py:build", "--device", "1MiB", *arguments).code == 3
    assert cli("advise", "net.py:build", "--device", "1GB", *arguments).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("net.py:build",), "--device must be"),
        (("net.py:build", "--device", "1GB", "--code", "--json"), "choose one"),
        (("net.py:build", "--device", "1GB", "--budget-seconds", "-1"), "budget-seconds"),
    ],
)
def test_wrong_usage(cli, arguments, message):
    result = cli("advise", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err
