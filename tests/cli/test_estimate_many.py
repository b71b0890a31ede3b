"""`kerasmem estimate` of several models or settings: a table, lines of JSON, CSV, exit codes."""

from __future__ import annotations

import csv
import io
import json

import keras
import pytest

from kerasmem.estimation.many import Candidate
from kerasmem.estimation.report import MemoryReport

pytestmark = pytest.mark.usefixtures("loaded_python")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for number in (1, 2, 10):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(number)])
        model.save(folder / f"m-{number}.keras")
    (folder / "broken.h5").write_bytes(b"no HDF5")
    return folder


def test_a_table_of_several_models(cli, models):
    paths = [models / f"m-{number}.keras" for number in (1, 2, 10)]
    found = cli("estimate", *paths, "--grid", "batch_size=1024", "-m", "formula", "-d", "t4")
    assert found.code == 0, found.err
    lines = found.out.splitlines()
    assert lines[0].startswith("3 candidates, ") and lines[0].endswith(": 3 fit")
    assert lines[2].split()[:3] == ["Model", "batch_size", "Parameters"]
    assert [line.split()[1] for line in lines[3:]] == ["1,024"] * 3
    assert [line.split()[0].rpartition("m-")[2] for line in lines[3:]] == ["1.keras", "2.keras", "10.keras"]
    assert "2 more: --top 0 lists all" in cli("estimate", *paths, "-m", "formula", "--top", 1).out


def test_lines_of_json_and_csv_with_what_failed(cli, models):
    asked = ("estimate", "-m", "formula", models / "broken.h5")
    found = cli(*asked, models / "m-1.keras", "--grid", "optimizer=sgd,adam", "--json")
    assert found.code == 1
    rows = [Candidate.from_dict(json.loads(line)) for line in found.out.splitlines()]
    assert [(row.report is None, row.grid["optimizer"]) for row in rows] == [
        (True, "sgd"), (True, "adam"), (False, "sgd"), (False, "adam")
    ]  # fmt: skip
    single = json.loads(cli("estimate", models / "m-1.keras", "-m", "formula", "--optimizer", "sgd", "--json").out)
    assert isinstance(rows[2].report, MemoryReport) and rows[2].report.to_dict() == {**single, "layers": []}
    (row,) = csv.DictReader(io.StringIO(cli(*asked, "--grid", "batch_size=64", "--csv").out))
    assert row["total"] == "" and "broken.h5" in row["reason"] and row["batch_size"] == "64"
    shown = cli(*asked, "--grid", "optimizer=sgd,adam").out
    assert "Failed: " in shown and "broken.h5 (optimizer sgd) and 1 more: " in shown


def test_a_factory_with_values_of_an_argument(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import keras\n"
        "def build(units, name='x'):\n"
        "    print('building', name)\n"
        "    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)])\n"
    )
    found = cli("estimate", "--factory", "net.py:build", "--grid", "units=3,5", "-m", "formula", "--json")
    assert found.code == 0, found.err
    assert [json.loads(line)["report"]["model"]["parameters"] for line in found.out.splitlines()] == [27, 45]


def test_the_worst_verdict_is_the_exit_code(cli, models):
    found = cli("estimate", models / "m-1.keras", "-m", "formula", "-d", "t4", "--grid", "batch_size=1,9000000000")
    assert found.code == 3
    assert "1 fit, 1 do not fit" in found.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grid", "batch_size"), "must be NAME=VALUE"), (("--grid", "a=1", "--grid", "a=2"), "got it twice"),
        (("absent.keras",), "absent.keras: the file does not exist"),
        (("--grid", "a=1", "--json", "--csv"), "choose one"),
        (("--workers", "2", "--dask", "tcp://a:1"), "choose one"),
    ],
)  # fmt: skip
def test_wrong_usage(cli, models, words, said):
    found = cli("estimate", models / "m-1.keras", *words)
    assert found.code == 2 and said in found.err, found.err
    assert not found.out
