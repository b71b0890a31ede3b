"""The data set of measured memory: its rows are valid, hostile ones are told with line, field and way out."""

from __future__ import annotations

import getpass
import importlib
import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from kerasmem.devices.kernels import cpu_flags
from kerasmem.errors import InputError, UsageError
from kerasmem.estimation.probe import running, worker
from kerasmem.estimation.truth import contributing
from kerasmem.estimation.truth.checking import MOST_PROBLEMS, check_rows, fields
from kerasmem.estimation.truth.networks import NETWORKS
from kerasmem.estimation.truth.results import CheckedRows, ContributedRow, Contribution
from kerasmem.estimation.truth.rows import KERNELS, Rows, distribution, findings, measured

RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "results" / "estimates.jsonl"
GOOD = json.loads(RESULTS.read_text().splitlines()[0])


def checked(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)
    )
    return check_rows(str(path))


def changed(place, value):
    """Return a good row with one value changed, named by its keys."""
    row = json.loads(json.dumps(GOOD))
    *way, last = place
    inner = row
    for step in way:
        inner = inner[step]
    inner[last] = value
    return row


def test_the_data_set_is_valid_and_its_rows_have_versions_and_machine():
    found = check_rows(str(RESULTS))
    assert found.problems == ()
    assert found.rows == len(RESULTS.read_text().splitlines()) > 200
    assert {each.method for each in found.errors} == {"graph", "xla", "probe"}
    assert CheckedRows.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert set(KERNELS) < set(fields()["kernels"].choices)


HOSTILE = {
    "huge": (("truth", "runs", 0, "peak_bytes", 3), 10**400, "truth.runs[0].peak_bytes[3]", "out of range"),
    "negative": (("batch_size",), -1, "batch_size", "out of range"),
    "not a number": (("truth", "runs", 0, "step_seconds"), float("nan"), "truth.runs[0].step_seconds", "no figure"),
    "infinite": (("estimates", "graph", "wall_seconds"), float("inf"), "estimates.graph.wall_seconds", "no figure"),
    "a float": (("estimates", "graph", "total"), 1.5, "estimates.graph.total", "in place of a whole number"),
    "a word for a flag": (("metrics",), "yes", "metrics", "in place of true or false"),
    "a flag for a number": (("batch_size",), True, "batch_size", "in place of a whole number"),
    "an object for a text": (("model",), {"name": "x"}, "model", "an object"),
    "a list for an object": (("truth",), [], "truth", "a list in place of an object"),
    "an object for a list": (("truth", "runs"), {}, "truth.runs", "an object in place of a list"),
    "a number for an object": (("estimates", "graph"), 7, "estimates.graph", "in place of an object"),
    "null": (("optimizer",), None, "optimizer", "null"),
    "control characters": (("model",), "cnn\x1b[31m", "model", "control characters"),
    "half a surrogate": (("machine", "device"), "\ud800", "machine.device", "control characters"),
    "a long text": (("machine", "device"), "x" * 500, "machine.device", "500 letters"),
    "a folder": (("estimates", "graph", "notes"), ["from /home/someone/x.h5"], "estimates.graph.notes[0]", "folder"),
    "a Windows folder": (("machine", "device"), "C:\\Users\\x", "machine.device", "folder"),
    "another word": (("mode",), "eager", "mode", "none of its words"),
    "an unknown field": (("hostname",), "box", "hostname", "no field"),
    "a star for a method": (("estimates", "*"), {"total": 1}, "estimates.*", "no field"),
    "a path for a name": (("truth.error",), "x", "truth.error", "no field"),
    "an interval beside its total": (("estimates", "graph", "low"), 2**49, "estimates.graph", "not in this order"),
    "another key": (("key",), "unet/b1", "key", "not the name"),
    "no run": (("truth", "runs"), [], "truth", "neither a run"),
    "a run without a peak": (("truth", "runs", 0, "peak_bytes"), [], "truth.runs[].peak_bytes", "without a peak"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_row_is_told_by_line_field_and_way_out(tmp_path, name):
    place, value, field, what = HOSTILE[name]
    found = checked(
        tmp_path, {**GOOD, "model": "unet", "key": GOOD["key"].replace("mnist_cnn", "unet")}, changed(place, value)
    )
    assert found.rows == 1
    assert [(each.line, each.field) for each in found.problems] == [(2, field)]
    assert what in found.problems[0].what
    assert found.problems[0].way_out


def test_lines_that_are_no_rows(tmp_path):
    lines = [
        b"\xff\xfe",
        b"{",
        b"[" * 5000,
        b"[]",
        b'"text"',
        b"1" * 5000,
        b"",
        b'{"a": ' + b'{"a": ' * 90 + b"1" + b"}" * 91,
    ]
    found = checked(tmp_path, *lines, b"x" * (2**20 + 5), GOOD, GOOD)
    told = {each.line: each.what for each in found.problems}
    assert found.rows == 1
    assert set(told) == {1, 2, 3, 4, 5, 6, 7, 8, 9, 11}
    assert "longer than" in told[9] and "line 10" in told[11]
    missing = checked(tmp_path, {"key": "x"})
    assert {"model", "versions.keras", "machine.device"} <= {each.field for each in missing.problems}
    assert checked(tmp_path).problems[0].what == "the file has no row"
    many = checked(tmp_path, *[b"{"] * (MOST_PROBLEMS + 7))
    assert (len(many.problems), many.more_problems) == (MOST_PROBLEMS, 7)
    with pytest.raises(InputError, match="cannot be read"):
        check_rows(str(tmp_path))


def test_the_distribution_counts_by_method_and_kernels():
    def row(kernels, total, high):
        return {
            "mode": "graph", "kernels": kernels, "truth": {"runs": [{"peak_bytes": [100, 100, 130]}]},
            "estimates": {"graph": {"total": total, "high": high}, "probe": {"error": "no"}},
        }  # fmt: skip

    rows = [row("eigen", 90, 140), row("eigen", 110, 120), row("onednn", 100, None), {"mode": "xla"}]
    eigen, onednn = distribution(each for every in rows for each in findings(every))
    assert (eigen.kernels, eigen.rows, eigen.covered, eigen.with_high) == ("eigen", 2, 1, 2)
    assert eigen.percentiles == (-9.0, -5.0, 0.0, 5.0, 9.0)
    assert (onednn.kernels, onednn.with_high) == ("onednn", 0)


def tiny():
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)])


