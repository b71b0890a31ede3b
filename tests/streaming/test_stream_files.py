"""Several files as one data set: every row once, the same batches, and errors that name the file."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.rows import open_files

LENGTHS = (37, 5, 64, 1, 50)
STORAGE = (
    {"chunks": (8, 3), "compression": "gzip"},
    {},
    {"chunks": (5, 3), "shuffle": True, "compression": "lzf"},
    {"chunks": (1, 2)},
    {"chunks": (9, 2), "fletcher32": True},
)


@pytest.fixture
def parts(tmp_path):
    """Write files part-1 to part-11 with consecutive row numbers and different storage."""
    folder = tmp_path / "parts"
    folder.mkdir()
    paths, first = [], 0
    for number, (rows, options) in enumerate(zip(LENGTHS, STORAGE, strict=True)):
        path = folder / f"part-{number * 3 - 1 if number else 1}.h5"  # 1, 2, 5, 8, 11
        with h5py.File(path, "w") as file:
            numbers = np.arange(first, first + rows)
            x = np.repeat(numbers[:, None], 3, axis=1).astype("f4")
            file.create_dataset("x", data=x, **options)
            file["y"] = numbers
        paths.append(path)
        first += rows
    return paths


TOTAL = sum(LENGTHS)


def rows_of_epoch(stream):
    delivered = []
    for x, y in stream:
        assert np.array_equal(x, np.repeat(np.asarray(y)[:, None], 3, axis=1)), "features and targets of one row"
        delivered += np.asarray(y).tolist()
    return delivered


@pytest.mark.parametrize("budget", [None, "4kB"])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_row_of_all_files_once(parts, budget, workers):
    with H5ChunkSequence(parts, batch_size=16, memory_budget=budget, workers=workers) as stream:
        assert stream.num_rows == TOTAL
        assert len(stream) == -(-TOTAL // 16)
        rows = rows_of_epoch(stream)
        assert sorted(rows) == list(range(TOTAL))
        assert rows != sorted(rows)
        assert stream.batch_rows(1, 0).tolist() == rows[16:32], "row numbers go through all files"
        if budget is None:
            first = {int(np.searchsorted(np.cumsum(LENGTHS), row, side="right")) for row in rows[:32]}
            assert len(first) >= 3, "a batch mixes the files"
    with H5ChunkSequence(parts, batch_size=16, shuffle=False, memory_budget=budget) as stream:
        assert rows_of_epoch(stream) == list(range(TOTAL))


def test_a_pattern_sorts_names_as_people_count(parts):
    pattern = str(parts[0].parent / "part-*.h5")
    stream = H5ChunkSequence(pattern, shuffle=False)
    assert [os.path.basename(path) for path in stream.paths] == [path.name for path in parts]
    assert rows_of_epoch(stream) == list(range(TOTAL))
    assert stream.paths[0] == str(parts[0])
    assert "part-1.h5' and 4 more files: 157 rows" in repr(stream)
    assert "and 4 more files: 157 rows" in stream.describe()
    assert rows_of_epoch(H5ChunkSequence(str(parts[0].parent.parent / "**" / "*.h5"), shuffle=False))
    stream.close()


def test_a_file_whose_name_looks_like_a_pattern(numbered, tmp_path):
    path = numbered(name="a[1].h5")
    numbered(name="a1.h5", rows=7)
    assert H5ChunkSequence(path).num_rows == 100


def test_lists_that_are_refused(parts, tmp_path):
    with pytest.raises(DataError, match=r"none-\*.h5'?: no file matches this pattern; pass"):
        H5ChunkSequence(tmp_path / "none-*.h5")
    with pytest.raises(UsageError, match="list of files is empty"):
        H5ChunkSequence([])
    with pytest.raises(UsageError, match=r"part-2.h5' is named more than once"):
        H5ChunkSequence([*parts, parts[0].parent / "." / "part-2.h5"])
    with pytest.raises(UsageError, match="a pattern or a list of paths; got int"):
        H5ChunkSequence([parts[0], 3])
    with pytest.raises(DataError, match=r"gone.h5'?: the file does not exist"):
        H5ChunkSequence([*parts, tmp_path / "gone.h5"])


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.zeros((9, 4), "f4"), "y": np.zeros(9, int)}, r"must have the row shape \(3,\), as in .*; got \(4,\)"),
        ({"x": np.zeros((9, 3), "f8"), "y": np.zeros(9, int)}, r"must have the type <f4, as in .*; got <f8"),
        ({"x": np.zeros((9, 3), "f4")}, "has no dataset 'y'"),
        ({"x": np.zeros((9, 3), "f4"), "y": np.zeros(8, int)}, "'x' has 9, 'y' has 8"),
        ({"x": np.zeros((0, 3), "f4"), "y": np.zeros(0, int)}, "is empty"),
    ],
)
def test_files_that_do_not_agree_are_named(parts, write, arrays, text):
    odd = write(name="odd.h5", **arrays)
    with pytest.raises(DataError, match=text) as caught:
        H5ChunkSequence([*parts, odd])
    assert "odd.h5" in str(caught.value)


def test_rows_and_shards_go_through_all_files(parts):
    picked = np.r_[3:40, 60:62, 106, 107, 150:157]
    assert sorted(rows_of_epoch(H5ChunkSequence(parts, rows=picked, batch_size=7))) == picked.tolist()
    for shuffle in (True, False):
        seen, steps = [], set()
        for index in range(3):
            stream = H5ChunkSequence(parts, shard=(index, 3), batch_size=8, shuffle=shuffle, memory_budget="4kB")
            seen += rows_of_epoch(stream)
            steps.add(len(stream))
            stream.close()
        assert sorted(seen) == list(range(TOTAL))
        assert len(steps) == 1


def test_more_files_than_may_be_open(tmp_path, monkeypatch, write):
    monkeypatch.setattr(open_files, "most_open", lambda: 3)
    paths = [
        write(name=f"{number}.h5", x=np.full((10, 3), number, "f4"), y=np.arange(10) + 10 * number, chunks=5)
        for number in range(12)
    ]
    for workers in (1, 4):
        with H5ChunkSequence(paths, batch_size=8, memory_budget="3kB", workers=workers) as stream:
            for _ in range(3):
                assert sorted(row for _, y in stream.next_epoch() for row in y.tolist()) == list(range(120))
                links = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
                assert 0 < sum(link.startswith(str(tmp_path)) for link in links) <= 2 * 3  # HDF5's and one beside it


def test_a_thread_that_waits_for_a_file_is_refused_after_close(parts, monkeypatch):
    monkeypatch.setattr(open_files, "most_open", lambda: 1)
    files = H5ChunkSequence(parts).open_stream().reader.files

    def read():
        with files.use(files[1]):
            pass

    with ThreadPoolExecutor(2) as pool:
        with files.use(files[0]):
            waits = pool.submit(read)
            while not files._free._waiters:
                time.sleep(0.001)
            closes = pool.submit(files.close)
            while not files._closed:
                time.sleep(0.001)
        with pytest.raises(UsageError, match="was closed"):
            waits.result(20)
        closes.result(20)


def test_a_state_belongs_to_files_of_the_same_names_in_any_folder(parts, tmp_path):
    def make(paths):
        return H5ChunkSequence(paths, batch_size=16, memory_budget="4kB")

    with make(parts) as stream:
        state = stream.state_dict(epoch=0, batch=4)
        expected = [y.tolist() for _, y in stream.next_epoch()][4:]
    assert len(json.dumps(state)) < 1000
    shutil.copytree(parts[0].parent, tmp_path / "moved")
    with make([tmp_path / "moved" / path.name for path in parts]) as stream:
        stream.load_state_dict(json.loads(json.dumps(state)))
        assert [y.tolist() for _, y in stream.next_epoch()] == expected
    renamed = shutil.copy(parts[1], parts[1].with_name("other.h5"))
    for other in (parts[::-1], parts[:-1], parts[0], [parts[0], renamed, *parts[2:]]):
        with pytest.raises(UsageError, match="files"):
            make(other).load_state_dict(state)


def test_damage_names_the_file_and_both_row_numbers(parts):
    with h5py.File(parts[2]) as file:
        chunk = file["x"].id.get_chunk_info_by_coord((10, 0))
    with open(parts[2], "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(os.urandom(chunk.size))
    with pytest.raises(DataError) as caught:
        rows_of_epoch(H5ChunkSequence(parts, shuffle=False, memory_budget="4kB", batch_size=4))
    text = str(caught.value)
    assert "part-5.h5" in text
    assert "rows 10 to 15 of dataset 'x' (rows 52 to 57 of all files) cannot be read" in text
    rest = np.r_[0:52, 57:TOTAL]
    assert sorted(rows_of_epoch(H5ChunkSequence(parts, rows=rest))) == rest.tolist(), "as the message says"
