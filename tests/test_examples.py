"""The examples run unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("loaded_python")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# The example sets this itself, but too late for a Python that has loaded TensorFlow.
WITHOUT_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "0"}


@pytest.mark.usefixtures("onednn_kernels")
def test_estimate_vs_runtime(program, tmp_path):
    result = program(EXAMPLES / "estimate_vs_runtime.py", "--batches", 16, 256, "--output", tmp_path / "plot.png")
    assert result.code == 0, result.err
    rows = re.findall(r"^ +(\d+) +([\d.]+) MiB +([\d.]+) MiB +([\d.]+) MiB +([\d.]+)$", result.out, re.MULTILINE)
    assert [row[0] for row in rows] == ["16", "256"]
    for _, formula, estimated, measured, ratio in rows:
        assert 0.5 < float(measured) / float(formula) < 2
        assert 0.7 < float(measured) / float(estimated) < 1.4  # small peaks: a chunk of 2 MiB matters
        assert float(ratio) == pytest.approx(float(measured) / float(estimated), abs=0.02)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("new_python")
def test_train_with_logger(program, tmp_path):
    result = program(EXAMPLES / "train_with_logger.py", cwd=tmp_path)
    assert result.code == 0, result.err
    assert len(re.findall(r"^memory, epoch \d \(CPU:0\): peak [\d.]+ MiB", result.out, re.MULTILINE)) == 3
    assert "memory_peak_bytes" in result.out
    assert "Highest peak: " in result.out
    assert "oneDNN" not in result.out, "the example chooses the BFC allocator"


@pytest.mark.parametrize(
    "sizes",
    [
        ("--size", "400MB", "--limit", "200MB"),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--size", "4GB", "--limit", "1.5GB"), marks=pytest.mark.slow),
    ],
    ids=["small", "as it is", "full length"],
)
def test_train_from_large_file(program, sizes):
    result = program(EXAMPLES / "train_from_large_file.py", *sizes)
    assert result.code == 0, result.err
    assert "MemoryError" in result.out
    assert re.search(r"trained one epoch on [\d,]+ rows", result.out)


@pytest.mark.slow
def test_grid_search(program):
    result = program(EXAMPLES / "grid_search.py")
    assert result.code == 0, result.err
    assert result.out.count("ran out of memory") == 2  # the widest, at both rates
    scores = re.findall(r"^ +\d+ +[\d.]+ +([\d.]+) +[\d.]+ [KM]iB", result.out, re.MULTILINE)
    assert len(scores) == 4
    last = result.out.splitlines()[-1]
    assert last.startswith("Best: ") and f"accuracy {max(scores)}" in last


@pytest.mark.slow
def test_recover_from_oom(program):
    recovered = program(EXAMPLES / "recover_from_oom.py", env=WITHOUT_ONEDNN)
    assert recovered.code == 0, recovered.err
    assert "ran out of memory" in recovered.out
    assert re.search(r"^step 0: 512 rows, then (64|128|256) at a time$", recovered.out, re.MULTILINE)
    undisturbed = program(EXAMPLES / "recover_from_oom.py", "4000", env=WITHOUT_ONEDNN)
    assert "ran out" not in undisturbed.out
    assert undisturbed.out.splitlines()[-1] == recovered.out.splitlines()[-1], "the same weights"


def test_recomputation_sweep(program):
    result = program(EXAMPLES / "recomputation_sweep.py", "--depth", 8, "--batch-size", 512, "--segments", 1, 3)
    assert result.code == 0, result.err
    rows = re.findall(r"^ +(\d+) +([\d.]+) MiB +([\d.]+) MiB +\d+ ms$", result.out, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(float(predicted) > 0 for _, predicted, _ in rows)
    assert float(rows[1][2]) < 0.8 * float(rows[0][2])


def test_free_models(program):
    result = program(EXAMPLES / "free_models.py")
    assert result.code == 0, result.err
    rows = re.findall(r"^(keras|kerasmem): +([\d,]+) bytes in use after model \d$", result.out, re.MULTILINE)
    in_use = [int(size.replace(",", "")) for _, size in rows]
    assert [name for name, _ in rows] == ["keras"] * 3 + ["kerasmem"] * 3
    assert in_use[0] > 3_000_000
    assert in_use[2] > 2.5 * in_use[0]
    assert in_use[3:] == [0, 0, 0]