def test_a_network_is_measured_here_and_a_second_run_goes_on(tmp_path, monkeypatch):
    """What a process of its own would do, this one does; only the allocator, which its start decides, is a stand-in."""
    worked = []

    def in_this_process(module, data, **_):
        worked.append(importlib.import_module(module).work(data))
        return worked[-1]

    monkeypatch.setattr(running, "run_child", in_this_process)
    monkeypatch.setattr(worker, "prepare_devices", lambda limit: None)
    monkeypatch.setattr("tensorflow.config.experimental.reset_memory_stats", lambda device: None)
    monkeypatch.setattr(worker.Session, "memory", lambda self: {"current": 2000, "peak": 4000})
    monkeypatch.setitem(NETWORKS, "wide_mlp", replace(NETWORKS["wide_mlp"], build=tiny, batches=(8,), modes=("graph",)))
    monkeypatch.chdir(tmp_path)
    done = contributing.contribute(["wide_mlp"], output="mine.jsonl", steps=2)
    (row,) = done.rows
    assert (row.method, row.failed, row.is_new) == ("graph", None, True)
    assert row.measured == 4000 and 3 * 4 * 50 < row.predicted < 50_000
    assert worked[0]["execution"] == "graph" and worked[0]["weights"] >= 4 * 50
    text = (tmp_path / "mine.jsonl").read_text()
    stored = Rows("mine.jsonl").read()[row.key]
    assert measured(stored) == pytest.approx(row.measured, abs=1) and len(stored["truth"]["runs"][0]["peak_bytes"]) == 2
    assert check_rows("mine.jsonl").problems == ()
    told = Path("/proc/cpuinfo").read_text()
    assert stored["machine"]["processor"] in told if "model name" in told else stored["machine"]["processor"] is None
    features = stored["machine"]["processor_features"]
    assert cpu_flags() >= set(features) == cpu_flags() & {"avx2", "avx512f", "amx_fp16", *features}
    for private in (getpass.getuser(), platform.node(), str(tmp_path), str(Path.home())):
        assert f'"{private}' not in text and f"/{private.strip('/')}" not in text
    with monkeypatch.context() as patch:
        patch.delattr(contributing, "run_steps")
        again = contributing.contribute(["wide_mlp"], output="mine.jsonl", steps=2)
    assert (again.rows[0].is_new, again.rows[0].measured) == (False, row.measured)
    assert Contribution.from_dict(json.loads(json.dumps(again.to_dict()))) == again
    stored["machine"]["cores"] += 1
    Path("mine.jsonl").write_text(json.dumps(stored) + "\n")
    with pytest.raises(UsageError, match="another machine"):
        contributing.contribute(["wide_mlp"], output="mine.jsonl")
    Path("mine.jsonl").write_text('{"my": "notes"}\n')
    with pytest.raises(InputError, match="line 1: my: no field"):
        contributing.contribute(["wide_mlp"], output="mine.jsonl")
    assert Path("mine.jsonl").read_text() == '{"my": "notes"}\n'
    with pytest.raises(UsageError, match="did you mean 'unet'"):
        contributing.contribute(["unett"], output="other.jsonl")


def test_the_command_line(cli, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(changed(("model",), "\x1b[2J/etc/passwd")) + "\n")
    result = cli("bench", "check", path)
    assert result.code == 2
    assert "line 2: model: '\\x1b[2J/etc/passwd' has control characters" in result.out and "\x1b" not in result.out
    data = json.loads(cli("bench", "check", path, "--json").out)
    assert (data["is_valid"], data["rows"], data["problems"][0]["line"]) == (False, 1, 2)
    path.write_text(json.dumps(GOOD) + "\n")
    assert cli("bench", "check", path).out.startswith("✔ 1 rows of 1 networks")
    rows = (ContributedRow("a/b8", 100 << 20, 110 << 20, "graph"), ContributedRow("b/b8", None, None, None, "ran out"))
    found = Contribution("mine.jsonl", {"keras": "3.15.1"}, {"system": "Linux", "cores": 2, "device": "cpu"}, rows)
    monkeypatch.setattr(contributing, "contribute", lambda names, **options: found)
    result = cli("bench", "contribute", "--models", "mnist_cnn")
    assert result.code == 1
    assert "✘ 1 of 2 rows measured, in mine.jsonl; nothing was sent" in result.out
    assert "+10.0 %" in result.out and "b/b8: ran out" in result.out and "keras version" in result.out
