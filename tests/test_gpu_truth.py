"""The bench that needs a GPU: it says so where there is none, and its whole path runs on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded_nvml import FOLDER, RecordedNvml

SCRIPT = "scripts/bench/gpu_truth.py"
BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
has_gpu = os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


@pytest.mark.skipif(has_gpu, reason="this machine may have a GPU")
def test_without_a_gpu_it_says_so(program):
    done = program(SCRIPT)
    assert done.code == 2
    assert "no NVIDIA GPU on this machine" in done.err and "--self-check" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_the_whole_path_runs_on_the_cpu(program, framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    done = program(SCRIPT, "--self-check", "--framework", framework)
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["rows"]
    assert row["model"] == "tiny" and row["device"] == "cpu"
    assert (row["plan"] is not None) == (framework == "jax")
    if framework == "jax":
        assert row["plan"]["argument"] > 3 * 4 * (16 * 32 + 32 + 32 * 10 + 10)  # weights and Adam's two moments


@pytest.fixture(scope="module")
def bench():
    """The modules of the bench, which are scripts and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import gpu_truth_child
        import gpu_truth_nvml
        import gpu_truth_parts

        yield SimpleNamespace(child=gpu_truth_child, nvml=gpu_truth_nvml, parts=gpu_truth_parts)


class TestParts:
    def test_a_cut_run_tells_most(self, bench):
        parts = bench.parts.parts_of([], list(bench.parts.KINDS), "t4", "mixed_float16")
        assert [part.kind for part in parts] == sorted(part.kind for part in parts)
        assert len({part.file for part in parts}) == len(parts)
        steps = [part.task for part in parts if part.kind == 1]
        assert len({task["model"] for task in steps}) >= 12
        for dtype in ("float32", "mixed_float16"):
            for way in ("graph", "xla", "jax"):
                models = {each["model"] for each in steps if each["dtype"] == dtype and bench.parts.way(each) == way}
                assert len(models) >= 12
        assert [task["dtype"] for task in steps] == sorted(task["dtype"] for task in steps)  # float32 first
        again = {part.file[1:] for part in parts if part.kind == 2}
        assert len({name.split("-")[1] for name in again}) >= 8 and again <= {
            part.file[1:] for part in parts if part.kind == 1
        }
        assert all(str(part.kind) in bench.child.PARTS for part in parts)

    def test_kinds_run_in_the_order_asked_for(self, bench):
        parts = bench.parts.parts_of(["mlp"], [5, 1], None, "mixed_bfloat16", rehearsed=True)
        assert [part.kind for part in parts] == [5, 5, 1, 1, 1, 1, 1, 1]
        assert {part.task["batch"] for part in parts if part.kind == 1} == {8}

    def test_a_file_for_each_part_and_none_is_run_twice(self, bench, tmp_path, monkeypatch):
        Part = bench.parts.Part
        parts = [Part(5, "fails", "json"), Part(5, "absent", "no_such_framework"), Part(1, "long", "json")]
        monkeypatch.setattr(bench.parts, "parts_of", lambda *arguments, **options: parts)
        monkeypatch.setattr(bench.parts, "environ_of", lambda framework, device: {"PATH": os.environ["PATH"]})
        given = {"models": [], "kinds": [1], "card": None, "gpu": None, "minutes": None}
        assert bench.parts.run_all(tmp_path, **given) == 1
        read = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
        assert set(read) == {"5-fails.json", "5-absent.json", "1-long.json", "summary.json"}
        assert (
            read["5-fails.json"]["outcome"] == "failed"
            and "KeyError: 'KERAS_BACKEND'" in read["5-fails.json"]["reason"]
        )
        assert read["5-absent.json"]["outcome"] == "skipped"
        assert read["5-absent.json"]["reason"] == "no_such_framework is not installed"
        assert read["1-long.json"]["outcome"] == "failed"
        (tmp_path / "5-fails.json").write_text('{"outcome": "done"}')
        assert bench.parts.run_all(tmp_path, **given | {"minutes": 0}) == 0  # no time for any part
        assert json.loads((tmp_path / "5-fails.json").read_text()) == {"outcome": "done"}
        assert json.loads((tmp_path / "summary.json").read_text())["outcomes"]["5-fails.json"] == "done"

    def test_a_part_that_hangs_is_ended(self, bench, tmp_path, monkeypatch):
        script = tmp_path / "gpu_truth_child.py"
        script.write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'input()'], stdin=None)\n")
        monkeypatch.setattr(bench.parts, "HERE", tmp_path)
        script.write_text("import time\ntime.sleep(600)\n")
        answer = bench.parts.run_part(bench.parts.Part(1, "hangs", "json", {}, 1), "cpu")
        assert answer == {"outcome": "timed out", "reason": "more than 1 s", "seconds": 1}

    def test_the_summary_compares_predictions_with_what_was_measured(self, bench, tmp_path):
        task = {"framework": "tensorflow", "jit_compile": True}
        step = {"outcome": "done", "part": {"task": task}, "result": {"measured": {"peak": 1000}}}
        estimate = {"total": 950, "low": 900, "high": 1100, "method": "gpu-target"}
        again = {"outcome": "done", "part": {"task": task}, "result": {"estimate": estimate, "at_high": "trained"}}
        for name, data in (("1-mlp-xla.json", step), ("2-mlp-xla.json", again), ("1-other.json", step)):
            (tmp_path / name).write_text(json.dumps(data))
        found = bench.parts.summary_of(tmp_path)
        assert found["rows"][0] == {
            "name": "mlp-xla", "way": "xla", "measured": 1000, "estimated": 950, "method": "gpu-target", "ratio": 0.95,
            "covered": True, "at_high": "trained",
        }  # fmt: skip
        assert found["ways"] == {
            "xla": {
                "rows": 1, "median_absolute_error_percent": 5.0, "worst_percent": 5.0, "covered": 1,
                "trained_at_high": 1,
            }
        }  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_a_recording_of_nvml_plays_the_same_again(bench, name):
    """What is recorded of a recording is the recording, but for what names the machine."""
    played = RecordedNvml(name)
    known = json.loads(json.dumps(played.data))
    with bench.nvml.Recorder(played) as recorder:
        for _ in range(3):  # a recording has three readings at most
            recorder.read()
        found = json.loads(json.dumps(recorder.recording(known["what"])))
    assert played.initialised == 0
    for device in found.get("devices", []):
        assert all("-00000000-" in each["uuid"] for each in (device, *device.get("instances", [])) if "uuid" in each)
    assert _unnamed(found) == _unnamed(known)


def _unnamed(recording):
    for device in recording.get("devices", []):
        for each in [device, *device.get("instances", [])]:
            each.pop("uuid", None)
            if isinstance(each.get("processes"), list):
                each["processes"] = [process["usedGpuMemory"] for process in each["processes"]]
    return recording


@pytest.mark.slow
def test_all_kinds_of_parts_are_rehearsed_on_the_cpu(program, tmp_path):
    """The parts that a card is needed for say so, and go on."""
    for only in ("1,2", "3,4,5", "6,7"):
        done = program(SCRIPT, "--all", "--rehearse", "--only", only, "--out", tmp_path)
        assert done.code == 0, done.err
    parts = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("[0-9]-*.json")}
    assert {name[0] for name in parts} == set("1234567")
    for name, part in parts.items():
        if part["outcome"] == "skipped":
            assert importlib.util.find_spec(part["part"]["framework"]) is None
            continue
        assert part["outcome"] == "rehearsed" and "needs_card" in part["result"], name
