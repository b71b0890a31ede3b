"""`kerasmem report`."""

from __future__ import annotations

import json

import pytest

from kerasmem.monitoring.timeline import COLUMNS

ROW = "0,{},train,0,{},1,GPU:0,100,{},,,,,700,0"
REPORT = {
    "format_version": 1,
    "model": {"name": "net", "source": "net.h5", "layers": 0, "parameters": 0, "trainable_parameters": 0},
    "settings": {
        "batch_size": 32, "optimizer": "adam", "loss": "mse", "dtype_policy": "float32", "mode": "train",
        "method": "graph", "execution": "graph", "device": None,
    },
    "bytes": {"total": 1000, "low": 900, "high": 1100, "weights": 400},
    "formula": dict.fromkeys(
        ("parameter_bytes", "activation_elements_per_sample", "activation_bytes_per_sample", "total_bytes"), 1
    ),
    "layers": [],
}  # fmt: skip


@pytest.fixture
def log(tmp_path):
    def write(name="run.csv", peak=900):
        rows = [ROW.format(place / 10, place, peak) for place in range(5)]
        (tmp_path / name).write_text("\n".join([",".join(COLUMNS), *rows, ""]))
        return tmp_path / name

    return write


def test_runs_are_printed_as_a_table(cli, log, tmp_path):
    (tmp_path / "e.json").write_text(json.dumps(REPORT))
    done = cli("report", log(), tmp_path / "e.json")
    assert done.code == 0 and done.err == ""
    assert "900 B" in done.out and "epoch 1, batch 0" in done.out and "e.json" in done.out


def test_a_page_is_written(cli, log, tmp_path):
    page = tmp_path / "page.html"
    done = cli("report", log(), "-o", page)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert "<svg" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run.csv"]


def test_json_has_each_log_and_report(cli, log, tmp_path):
    done = cli("report", log("run.rank0.csv", 300), log("run.rank1.csv", 500), "--json")
    data = json.loads(done.out)
    assert data["format_version"] == 1
    assert [summary["runs"][0]["peak_bytes"] for summary in data["logs"]] == [300, 500]
    (tmp_path / "e.json").write_text(json.dumps(REPORT))
    assert json.loads(cli("report", tmp_path / "e.json", "--json").out)["reports"][0]["bytes"]["total"] == 1000


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.jsonl", b"", "is empty"),
        ("a.csv", b"x,y\n1,2\n", "not a kerasmem log"),
        ("b.csv", (",".join(COLUMNS) + "\n").encode(), "has no samples"),
        ("c.json", b'{"a": 1}', "must have the field bytes"),
        ("d.json", b'{"bytes": {"total": 1}}', "format_version must be 1; got None"),
        (
            "e.jsonl",
            b'{"kind":"sample","run":' + b"9" * 40 + b',"time":1,"phase":"train"}\n',
            "no line is a valid sample",
        ),
        ("f.json", b'{"bytes":' + b"[" * 100_000, "nested too deeply"),
        ("g.jsonl", b"\x00\xff\x89PNG", "not a kerasmem log"),
        ("h.json", json.dumps({**REPORT, "bytes": {"total": 10**30, "low": 0, "high": 0}}).encode(), "bytes.total"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(cli, tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    done = cli("report", tmp_path / name)
    assert done.code == 2 and told in done.err and name in done.err
    assert "Traceback" not in done.err and done.err.count("\n") == 1 and done.out == ""


def test_wrong_usage_is_refused_before_anything_is_written(cli, log, tmp_path):
    run = log()
    before = run.read_bytes()
    for arguments, told in (
        (["-o", run], "must not be an input"),
        ([run], "got it twice"),
        (["-o", tmp_path / "no" / "x.html"], "cannot be written"),
        ([tmp_path / "missing.jsonl"], "cannot be read"),
        ([tmp_path], "not a folder"),
    ):
        done = cli("report", run, *arguments)
        assert done.code == 2 and told in done.err and "Traceback" not in done.err, arguments
    assert run.read_bytes() == before and list(tmp_path.iterdir()) == [run]
    assert cli("report").code == 2


def test_a_name_from_a_file_cannot_steer_the_terminal(cli, log, tmp_path):
    done = cli("report", log("run\x1b[31m\u202e.csv"))
    assert done.code == 0 and "\x1b" not in done.out and "\u202e" not in done.out
