"""Conversions in parts write the same bytes with any executor."""

from __future__ import annotations

import importlib.util
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
from converted import content, left_in, streamed

import kerasmem
from kerasmem.data import repack
from kerasmem.datatools import indexing, statistics
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.processes.executors import open_executor

ROWS = (700, 1, 999, 450)
NAMES = [f"part-{number:05}.h5" for number in range(4)]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    random = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("raw")
    for number, rows in enumerate(ROWS):
        np.savez(folder / f"raw-{number}.npz", x=random.normal(size=(rows, 6)), y=random.integers(0, 5, rows))
    return folder


@pytest.fixture(scope="module")
def whole(raw):
    """Return the result and the content of a conversion in one process."""
    done = kerasmem.data.convert(raw / "raw-*.npz", raw / "whole.h5")
    return done, content(raw / "whole.h5")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def read_parts(folder):
    found = [content(path) for path in sorted(folder.glob("part-*.h5"))]
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes(), name


def check(raw, whole, folder, executor=None, **settings):
    """Convert in parts, and compare with the result of one process."""
    rows = whole[1]
    done = kerasmem.data.convert(
        raw / "raw-*.npz", folder / "train.index", executor=executor, part_size="20KB", **settings
    )
    assert_same(read_parts(folder), rows)
    assert (done.rows, done.datasets) == (whole[0].rows, whole[0].datasets)
    x, y = streamed(folder / "train.index")
    np.testing.assert_array_equal(x, rows["x"])
    np.testing.assert_array_equal(y, rows["y"])
    return done


def test_parts_are_the_rows_of_one_file(raw, whole, tmp_path, threads):
    done = check(raw, whole, tmp_path, threads, compression="gzip:1")
    assert left_in(tmp_path) == [*NAMES, "train.index"]
    assert done.outputs == (str(tmp_path / "train.index"),) and "train.index" in done.line
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert done.bytes_written == sum(sizes)


def test_a_lost_worker_is_an_error_without_an_index(raw, whole, tmp_path, monkeypatch):
    write_part = indexing._write_part

    def write_part_or_die(part, **settings):  # sent by value, so that the worker need not import this module
        if part[1].endswith("part-00002.h5"):
            os.kill(os.getpid(), signal.SIGKILL)
        return write_part(part, **settings)

    monkeypatch.setattr(indexing, "_write_part", write_part_or_die)
    with open_executor(workers=1) as processes, pytest.raises(KerasmemError, match="use fewer workers"):
        check(raw, whole, tmp_path, processes)
    assert "train.index" not in left_in(tmp_path)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="exists already"):
        check(raw, whole, tmp_path)
    check(raw, whole, tmp_path, force=True)


def test_force_removes_old_parts(raw, whole, tmp_path):
    check(raw, whole, tmp_path)
    done = kerasmem.data.convert(raw / "raw-*.npz", tmp_path / "train.index", force=True)
    assert done.rows == 2150 and left_in(tmp_path) == ["part-00000.h5", "train.index"]


@pytest.fixture
def store():
    fsspec = pytest.importorskip("fsspec")
    yield fsspec.filesystem("memory")
    fsspec.filesystem("memory").rm("/made", recursive=True)


def names_in(store):
    return sorted(os.path.basename(name) for name in store.ls("/made", detail=False))


def test_to_a_store(raw, whole, threads, store):
    given = {"executor": threads, "part_size": "20KB"}
    kerasmem.data.convert(raw / "raw-*.npz", "memory://made/train.index", **given)
    assert names_in(store) == [*NAMES, "train.index"]
    np.testing.assert_array_equal(streamed("memory://made/train.index")[0], whole[1]["x"])
    with pytest.raises(UsageError, match="exists already"):
        kerasmem.data.convert(raw / "raw-*.npz", "memory://made/train.index", **given)
    kerasmem.data.convert(raw / "raw-*.npz", "memory://made/train.index", force=True, **given)
    with pytest.raises(UsageError, match="web server"):
        kerasmem.data.convert(raw / "raw-*.npz", "http://127.0.0.1:9/train.index", force=True, **given)


def test_storage_options_reach_each_request_to_a_store(raw, store, monkeypatch):
    options = []
    for name in ("expand", "put_file"):
        call = getattr(indexing, name)
        noting = lambda *args, call=call: (options.append(args[-1].storage_options), call(*args))[1]  # noqa: E731
        monkeypatch.setattr(indexing, name, noting)
    remote = {"storage_options": {"account": "mine"}}
    kerasmem.data.convert(raw / "raw-*.npz", "memory://made/train.index", part_size="20KB", remote=remote)
    assert len(options) > 5 and all(each == {"account": "mine"} for each in options)


