"""Indexes of data files: writing, reading, changed files, and forged indexes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tracemalloc

import h5py
import numpy as np
import pytest
from remote_servers import FileServer

import kerasmem
from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import DatasetLayout, FileLayout
from kerasmem.hdf5.rows.paths import write_index


def write_parts(folder, count=3):
    random = np.random.default_rng(0)
    for part in range(count):
        rows = 100 + part
        x = random.normal(size=(rows, 8)).astype("f4")
        with h5py.File(folder / f"part-{part}.h5", "w") as file:
            file["x"], file["y"] = x, np.arange(rows) + 1000 * part
            file.create_dataset("packed", data=x.astype("f8"), chunks=(16, 8), compression="gzip", shuffle=True)
            file.create_dataset("tiles", data=x, chunks=(16, 3))
            file.create_dataset("plain", data=x, chunks=(16, 8))
            file["vocabulary"] = np.arange(5)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed")
    write_parts(folder)
    return folder


@pytest.fixture
def parts(made, tmp_path):
    for path in made.iterdir():
        shutil.copy2(path, tmp_path)
    return tmp_path


def batches(path, **settings):
    with H5ChunkSequence(path, **{"batch_size": 32, "memory_budget": "1MiB", **settings}) as sequence:
        return list(sequence.next_epoch())


def equal(one, other):
    for mine, theirs in zip(one, other, strict=True):
        for array, wanted in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("name", ["x", "packed", "tiles", "plain"])
def test_index_opens_only_the_files_in_use(parts, name):
    done = kerasmem.data.index(parts / "part-*.h5", parts / "train.index")
    assert (done.files, done.rows) == (3, 303)
    assert set(done.datasets) == {"x", "y", "packed", "tiles", "plain"}, "of as many rows as the largest"
    equal(batches(parts / "train.index", x=name), batches(parts / "part-*.h5", x=name))
    with H5ChunkSequence(parts / "train.index", x=name, rows=(100, 201)) as sequence:
        (parts / "part-0.h5").unlink()
        (parts / "part-2.h5").unlink()
        assert sum(len(y) for _, y in pickle.loads(pickle.dumps(sequence)).next_epoch()) == 101
        assert sorted(number for _, y in sequence.next_epoch() for number in y) == list(range(1000, 1101))


def test_changed_file_is_named(parts):
    kerasmem.data.index(parts / "part-*.h5", parts / "train.index")
    os.utime(parts / "part-2.h5")
    with pytest.raises(DataError, match=r"part-2\.h5.*changed after its index"):
        batches(parts / "train.index")
    assert batches(parts / "train.index", rows=(0, 201)), "the other files are as they were"
    with h5py.File(parts / "part-2.h5", "a") as file:
        file["more"] = np.zeros(1000)
    with pytest.raises(DataError, match=r"part-2\.h5.*changed after its index"):
        batches(parts / "train.index")


def test_index_of_virtual_datasets(parts):
    for part in range(3):
        with h5py.File(parts / f"part-{part}.h5", "a") as file:
            source = h5py.VirtualSource(file["x"])
            layout = h5py.VirtualLayout(file["x"].shape, "f4")
            layout[:, :4], layout[:, 4:] = source[:, 4:], source[:, :4]
            file.create_virtual_dataset("swapped", layout)
    done = kerasmem.data.index(parts / "part-*.h5", parts / "train.index", datasets=["swapped", "y"], trust_file=True)
    assert done.datasets == ("swapped", "y")
    trusted = {"x": "swapped", "trust_file": True}
    equal(batches(parts / "train.index", **trusted), batches(parts / "part-*.h5", **trusted))


def test_refusals(parts):
    with pytest.raises(UsageError, match=r"output must end with '\.index'"):
        kerasmem.data.index(parts / "part-*.h5", parts / "train.h5")
    with h5py.File(parts / "part-9.h5", "w") as file:
        file["x"], file["y"] = np.zeros((10, 9), "f4"), np.zeros(10)
    with pytest.raises(DataError, match=r"part-9\.h5.*must have the row shape .*got \(9,\)"):
        kerasmem.data.index(parts / "part-*.h5", parts / "train.index", datasets=["x", "y"])
    assert not list(parts.glob("train.index*")), "nothing half done is left"
    (parts / "part-9.h5").unlink()
    kerasmem.data.index(parts / "part-*.h5", parts / "train.index", datasets=["x", "y"])
    with pytest.raises(DataError, match="no dataset 'packed'; it has 'x', 'y'"):
        H5ChunkSequence(parts / "train.index", x="packed")


def test_the_command(parts, cli):
    done = cli("data", "index", f"{parts}/part-*.h5", "-o", f"{parts}/t.index", "--json")
    assert (done.code, json.loads(done.out)["rows"]) == (0, 303), done.err
    assert "303 rows of 3 files" in cli("data", "index", f"{parts}/part-*.h5", "-o", f"{parts}/t.index").out
    done = cli("data", "index", f"{parts}/none-*.h5", "-o", f"{parts}/t.index")
    assert done.code == 2
    assert "no file matches" in done.err


def test_damaged_index_takes_little_memory(parts):
    path = parts / "train.index"
    kerasmem.data.index(parts / "part-*.h5", path)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    cases = [b"", b"PK", whole[:-30], whole[:500], whole[:300] + whole[320:], b"[" * 10**6]
    for _ in range(60):
        damaged = bytearray(whole)
        for at in random.integers(0, len(whole), 3):
            damaged[at] = random.integers(0, 256)
        cases.append(bytes(damaged))
    tracemalloc.start()
    for case in cases:
        path.write_bytes(case)
        try:
            found = batches(path, x="packed", rows=(0, 101))
        except (DataError, UsageError):
            continue
        assert sum(len(x) for x, _ in found) == 101
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def craft(path, *, name="part-0.h5", rows=100, **storage):
    """Write a forged index."""
    dataset = DatasetLayout(**{"name": "x", "shape": (rows, 8), "dtype": "<f4", "storage": "contiguous", **storage})
    write_index(str(path), [FileLayout("NAME", (path.parent / "part-0.h5").stat().st_size, (dataset,))])
    content = json.loads(path.read_text())
    content["files"][0][0] = name
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 1 << 40}, "are allowed"),
        ({"rows": 1 << 20}, "has changed since"),
        ({"rows": 0}, r"the shape \(0, 8\)"),
        ({"shape": ()}, r"the shape \(\)"),
        ({"dtype": "<f8"}, "has changed since"),
        ({"dtype": "O"}, "the type object"),
        ({"storage": "chunked", "chunks": (0, 8)}, "and chunks of"),
        ({"storage": "chunked", "chunks": (1 << 60, 1 << 60)}, "and chunks of"),
        ({"storage": "chunked", "chunks": (1 << 30, 1 << 30)}, "too small"),
        ({"storage": "chunked", "chunks": (16, 8)}, "has changed since"),
        ({"name": "/dev/zero"}, "not a file"),
        ({"name": ""}, "not a file"),
    ],
)
def test_forged_index_is_refused(parts, changes, words):
    with pytest.raises((DataError, UsageError), match=words):
        batches(craft(parts / "bad.index", **changes), y=None, shuffle=False)


def test_remote_index_is_limited_to_its_server(parts):
    for name, words in (("http://example.org/a.h5", "same server"), ("/etc/passwd", "does not exist")):
        server = FileServer({"bad.index": craft(parts / "bad.index", name=name).read_bytes()})
        with pytest.raises(DataError, match=words):
            batches(server.url("bad.index"), y=None, shuffle=False)
        server.close()
