"""`kerasmem advise`."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

import kerasmem

NET = """
import keras

def build(width=256):
    model = keras.Sequential(
        [keras.Input((32,)), *[keras.layers.Dense(width, activation="gelu") for _ in range(3)], keras.layers.Dense(4)],
        name="net",
    )
    model.compile("adam", "mse")
    return model
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)


def test_data_a_table_and_code(cli, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)  # another test's
    importlib.import_module("net").build().save("net.keras")
    arguments = ("advise", "net.keras", "--device", "9MB", "--batch-size", 1024, "--method", "graph")
    result = cli(*arguments, "--json")
    data = json.loads(result.out)
    assert (result.code, data["verdict"], data["device"]["verdict"]) == (0, "fits", "does not fit")
    advice = kerasmem.Advice.from_dict(data)
    assert advice.plans[0].verdict == "fits"
    assert advice.model.name == "net"
    brief, table = cli(*arguments), cli(*arguments, "-v")
    assert table.code == brief.code == 0
    assert "\x1b" not in table.out
    for shown in (brief.out, table.out):
        answer, line, *_ = shown.splitlines()
        assert answer.startswith(f"✔ fits 9MB with {advice.plans[0].name}: needs ") and answer.endswith("of 8.58 MiB")
        assert line.startswith("  ") and line.strip() in advice.plans[0].code
        assert "\nnet  net.keras\nbatch 1,024 · training · float32 · adam · method: graph\n\nNow: " in shown
    assert "-v shows costs, plans and a script, what is not offered" in brief.out and len(brief.out.splitlines()) <= 24
    code = cli(*arguments, "--code", "a")
    assert (code.code, code.out) == (0, advice.plans[0].code)
    assert "keras.saving.load_model('net.keras', compile=False)" in code.out
    assert "\n".join("  " + line if line else "" for line in code.out.splitlines()) in table.out
    wrong = cli(*arguments, "--code", "Z")
    assert (wrong.code, wrong.out) == (2, "")
    assert "--code Z: there is 1" in wrong.err


def test_exit_codes(cli):
    arguments = ("--batch-size", 8, "--method", "graph", "--budget-seconds", 0)
    assert cli("advise", "net.py:build", "--device", "1MiB", *arguments).code == 3
    assert cli("advise", "net.py:build", "--device", "1GB", *arguments).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("net.py:build",), "name the device"),
        ((), "name a model file"),
        (("net.py:build", "--device", "t44"), "not in the catalogue"),
        (("net.py:build", "--device", "1GB", "--code", "1", "--json"), "choose one"),
        (("no.keras", "--device", "1GB"), "no such file"),
        (("net.py:build", "--device", "1GB", "--budget-seconds", "-1"), "budget-seconds"),
    ],
)
def test_wrong_usage(cli, arguments, message):
    result = cli("advise", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err
