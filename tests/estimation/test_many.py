"""`kerasmem.estimate_many`: rows as single estimates have them, failures as rows, warm processes, engines."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

import kerasmem
from kerasmem.errors import UsageError
from kerasmem.estimation.many import EstimateTable
from kerasmem.processes.executors import open_executor
from kerasmem.processes.forking import _servers

pytestmark = pytest.mark.usefixtures("loaded_python")


def dense(units=4, depth=1):
    layers = [keras.layers.Dense(units, name=f"dense_{number}") for number in range(depth)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("sgd", "mse")
    return model


def crashes():
    os.abort()


def never_ends():
    import time

    time.sleep(600)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    for name, units in (("a.keras", 4), ("b.h5", 32)):
        dense(units, 2).save(folder / name)
    (folder / "torn.keras").write_bytes((folder / "a.keras").read_bytes()[:200])
    return folder


def test_rows_are_those_of_single_estimates(files):
    grid = {"batch_size": [8, 512], "optimizer": ["sgd", "adam"]}
    table = kerasmem.estimate_many([files / "a.keras"], grid=grid, method="formula", device="t4")
    singles = [
        kerasmem.estimate(files / "a.keras", batch_size=size, optimizer=optimizer, method="formula", device="t4")
        for size in grid["batch_size"] for optimizer in grid["optimizer"]
    ]  # fmt: skip
    assert [row.report.bytes for row in table.candidates] == [row.bytes for row in singles]
    assert [row.report.settings for row in table.candidates] == [row.settings for row in singles]
    frame = table.to_frame()
    assert list(frame["optimizer"]) == ["sgd", "adam"] * 2 and list(frame["total"]) == [row.peak for row in singles]
    assert set(frame["verdict"]) == {"fits"} and frame["reason"].isna().all()
    assert EstimateTable.from_dict(table.to_dict()) == table
    assert str(table).startswith("4 candidates, ") and str(table).endswith(": 4 fit")


def test_a_grid_of_arguments():
    table = kerasmem.estimate_many([dense], grid={"units": [3], "depth": [1, 2]}, method="formula")
    assert [row.report.model.parameters for row in table.candidates] == [27, 27 + 12]
    assert [(row.model, row.grid) for row in table.candidates][1] == ("dense", {"units": 3, "depth": 2})


def test_failed_estimate_is_a_row_with_its_reason(files):
    models = [dense, files / "torn.keras", crashes, "no.module:build", files / "a.keras"]
    table = kerasmem.estimate_many(models, method="formula")
    assert [row.report is None for row in table.candidates] == [False, True, True, True, False]
    torn, crashed, absent = (row.reason for row in table.failed)
    assert "torn.keras" in torn and "SIGABRT" in crashed and "no.module" in absent
    assert table.answer.endswith(": 3 failed") and table.to_frame()["total"].isna().sum() == 3
    slow = kerasmem.estimate_many([never_ends], method="formula", timeout=0.3)
    assert slow.candidates[0].reason == "never_ends: it took longer than 0.3 s"
    large = kerasmem.estimate_many([dense], method="formula", host_memory_limit=2**20)
    assert "of host memory, more than the limit of 1.00 MiB" in large.candidates[0].reason


def test_one_loaded_process_serves_all_candidates(files):
    kerasmem.estimate_many([dense], method="formula")
    before, calls = dict(_servers), []

    def record(row, done, count):
        calls.append((row.model, done, count))

    kerasmem.estimate_many([dense], grid={"units": [1, 2, 3]}, method="formula", progress=record)
    assert _servers == before
    assert calls == [("dense", done, 3) for done in (1, 2, 3)]


def test_executors_give_the_same_table_in_the_same_order(files):
    models, options = [files / "a.keras", files / "torn.keras", files / "b.h5"], {"method": "formula"}
    expected = kerasmem.estimate_many(models, **options)
    with ThreadPoolExecutor(2) as threads:
        assert kerasmem.estimate_many(models, executor=threads, **options) == expected
    with open_executor(workers=1) as processes:
        assert kerasmem.estimate_many(models, executor=processes, **options) == expected


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {}, "at least one"), ([3], {}, "models must be .* got int"),
        ([keras.Sequential()], {}, r"call kerasmem\.estimate"),
        ([dense], {"grid": {"units": 3}}, "units must be a list"),
        ([dense], {"grid": {"units": []}}, "units must be a list"),
        ([dense], {"grid": {"a-b": [1]}}, "must be a setting"),
        ([dense], {"grid": {"batch_size": [0]}}, "batch_size"), ([dense], {"grid": {"method": ["magic"]}}, "magic"),
        ([dense], {"grid": {"dense.units": [4]}}, "must be a setting"), ([dense], {"timeout": 0}, "timeout"),
        ([dense], {"host_memory_limit": "2GB"}, "host_memory_limit"), ([dense], {"executor": 7}, "executor"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_estimated(models, options, message):
    with pytest.raises(UsageError, match=message):
        kerasmem.estimate_many(models, **options)
