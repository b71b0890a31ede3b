"""H5DataSource alone, and in PyTorch, Grain and Ray Data."""

from __future__ import annotations

import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

import kerasmem
from kerasmem import H5DataSource
from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import DataLayout

ROWS = 300


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    for part in range(3):
        rows = np.arange(part * 100, part * 100 + 100)
        with h5py.File(folder / f"part-{part}.h5", "w") as file:
            x = np.repeat(rows[:, None], 6, axis=1).astype("u2")
            file.create_dataset("x", data=x, chunks=(16, 6), compression="gzip")
            file["plain"], file["y"] = x.astype("f8"), rows
    return str(folder / "part-*.h5")


@pytest.mark.parametrize("name", ["x", "plain"])
def test_rows_do_not_depend_on_the_request(data, name):
    source = H5DataSource(data, name, scale=0.5)
    assert len(source) == ROWS
    for number in (0, 99, 100, 299, np.int64(42), -1):
        x, y = source[number]
        assert (x.shape, x.dtype, y) == ((6,), np.float32, int(number) % ROWS)
        assert (x == y / 2).all()
    asked = [250, 3, 3, 120, 119]
    assert [int(y) for _, y in source.__getitems__(asked)] == [int(y) for _, y in source[asked]] == asked
    x, y = source.batch(asked)
    assert y.tolist() == asked
    assert (x[:, 5] == y / 2).all()
    assert [int(y) for _, y in source[295:]] == list(range(295, 300))
    assert source[[]] == []
    with pytest.raises(IndexError, match="row 300 does not exist; there are 300"):
        source[300]
    source.close()
    assert source[7][1] == 7


def test_a_row_reads_no_layouts_of_other_files(data, monkeypatch):
    source = H5DataSource(data)
    monkeypatch.setattr(DataLayout, "block_grid", None)
    monkeypatch.setattr(DataLayout, "chunk_grid", None)
    assert source[120][1] == 120


def test_a_row_checks_only_its_own_file(data, monkeypatch):
    source, stat, seen = H5DataSource(data), os.stat, []
    assert [int(source[row][1]) for row in (0, 100, 200)] == [0, 100, 200], "all are open"
    monkeypatch.setattr(os, "stat", lambda path, *args, **settings: seen.append(path) or stat(path, *args, **settings))
    assert source[120][1] == 120
    assert {os.path.basename(path) for path in seen} == {"part-1.h5"}


def test_structures_rows_and_an_index(data, tmp_path):
    kerasmem.data.index(data, tmp_path / "all.index")
    chosen = np.array([5, 17, 230])
    source = H5DataSource(tmp_path / "all.index", {"a": "x", "b": "plain"}, None, rows=chosen, dtype="stored")
    assert [int(row["a"][0]) for row in source] == chosen.tolist()
    assert source[1]["b"].dtype == np.float64
    with pytest.raises(DataError, match="no dataset"):
        H5DataSource(data, "none")


def test_copies_and_threads_read_for_themselves(data):
    source = H5DataSource(data)
    assert source[5][1] == 5
    copy = pickle.loads(pickle.dumps(source))
    with ThreadPoolExecutor(4) as pool:
        assert [int(row[1]) for row in pool.map(copy.__getitem__, range(ROWS))] == list(range(ROWS))
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, b"%d" % int(source[123][1]))
        os._exit(0)
    os.wait()
    assert os.read(reading, 10) == b"123"
    os.close(reading)
    os.close(writing)


def test_a_chunk_is_read_once_for_all_rows_asked_for_together(data):
    source = H5DataSource(data, "x", None)
    source.batch(range(16))
    before = source._reader.peek().files.bytes_read
    assert before
    source.batch([15, 0, 7])
    assert source._reader.peek().files.bytes_read == 2 * before


def test_pytorch_divides_rows_among_ranks_and_processes(data):
    data_utils = pytest.importorskip("torch.utils.data", reason="PyTorch is not installed")
    source = H5DataSource(data)
    seen = []
    for rank in range(2):
        sampler = data_utils.DistributedSampler(source, num_replicas=2, rank=rank, shuffle=True, seed=3)
        for workers, start in ((0, None), (2, "fork"), (2, "spawn")) if rank else ((2, "fork"),):
            loader = data_utils.DataLoader(
                source, batch_size=16, sampler=sampler, num_workers=workers, multiprocessing_context=start
            )
            batches = [(x.numpy(), y.numpy()) for x, y in loader]
            assert all((x[:, 0] == y).all() for x, y in batches)
            rows = np.concatenate([y for _, y in batches])
            assert rows.tolist() == list(sampler)
        seen.append(rows)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(ROWS))


@pytest.mark.optional
def test_grain_accepts_it_as_a_random_access_source(data):
    grain = pytest.importorskip("grain", reason="Grain is not installed")
    source = H5DataSource(data)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    rows = [int(y) for _, y in grain.MapDataset.source(source).shuffle(seed=1)]
    assert sorted(rows) == list(range(ROWS)) != rows
    both = []
    for rank in range(2):
        sampler = grain.samplers.IndexSampler(
            ROWS, shuffle=True, seed=2, num_epochs=1, shard_options=grain.sharding.ShardOptions(rank, 2)
        )
        loader = grain.DataLoader(
            data_source=source, sampler=sampler, worker_count=0, operations=[grain.transforms.Batch(10)]
        )
        both += [row for _, y in loader for row in y.tolist()]
    assert sorted(both) == list(range(ROWS))


def test_ray_data_reads_rows_in_its_workers(data):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("pandas", reason="Ray Data needs pandas")
    source = H5DataSource(data)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}},
    )
    try:
        result = ray.data.range(ROWS).map_batches(lambda batch: {"y": source.batch(batch["id"])[1]}, batch_size=50)
        assert sorted(row["y"] for row in result.take_all()) == list(range(ROWS))
    finally:
        ray.shutdown()
