"""Datasets that lie beside one another in different files."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from streams import RowModel

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, UsageError

ROWS = 200


@pytest.fixture
def files(tmp_path):
    def files(part="", rows=ROWS, labels=None, first=0, **options):
        numbers = np.arange(first, first + rows)
        x, y = tmp_path / f"x{part}.h5", tmp_path / f"y{part}.h5"
        with h5py.File(x, "w") as file:
            file.create_dataset("images", data=np.repeat(numbers[:, None], 3, 1).astype("f4"), **options)
        with h5py.File(y, "w") as file:
            file["labels"] = np.arange(first, first + (rows if labels is None else labels))
        return {"images": x, "/labels": y}

    return files


def stream(path, **settings):
    return H5ChunkSequence(path, "images", "labels", **{"batch_size": 8, "memory_budget": "4kB", **settings})


@pytest.mark.parametrize("options", [{}, {"chunks": (8, 3)}, {"chunks": (8, 3), "compression": "gzip"}])
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_of_both_files_come_together(files, options, workers):
    with stream(files(**options), workers=workers) as data:
        for _ in range(2):
            seen = list(data)
            assert all(np.array_equal(x[:, 0], y) for x, y in seen)
            assert sorted(row for _, y in seen for row in y.tolist()) == list(range(ROWS))
        assert [len(data.paths), data.num_rows] == [2, ROWS]
        model = RowModel()
        model.fit(data, epochs=1, verbose=0)
        assert sorted(model.trained) == list(range(ROWS))


def test_several_pairs_are_counted_through(files):
    pairs = [files(0, rows=120), files(1, rows=80, first=120)]
    path = {name: [pair[name] for pair in pairs] for name in pairs[0]}
    with stream(path, shuffle=False) as data:
        assert [row for _, y in data for row in y.tolist()] == list(range(ROWS))


def test_the_order_is_that_of_one_file(files, write):
    numbers = np.arange(ROWS)
    one = write(images=np.repeat(numbers[:, None], 3, 1).astype("f4"), labels=numbers)
    joined, single = stream(files()), stream(one)
    assert [joined.batch_rows(place).tolist() for place in range(25)] == [
        single.batch_rows(place).tolist() for place in range(25)
    ]
    single.load_state_dict(joined.state_dict(epoch=1, batch=3))
    assert single.progress.position == (1, 3)


def test_labels_are_examined_in_their_file(files):
    assert stream(files()).quality().classes == ROWS
    assert "mixing" in stream(files()).describe("labels")


def test_refused(files):
    with pytest.raises(DataError, match=r"differ in their number of rows \(axis 0\): 'images' in .*x.h5' has 200, 'la"):
        stream(files(labels=199))
    with pytest.raises(UsageError, match="path: names no file for the dataset 'other'; it has files for 'images', 'la"):
        H5ChunkSequence(files(), "images", "other")
    path = files()
    with pytest.raises(UsageError, match="as many files as the others, and there are 1 for 'images', 2 for 'labels'"):
        stream({"images": path["images"], "labels": [path["/labels"], path["images"]]})


def test_a_file_that_has_gone_is_named(files):
    path = files()
    data = stream(path)
    path["/labels"].unlink()
    with pytest.raises(DataError, match=r"y.h5'?: there is no such file"):
        list(data)
