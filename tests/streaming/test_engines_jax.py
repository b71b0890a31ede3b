"""`keras.distribution` on JAX: several devices of one process, and several processes on loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from workers import free_ports, run_together

HERE = Path(__file__).parent
ROWS, STEPS = 192, 12
PYTHON = os.environ.get("KERASMEM_JAX_PYTHON", sys.executable)

needs_jax = pytest.mark.skipif(
    sys.executable == PYTHON and importlib.util.find_spec("jax") is None, reason="jax is not installed"
)


def run_workers(path, folder, count, devices=1):
    address = f"127.0.0.1:{free_ports()[0]}"
    commands = [[PYTHON, HERE / "jax_worker.py", path, count, index, address] for index in range(count)]
    environment = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    codes = run_together(commands, [environment] * count, folder)
    assert codes == [0] * count, (folder / "err0").read_text()[-3000:]
    return [json.loads((folder / f"out{index}").read_text().splitlines()[-1]) for index in range(count)]


@needs_jax
def test_two_devices_of_one_process(numbered, tmp_path):
    (result,) = run_workers(numbered(rows=ROWS, chunks=4), tmp_path, 1, devices=2)
    assert result["shard"] == [0, 1]
    for batches in result["epochs"]:
        assert sorted(row for batch in batches[:STEPS] for row in batch) == list(range(ROWS))
    assert result["losses"][1] < result["losses"][0]
    assert "JAX splits every batch evenly among 2 devices of each of 1 processes" in result["ragged"]
    assert result["whole"] == []


@needs_jax
def test_two_processes(numbered, tmp_path):
    results = run_workers(numbered(rows=ROWS, chunks=4), tmp_path, 2)
    assert [result["shard"] for result in results] == [[0, 2], [1, 2]]
    for epoch in range(2):
        parts = [result["epochs"][epoch][: STEPS // 2] for result in results]
        assert sorted(row for part in parts for batch in part for row in batch) == list(range(ROWS))
    assert results[0]["losses"] == results[1]["losses"]
    for result in results:
        assert "keras.distribution.distribution().auto_shard_dataset = False" in result["refused"]
        assert "remainder='drop'" in result["ragged"]
        assert any("all 2 processes deliver the same rows" in text for text in result["whole"])