def test_repack_keeps_attributes(tmp_path, threads):
    with h5py.File(tmp_path / "slow.h5", "w") as file:
        file.create_dataset("x", data=np.arange(6000).reshape(1500, 4), chunks=(1500, 1))
        file["x"].attrs["unit"] = "mV"
    repack(tmp_path / "slow.h5", tmp_path / "fast.h5")
    (tmp_path / "parts").mkdir()
    repack(tmp_path / "slow.h5", tmp_path / "parts" / "fast.index", executor=threads, part_size="16KB")
    assert_same(read_parts(tmp_path / "parts"), content(tmp_path / "fast.h5"))
    with h5py.File(tmp_path / "parts" / "part-00002.h5") as file:
        assert file["x"].attrs["unit"] == "mV"


def test_tables_and_images_are_divided_into_parts(tmp_path, threads):
    """Types and classes are those of all files, and a CSV file is not divided."""
    pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    for number, words in enumerate((["dog", "cat"], ["emu", "cat"], ["ant", "bee"])):
        rows = "".join(f"{k + number / 2},{words[k % 2]}\n" for k in range(40))
        (tmp_path / f"t{number}.csv").write_text("a,animal\n" + rows)
    for number in range(9):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((5, 4, 3), number, "u1")).save(tmp_path / "images" / "ab"[number % 2] / f"{number}.png")
    for sources, size, count in ((tmp_path / "t*.csv", "300", 3), (tmp_path / "images", "200", 3)):
        one = tmp_path / f"one-{count}.h5"
        folder = tmp_path / f"parts-{os.path.basename(sources)[0]}"
        folder.mkdir()
        kerasmem.data.convert(sources, one, image_size="4x5")
        kerasmem.data.convert(sources, folder / "all.index", executor=threads, part_size=size, image_size="4x5")
        assert len(list(folder.glob("part-*.h5"))) == count
        assert_same(read_parts(folder), content(one))
        one.unlink()


def test_statistics_are_the_same_to_the_last_digit(raw, whole, tmp_path, threads, monkeypatch):
    monkeypatch.setattr(statistics, "_SECTION_VALUES", 64)
    monkeypatch.setattr(statistics, "_SECTIONS", 10)
    x = whole[1]["x"].copy()
    x[[5, 800, 801], 2] = np.nan
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(37, 6))
        file["y"] = whole[1]["y"]
    one = kerasmem.data.stats(tmp_path / "d.h5")
    assert kerasmem.data.stats(tmp_path / "d.h5", executor=threads) == one
    np.testing.assert_allclose(one["x"].mean, np.nanmean(x.astype("f8"), axis=0), rtol=1e-12)
    np.testing.assert_allclose(one["x"].variance, np.nanvar(x.astype("f8"), axis=0), rtol=1e-12)
    assert one["x"].nan_count == 3 and sum(one["y"].class_counts.values()) == len(x)
    kerasmem.data.convert(tmp_path / "d.h5", tmp_path / "d.index", executor=threads, part_size="20KB")
    assert kerasmem.data.stats(tmp_path / "d.index", executor=threads).columns == one.columns
    assert kerasmem.data.stats(str(tmp_path / "part-*.h5")).columns == one.columns


def test_settings_that_need_one_file_are_refused(raw, tmp_path, threads, cli):
    def convert(output="train.index", **settings):
        kerasmem.data.convert(raw / "raw-*.npz", tmp_path / output, **{"executor": threads, **settings})

    for settings in ({"shuffle": True}, {"split": "0.5,0.5"}):
        with pytest.raises(UsageError, match="if shuffle or split is set"):
            convert(**settings)
    with pytest.raises(UsageError, match="output must be an index"):
        convert("train.h5")
    with pytest.raises(UsageError, match="does not exist"):
        convert("nowhere/train.index")
    assert left_in(tmp_path) == []
    (tmp_path / "bad.npz").write_bytes(b"PK")
    done = cli("data", "convert", tmp_path / "bad.npz", "-o", tmp_path / "t.index", "--workers", "2")
    assert done.code == 2 and "bad.npz" in done.err
    with pytest.raises(UsageError, match="executor must be"):
        convert(executor=7)


@pytest.mark.optional
@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="needs dask")
def test_a_dask_cluster_writes_the_same_parts(raw, whole, tmp_path):
    from distributed import LocalCluster

    with (
        LocalCluster(1, threads_per_worker=1, dashboard_address=None) as cluster,
        open_executor(dask=cluster.scheduler_address) as executor,
    ):
        check(raw, whole, tmp_path, executor)
        found = kerasmem.data.stats(tmp_path / "train.index", executor=executor)
    assert found.columns == kerasmem.data.stats(raw / "whole.h5").columns
