"""The examples run as they are; the rooms' own tests cover what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_estimate_vs_runtime(program, tmp_path):
    result = program(EXAMPLES / "estimate_vs_runtime.py", "--batches", 16, 256, "--output", tmp_path / "plot.png")
    assert result.code == 0, result.err
    rows = re.findall(r"^ +(\d+) +([\d.]+) MiB +([\d.]+) MiB +([\d.]+) MiB +([\d.]+)$", result.out, re.MULTILINE)
    assert [row[0] for row in rows] == ["16", "256"]
    for _, formula, estimated, measured, ratio in rows:
        assert 0.5 < float(measured) / float(formula) < 2  # the same convnet as the source text's plot
        assert (
            0.7 < float(measured) / float(estimated) < 1.4
        )  # the least of the two is a few MiB, of which chunks are 2
        assert float(ratio) == pytest.approx(float(measured) / float(estimated), abs=0.02)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_train_with_logger(program, tmp_path):
    result = program(EXAMPLES / "train_with_logger.py", cwd=tmp_path)
    assert result.code == 0, result.err
    assert len(re.findall(r"^memory, epoch \d \(CPU:0\): peak [\d.]+ MiB", result.out, re.MULTILINE)) == 3
    assert "memory_peak_bytes" in result.out
    assert "Highest peak: " in result.out
    assert "oneDNN" not in result.out, "the example chooses the GPU's kind of allocator itself"


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


def test_grid_search(program):
    result = program(EXAMPLES / "grid_search.py")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert sum("ran out of memory" in line for line in lines) == 2  # the widest, at both rates
    scores = [float(found[1]) for line in lines if (found := re.match(r" +\d+ +[\d.]+ +([\d.]+) +[\d.]+ [KM]iB", line))]
    assert len(scores) == 4
    assert lines[-1].startswith("Best: {'units': ") and f"accuracy {max(scores):.3f}" in lines[-1]
