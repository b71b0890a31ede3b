"""Tasks on executors: order of results, types of errors, and executors of the command line."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kerasmem.errors import DataError, KerasmemError, MissingExtraError, UsageError
from kerasmem.processes.executors import open_executor, run_tasks


def fail(error):
    raise error


def test_results_are_in_order():
    with ThreadPoolExecutor(2) as threads:
        for executor in (None, threads):
            assert list(run_tasks(executor, lambda task: task + 1, range(20))) == list(range(1, 21))


def test_errors_of_tasks():
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(DataError, match="row 2 is damaged"):
            list(run_tasks(threads, fail, [DataError("row 2 is damaged")]))
        with pytest.raises(KerasmemError, match="RuntimeError: no luck"):
            list(run_tasks(threads, fail, [RuntimeError("no luck")]))


def test_open_executor(monkeypatch):
    with open_executor() as executor:
        assert executor is None
    with pytest.raises(UsageError, match="choose one"), open_executor(2, "tcp://host:1"):
        pass
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match=r"kerasmem\[dask\]"), open_executor(dask="tcp://host:1"):
        pass
