"""`kerasmem compare`: two models or saved reports, and limits for CI."""

from __future__ import annotations

import json

import keras
import pytest

layers = keras.layers


def save(path, units=16, name="hidden"):
    model = keras.Sequential(
        [keras.Input((32,), name="input"), layers.Dense(units, name=name), layers.Dense(4, name="head")], name="model"
    )
    model.compile("sgd", "mse")
    model.save(path)
    return path


@pytest.fixture
def files(tmp_path):
    return save(tmp_path / "a.keras"), save(tmp_path / "b.h5", 64)


FORMULA = ("--method", "formula")


def test_by_simulated_steps_with_one_method(cli, files):
    data = json.loads(cli("compare", *files, "--json").out)
    assert data["before"]["settings"]["method"] == data["after"]["settings"]["method"] == "graph"
    assert data["after"]["bytes"]["weights"] > data["before"]["bytes"]["weights"]
    assert data["notes"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [(["--budget", "1MB"], 0, "within the limit"), (["--budget", "4KB"], 3, "exceeds the limit"),
     (["--budget", "20KB"], 4, "too close to call"), (["--max-increase", "5%"], 3, "exceeds the limit"),
     (["--max-increase", "400%"], 0, "within the limit"), (["--max-increase", "1MB"], 0, "within the limit"),
     (["--max-increase", "0"], 3, "exceeds the limit"), (["--budget", "1MB", "--max-increase", "1%"], 3, "exceeds"),
     (["--device", "2MiB"], 0, "fits"), (["--device", "2MiB", "--budget", "4KB"], 3, "exceeds")],
)  # fmt: skip
def test_limits_decide_the_exit_code(cli, files, arguments, code, verdict):
    result = cli("compare", *files, *FORMULA, *arguments)
    assert result.code == code, result.out
    assert verdict in result.out


def test_a_saved_report_stands_for_its_model(cli, files, tmp_path):
    saved = cli("estimate", files[0], *FORMULA, "--batch-size", 7, "--json").out
    base = tmp_path / "base.json"
    base.write_text(saved)
    data = json.loads(cli("compare", base, files[1], "--json").out)
    assert data["before"] == json.loads(saved)
    assert data["after"]["settings"]["batch_size"] == 7  # as the report has it
    assert data["after"]["settings"]["method"] == "formula"
    refused = cli("compare", base, files[1], "--batch-size", 9, "--json")
    assert refused.code == 2 and "the batch sizes differ: 7 and 9; estimate both with the same settings" in refused.err
    refused = cli("compare", base, base, "--batch-size", 9)
    assert refused.code == 2 and "batch_size must be 7, as in the saved reports; got 9" in refused.err
    judged = json.loads(cli("compare", base, base, "--device", "1MiB", "--json").out)
    assert judged["after"]["device"]["verdict"] == "fits"
    total = json.loads(saved)["bytes"]["total"]
    base.write_text(saved.replace(f'"total": {total}', f'"total": {10**400}'))
    assert "bytes.total must be from 0 to 2**60" in cli("compare", base, base).err
    base.write_text(saved)
    allowed = ("--allow-different-settings", "--json")
    other = json.loads(cli("compare", base, files[1], "--batch-size", 9, *allowed).out)
    assert other["notes"] == ["the batch sizes differ: 7 and 9"]
    assert json.loads(cli("compare", files[1], base, "--json").out)["before"]["settings"]["batch_size"] == 7
    assert cli("compare", base, base, "--max-increase", "0").code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ('{"format_version": 9, "formula": {}}', "format_version must be 1; got 9"),
     ('{"format_version": 1, "formula": {}}', "not a kerasmem estimate"), ("[1]", "must be a JSON object"),
     ('{"a": 1}', "must have class_name and config"), ("", "empty"), ("{" * 200_000, "JSON")],
)  # fmt: skip
def test_damaged_reports(cli, files, tmp_path, text, message):
    (tmp_path / "base.json").write_text(text)
    result = cli("compare", tmp_path / "base.json", files[0], *FORMULA)
    assert result.code == 2
    assert "base.json" in result.err
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--max-increase", "many%"], "must be a share"), (["--max-increase", "-3%"], "must be a share"),
     (["--max-increase", "nan%"], "must be a share"), (["--budget", "lots"], "budget"),
     (["--max-increase", "x"], "max_increase")],
)  # fmt: skip
def test_wrong_limits(cli, files, arguments, message):
    result = cli("compare", *files, *FORMULA, *arguments)
    assert result.code == 2
    assert message in result.err


def test_names_cannot_steer_the_terminal(cli, tmp_path):
    hostile = save(tmp_path / "c.keras", name="x[red]\x1b[2J\u202e")
    result = cli("compare", save(tmp_path / "a.keras"), hostile, *FORMULA)
    assert "\x1b" not in result.out
    assert "\u202e" not in result.out
    assert "x[red]\\x1b[2J\\u202e (Dense)" in result.out


def test_markdown_for_a_comment(cli, files):
    result = cli("compare", *files, *FORMULA, "--max-increase", "5%", "--markdown")
    assert result.code == 3
    lines = result.out.splitlines()
    assert lines[0].startswith("### ❌ Memory of `model`: ") and "%" in lines[0]
    assert "exceeds the limit" in lines[2]
    tables = [line for line in lines if line.startswith("|")]
    assert all(line.count("|") == 5 for line in tables) and any("| `hidden` `Dense` |" in line for line in tables)
    assert cli("compare", *files, "--markdown", "--json").code == 2


def test_names_cannot_steer_a_comment(cli, tmp_path):
    hostile = save(tmp_path / "c.keras", name="a|b`<img src=x>@all](http:x)")
    text = cli("compare", save(tmp_path / "a.keras"), hostile, *FORMULA, "--markdown").out
    (row,) = (line for line in text.splitlines() if "img" in line)
    assert "`a\\|b'<img src=x>@all](http:x)`" in row or "`hidden → a\\|b'<img src=x>@all](http:x)`" in row
