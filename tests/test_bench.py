"""The pure parts of the estimates' bench: the design of its rows, what it keeps, how it sums up."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench():
    """The bench's modules, which are scripts and no package."""
    sys.path.insert(0, str(BENCH))
    try:
        import estimates
        import estimates_rows
        import estimates_store
        import estimates_summary
    finally:
        sys.path.remove(str(BENCH))
    return argparse.Namespace(
        estimates=estimates, rows=estimates_rows, store=estimates_store, summary=estimates_summary
    )


@dataclass
class Entry:
    batches: tuple[int, ...] = (8, 32)
    held_out: bool = False
    heavy: bool = False
    modes: tuple[str, ...] = ("graph", "xla")
    mixed: tuple[str, ...] = ("mixed_bfloat16", "mixed_float16")


def zoo(count=40):
    return {f"model{n}": Entry(held_out=n % 4 == 0, heavy=n % 3 == 0) for n in range(count)}


class TestDesign:
    def test_is_the_same_every_time_and_keys_are_unique(self, bench):
        rows = bench.rows.design(zoo())
        assert rows == bench.rows.design(zoo())
        assert len({row.key for row in rows}) == len(rows)

    def test_prefixes_are_balanced(self, bench):
        rows = bench.rows.design(zoo())
        first = rows[:33]  # 40 less the heavy ones that XLA compiles, which come last
        assert len({row.model for row in first}) == 33
        modes = Counter(row.mode for row in first)
        assert abs(modes["graph"] - modes["xla"]) <= 8
        assert all(row.heavy and row.mode == "xla" for row in rows[-14:])
        assert {row.optimizer for row in first} == set(bench.rows.OPTIMIZER_CYCLE)

    def test_heavy_models_are_compiled_by_xla_once(self, bench):
        counts = Counter(row.model for row in bench.rows.design(zoo()) if row.heavy and row.mode == "xla")
        assert set(counts.values()) == {1}
        assert len(counts) == 14

    def test_a_mode_that_a_model_cannot_do_is_not_asked(self, bench):
        rows = bench.rows.design({"only": Entry(modes=("graph",))})
        assert {row.mode for row in rows} == {"graph"}

    def test_quick_is_balanced_and_part_of_the_whole(self, bench):
        rows = bench.rows.design(zoo())
        few = bench.rows.quick(rows)
        assert len(few) == 24
        assert Counter(row.mode for row in few) == {"graph": 12, "xla": 12}
        assert {row.key for row in few} <= {row.key for row in rows}
        assert any(row.dtype != "float32" for row in few)

    def test_graph_rows_run_on_each_kind_of_kernels_and_xla_rows_once(self, bench):
        rows = bench.rows.design(zoo(8))
        both = bench.rows.on_kernels(rows, ["onednn", "eigen"])
        assert len({row.key for row in both}) == len(both)
        assert Counter(row.kernels for row in both if row.mode == "graph")["eigen"] == sum(
            row.mode == "graph" for row in rows
        )
        assert {row.kernels for row in both if row.mode == "xla"} == {"onednn"}
        assert bench.rows.on_kernels(rows, ["onednn"]) == rows  # the keys of rows that were measured before
        one = bench.rows.one_a_model(rows)
        assert len({row.model for row in one}) == len(one) and {row.mode for row in one} == {"graph"}

    def test_patterns(self, bench):
        rows = bench.rows.design(zoo())
        assert bench.rows.select(rows, []) == rows
        assert {row.model for row in bench.rows.select(rows, ["model7/"])} == {"model7"}
        assert {row.mode for row in bench.rows.select(rows, ["*/xla/*"])} == {"xla"}
        assert bench.rows.select(rows, ["nothing"]) == []


