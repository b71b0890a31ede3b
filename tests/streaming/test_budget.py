"""Block and window sizes from a memory budget."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.layout import DatasetLayout
from kerasmem.streaming.budget import plan_memory
from kerasmem.units import GIB, MIB, parse_size


def dataset(name="x", rows=1_000_000, row=(1000,), dtype="<f4", chunk=None):
    chunks = None if chunk is None else (chunk, *row)
    return DatasetLayout(name, (rows, *row), dtype, "chunked" if chunk else "contiguous", chunks)


def plan(*layouts, selection=None, **settings):
    columns = [Column(each.name, each.row_shape, each.dtype, "float32") for each in layouts]
    selection = range(layouts[0].rows) if selection is None else selection
    settings = {"batch_size": 32, "ahead": 0, "workers": 1, "budget": None, **settings}
    return plan_memory(layouts, columns, selection=selection, **settings)


@given(st.integers(8, 1024), st.none() | st.integers(1, 256), st.sampled_from(["<f4", "<f8", "|u1"]))
def test_the_budget_is_used_and_kept(mebibytes, chunk, dtype):
    budget = mebibytes * MIB
    memory = plan(dataset(chunk=chunk, dtype=dtype), budget=budget)
    assert 0.7 * budget < memory.total_bytes <= budget
    if chunk:
        assert memory.block_rows < chunk or memory.block_rows % chunk == 0
    packed = replace(dataset(chunk=chunk, dtype=dtype), filters=("gzip",) if chunk else ())
    memory = plan(packed, budget=max(budget, 64 * MIB))
    assert memory.block_rows % (chunk or 1) == 0, "whole chunks only, where they have to be unpacked"
    if not chunk or budget == GIB:
        assert memory.window_rows / memory.block_rows > 100, "many blocks a window, where chunks allow it"


def test_a_refusal_names_the_dataset_with_the_largest_chunks():
    """PyTables creates such chunks, larger than the data, on processors with a large cache."""
    layouts = [
        dataset(rows=500, chunk=32, row=(6,)),
        replace(dataset("y", 500, (), chunk=60_000_000), filters=("blosc2",)),
    ]
    with pytest.raises(UsageError, match=r"with chunks of 60,000,000 rows \(229 MiB\) in 'y'"):
        plan(*layouts)


def test_batches_ahead_count_and_leave_the_windows_alone():
    for batch_size in (32, 256, 2000):
        none, some, many = (
            plan(dataset(), budget=64 * MIB, batch_size=batch_size, ahead=ahead, workers=4) for ahead in (0, 4, 500)
        )
        assert none.window_rows == some.window_rows == many.window_rows, "the order of rows depends on it"
        assert many.total_bytes <= 64 * MIB
        assert none.ahead == 0 < some.ahead <= 4
        assert some.queued_batches == none.queued_batches + some.ahead + min(4, some.ahead)


@pytest.mark.parametrize("chunk", [None, 10, 5000])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("batch_size", [1, 32, 5000])
def test_the_smallest_budget_named_works_and_less_does_not(chunk, sparse, batch_size):
    layouts = [dataset(chunk=chunk, dtype="<f8"), dataset("y", row=(), dtype="<i8", chunk=1024)]
    selection = np.arange(0, 1_000_000, 3) if sparse else None
    with pytest.raises(UsageError, match="smallest that works") as caught:
        plan(*layouts, budget=1000, batch_size=batch_size, selection=selection)
    smallest = re.search(r"works is '(\w+)'", str(caught.value))[1]
    memory = plan(*layouts, budget=parse_size(smallest), batch_size=batch_size, selection=selection)
    assert memory.total_bytes <= parse_size(smallest)
    with pytest.raises(UsageError):
        plan(*layouts, budget=parse_size(smallest) * 9 // 10, batch_size=batch_size, selection=selection)


def test_the_default_leaves_room_for_large_batches():
    memory = plan(dataset(row=(224, 224, 3)), batch_size=256)
    assert memory.batch_bytes > 150e6
    assert memory.windows * memory.window_bytes <= 256 * MIB


def test_light_datasets_are_cached_and_heavy_ones_share_the_blocks():
    memory = plan(dataset(chunk=100), dataset("y", row=(), dtype="<i8", chunk=4096), budget=512 * MIB)
    assert memory.cache_bytes.keys() == {"y"}
    packed = [dataset(chunk=10), dataset("z", chunk=640, row=(500,))]
    heavy = plan(*(replace(layout, filters=("gzip",)) for layout in packed), budget=GIB)
    assert not heavy.cache_bytes
    assert heavy.block_rows % 640 == 0
    assert heavy.total_bytes <= GIB