class TestStore:
    def test_parts_are_added_to_a_row(self, bench, tmp_path):
        store = bench.store.Store(tmp_path / "rows.jsonl")
        store.put("a", {"model": "m"}, "truth", 1)
        store.put("b", {"model": "n"}, "truth", 2)
        bench.store.Store(store.path).put("a", {"model": "m"}, "estimates", 3)
        assert store.read() == {
            "a": {"key": "a", "model": "m", "truth": 1, "estimates": 3},
            "b": {"key": "b", "model": "n", "truth": 2},
        }
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]

    def test_a_damaged_line_is_passed_over(self, bench, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text('{"key": "a"}\n{"key": "b", "tru\n[]\n')
        assert list(bench.store.Store(path).read()) == ["a"]

    def test_a_reason_names_no_folder_of_this_machine(self, bench):
        error = "I0000 noise\nTraceback\n  File x\nValueError: no file at /home/someone/models/a.keras here\nW trailing"
        assert bench.store.reason(error, 1) == "exit 1: ValueError: no file at a.keras here"
        assert bench.store.reason("", -9) == "exit -9: "


@dataclass
class FakeProcesses:
    """Stands in for the processes: answers by part, and remembers what was asked."""

    answers: dict
    asked: list = field(default_factory=list)

    def __call__(self, part, row, timeout, limit_mib=None):
        self.asked.append((part, row["model"], row.get("method"), limit_mib))
        return self.answers[part]


class TestResume:
    ANSWERS = {  # noqa: RUF012
        "truth": {"peak_bytes": [100 << 20] * 12, "step_seconds": 0.1},
        "estimate": {"total": 101 << 20, "low": 90 << 20, "high": (105 << 20) + 1, "wall_seconds": 1},
        "capped": {"outcome": "trained"},
        "rivals": {"formula": {"total": 50 << 20}},
    }

    def options(self, **changed):
        asked = {"only": None, "refresh": [], "time_limit": 0, "jobs": 1, "steps": 12, "repeats": None}
        asked |= {"quiet": None, "quick": False}
        return argparse.Namespace(**(asked | changed))

    def run(self, bench, monkeypatch, store, rows, answers=None, **changed):
        fake = FakeProcesses(answers or self.ANSWERS)
        monkeypatch.setattr(bench.estimates, "in_a_fresh_process", fake)
        bench.estimates.Bench(store, self.options(**changed), probed=set()).run(rows)
        return fake.asked

    def test_what_is_done_is_not_done_again(self, bench, monkeypatch, tmp_path):
        store = bench.store.Store(tmp_path / "rows.jsonl")
        rows = bench.rows.design({"m": Entry(modes=("graph",), batches=(8,))})[:1]
        asked = self.run(bench, monkeypatch, store, rows)
        assert [each[0] for each in asked] == ["truth", "truth", "estimate", "capped", "capped", "rivals"]
        assert [each[3] for each in asked if each[0] == "capped"] == [106, 90]  # rounded up, and 0.9 × 100 MiB
        assert self.run(bench, monkeypatch, store, rows) == []
        again = self.run(bench, monkeypatch, store, rows, refresh=["estimate"])
        assert [each[0] for each in again] == ["estimate"]  # its `high` is the same: no capped run either
        wider = {**self.ANSWERS, "estimate": {**self.ANSWERS["estimate"], "high": 110 << 20}}
        again = self.run(bench, monkeypatch, store, rows, wider, refresh=["estimate"])
        assert [(each[0], each[3]) for each in again] == [("estimate", None), ("capped", 110)]

    def test_an_estimate_that_failed_is_tried_again(self, bench, monkeypatch, tmp_path):
        store = bench.store.Store(tmp_path / "rows.jsonl")
        rows = bench.rows.design({"m": Entry(modes=("xla",), batches=(8,))})[:1]
        failing = {**self.ANSWERS, "estimate": {"error": "not yet"}}
        assert [each[0] for each in self.run(bench, monkeypatch, store, rows, failing)] == [
            "truth",
            "estimate",
            "rivals",
        ]
        assert [each[0] for each in self.run(bench, monkeypatch, store, rows)] == ["estimate", "capped", "capped"]

    def test_graph_rows_of_a_busy_machine_are_measured_again(self, bench, monkeypatch, tmp_path):
        store = bench.store.Store(tmp_path / "rows.jsonl")
        rows = [*bench.rows.design({"g": Entry(modes=("graph",)), "x": Entry(modes=("xla",))})][:2]
        busy = {**self.ANSWERS, "truth": {**self.ANSWERS["truth"], "load_average": 7.0}}
        assert len(self.run(bench, monkeypatch, store, rows, busy, only=["truth"])) == 3
        calm = {**self.ANSWERS, "truth": {**self.ANSWERS["truth"], "load_average": 1.5}}
        again = self.run(bench, monkeypatch, store, rows, calm, only=["truth"], quiet=3.0)
        assert [each[1] for each in again] == ["g", "g"]
        assert self.run(bench, monkeypatch, store, rows, calm, only=["truth"], quiet=3.0) == []

    def test_a_measurement_that_failed_is_not_tried_again_but_one_that_was_slow_is(self, bench, monkeypatch, tmp_path):
        store = bench.store.Store(tmp_path / "rows.jsonl")
        rows = bench.rows.design({"x": Entry(modes=("xla",))})[:1]
        for error, tries in (("exit 1: ValueError", 0), ("no answer in 900 s", 1)):
            store.put(rows[0].key, {}, "truth", {"runs": [], "error": error})
            assert len(self.run(bench, monkeypatch, store, rows, only=["truth"])) == tries

    def test_the_time_limit_begins_nothing_more(self, bench, monkeypatch, tmp_path):
        store = bench.store.Store(tmp_path / "rows.jsonl")
        rows = bench.rows.design(zoo(4))
        assert self.run(bench, monkeypatch, store, rows, time_limit=-1) == []

    def test_several_jobs(self, bench, monkeypatch, tmp_path):
        store = bench.store.Store(tmp_path / "rows.jsonl")
        rows = bench.rows.design(zoo(4))
        self.run(bench, monkeypatch, store, rows, only=["rivals"], jobs=3)
        assert set(store.read()) == {row.key for row in rows}


def row(key, peaks, *, mode="graph", held_out=False, **parts):
    asked = {"persistent_bytes": 1000, "requested_increase_bytes": 500, "scalar_requests_bytes": 8}
    runs = [{"peak_bytes": each, **asked} for each in peaks]
    return {"key": key, "model": key, "mode": mode, "held_out": held_out, "truth": {"runs": runs}, **parts}


def estimated(method, total, low=None, high=None, **more):
    answer = {"total": total, "low": low, "high": high, "wall_seconds": 2.0, "max_rss_bytes": 7, **more}
    return {"estimates": {method: answer}}


class TestSummary:
    def test_measured_is_the_median_of_medians(self, bench):
        assert bench.summary.measured(row("a", [[1, 2, 9], [4, 4, 4]])) == 3
        assert bench.summary.measured({"truth": {"error": "no"}}) is None

    def test_the_least_need_leaves_the_waste_in_chunks_out(self, bench):
        assert bench.summary.least_need(row("a", [[2000]])) == 1500
        assert bench.summary.least_need(row("a", [[1200]])) == 1200
        assert bench.summary.least_need({"truth": {"runs": [{"peak_bytes": [7]}]}}) == 7

    def test_percentile(self, bench):
        assert bench.summary.percentile([3, 1, 2], 50) == 2
        assert bench.summary.percentile([0, 10], 95) == pytest.approx(9.5)
        assert bench.summary.percentile([5], 95) == 5

    def test_errors_intervals_plans_and_rivals(self, bench):
        rows = [
            row("a", [[100, 100, 120]], **estimated("graph", 90, 80, 110), rivals={"formula": {"total": 50}}),
            row("b", [[100, 100, 100]], **estimated("graph", 104, 101, 120), rivals={"formula": {"error": "why"}}),
            row("c", [[200]], mode="xla", held_out=True, **estimated("xla", 202, 190, 210, requested=1500)),
            row("d", [[200]], mode="xla", **estimated("xla", 200, 190, 210, requested=1501)),
            row("g", [[200]], mode="xla", **estimated("xla", 200, 190, 210, requested=1496)),
            row("e", [[200]], mode="xla", estimates={"xla": {"error": "UsageError"}}),
            {"key": "f", "model": "f", "mode": "xla", "held_out": False, "truth": {"error": "no answer in 9 s"}},
        ]
        other = {**row("a", [[100]], **estimated("graph", 120, 90, 130)), "kernels": "eigen"}
        kinds = bench.summary.by_kernels([*rows, other])
        assert {kind: each["graph"]["rows"] for kind, each in kinds.items()} == {"eigen": 1, "onednn": 2}
        assert kinds["eigen"]["graph"]["median_absolute_error_percent"] == 20
        found = bench.summary.summarise(rows)
        graph, xla = found["methods"]["graph"], found["methods"]["xla"]
        assert (found["rows"], found["measured"]) == (7, 6)
        assert graph["median_absolute_error_percent"] == 7
        assert graph["median_error_percent"] == -3
        assert graph["maximum_above_high"] == [["a", 9.09]]
        assert graph["median_below_low"] == ["b"]
        assert graph["worst"][0]["key"] == "a"
        assert xla["plan"] == {
            "rows": 3,
            "equal_but_for_scalars": 2,
            "equal_percent": 66.67,
            "equal_to_the_byte": 1,
            "differ_bytes": {"d": 1},
        }
        assert xla["failed"] == {"e": "UsageError"}
        assert (found["open"]["xla"]["rows"], found["held_out"]["xla"]["rows"]) == (2, 1)
        assert found["rivals"]["formula"]["median_absolute_error_percent"] == 50
        assert found["rivals"]["formula"]["failed"] == 1
        assert found["not_measured"] == {"f": "no answer in 9 s"}
        assert json.loads(json.dumps(found)) == found
        text = bench.summary.table(found)
        assert "6 of 7 rows measured" in text
        assert "no estimate for 1 rows: UsageError" in text

    def test_capped_runs(self, bench):
        def run(outcome, below):
            return {"capped": {"high": {"outcome": outcome}, "below": {"outcome": below}}}

        rows = [
            row("a", [[100]], **run("trained", "out of memory")),
            row("b", [[100]], **run("out of memory", "trained")),
            row("c", [[100]], **run("failed", "out of memory")),
        ]
        found = bench.summary.summarise(rows)["capped"]["graph"]
        assert found == {
            "at_high": 3,
            "ran_out_at_high": ["b"],
            "below_need": 3,
            "trained_below_need": ["b"],
            "failed_otherwise": ["c"],
        }

    def test_nothing_measured_yet(self, bench):
        found = bench.summary.summarise([])
        assert "0 of 0 rows" in bench.summary.table(found)

    def test_the_plot(self, bench, tmp_path):
        pytest.importorskip("matplotlib")
        rows = [row("a", [[100 << 20]], **estimated("graph", 90 << 20), rivals={"formula": {"total": 50 << 20}})]
        bench.summary.plot(rows, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_scale_bench_reads_each_byte_once_and_grows_by_no_more_than_its_budget(tmp_path):
    command = [sys.executable, str(BENCH / "scale.py"), "--quick", "--json", str(tmp_path / "scale.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "scale.json").read_text())
    ours = [row for row in found["rows"] if row.get("loader") == "kerasmem"]
    workers = [row for row in ours if row["part"] == "workers"]
    assert [row["workers"] for row in workers] == [1, 2]
    for row in workers:
        assert set(row["rows_delivered"]) == {row["rows"]}
        assert row["read_over_file"] <= 1.05
    sizes = [row for row in ours if row["part"] == "sizes"]
    assert {row["state"] for row in sizes} == {"cold", "warm"}
    for row in sizes:
        assert set(row["rows_delivered"]) == {row["rows"]}
        assert max(row["grown_bytes"]) <= 3 * found["settings"]["memory_budget"]
