"""Content of batches: types, structures, rows, transforms."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, UsageError


def joined(sequence, part=0):
    return np.concatenate([batch[part] for batch in sequence])


@pytest.mark.parametrize("stored", ["|u1", ">u2", "<i8", "|i1", "|b1", "<f2", "<f4", "<f8", ">f8"])
def test_targets_of_integers_keep_their_type_and_all_else_becomes_float32(write, stored):
    values = (np.arange(20) % 2 / 3 if "f" in stored else np.arange(20) % 2).astype(stored)
    path = write(x=np.zeros((20, 2)), y=values, w=values, chunks=4)
    x, y, w = H5ChunkSequence(path, sample_weight="w", batch_size=20, shuffle=False)[0]
    kept = np.float32 if "f" in stored else np.dtype(stored).newbyteorder("=")
    assert [array.dtype for array in (x, y, w)] == [np.float32, kept, np.float32]
    assert np.array_equal(y, values.astype(kept))
    assert np.array_equal(w, values.astype("f4"))


ALL_BYTES = {stored: np.arange(256, dtype="u1").view(stored).tolist() for stored in ("|u1", "|i1")}
SCALES_OF_BYTES = [(1 / 255, 0), (2 / 255, -1), (1 / 58.4, -123.7 / 58.4), (0, 0), (0, 3), (-0.5, 0), (1e-45, 0)]


def test_scale_of_single_datasets(write):
    path = write(images=np.arange(60, dtype="u1").reshape(20, 3), y=np.arange(20))
    for scale, features, targets in ((0.5, 1.5, 3), ({"images": 0.5}, 1.5, 3), ({"y": 0.5}, 3, 1.5)):
        x, y = H5ChunkSequence(path, "images", shuffle=False, scale=scale)[0]
        assert (x[1, 0], y[3]) == (features, targets)
        assert (y.dtype == np.float32) == (targets == 1.5)


@pytest.mark.parametrize(
    ("stored", "values", "factor", "offset", "dtype"),
    [
        ("<i8", [1_700_000_001, 1_700_000_007], 1.0, -1_700_000_000.0, "float32"),
        ("<f8", [1_700_000_000.25, 1_700_000_001.5], 1.0, -1_700_000_000.0, "float32"),
        ("<u8", [2**40 + 1, 2**40 + 5], 1.0, -(2.0**40), "float32"),
        ("<u4", [2**32 - 1, 2**32 - 3], 1.0, -(2.0**32), "float32"),
        ("<f8", [1e300, 3e300], 1e-300, 0.0, "float32"),
        ("<f8", [1e-50, 2e-50], 1e50, 0.0, "float32"),
        ("<f4", [1e30, 2e30], 1e-60, 0.0, "float64"),
        ("<u2", [60_001, 60_007], 1.0, -60_000.0, "float16"),
        (">i2", [-32_001, 32_001], 1e-3, 0.5, "float16"),
        ("|b1", [0, 1], 0.1, 0.2, "float64"),
        *((stored, values, *scale, "float32") for stored, values in ALL_BYTES.items() for scale in SCALES_OF_BYTES),
    ],
)
@pytest.mark.parametrize("picked", [None, [0, 2, 3]])
def test_scaling_loses_nothing(write, stored, values, factor, offset, dtype, picked):
    stored_values = np.array(values * 2, stored)
    exact = (stored_values.astype("f8") * factor + offset).astype(dtype)
    path = write(x=np.repeat(stored_values[:, None], 3, 1))
    stream = H5ChunkSequence(
        path, y=None, shuffle=False, batch_size=512, rows=picked, scale=(factor, offset), dtype=dtype
    )
    (x,) = stream[0]
    assert x.dtype == dtype
    assert np.array_equal(x, np.repeat(exact[slice(None) if picked is None else picked][:, None], 3, 1))
    assert np.isfinite(x).all()


def test_arrays_as_elements(tmp_path):
    """PyTables writes such types for atoms with a shape."""
    x = np.arange(360.0).reshape(60, 3, 2)
    path = tmp_path / "atoms.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (60, 3), np.dtype((">f8", (2,))), chunks=(7, 3))[:] = x
        file["y"] = np.arange(60)
    for settings in ({}, {"dtype": "float64"}, {"scale": 2}, {"rows": [3, 5, 40]}):
        stream = H5ChunkSequence(path, batch_size=8, **settings)
        for features, rows in stream:
            assert features.shape[1:] == (3, 2)
            assert np.array_equal(features, x[rows] * settings.get("scale", 1))


def test_the_other_dtypes(write):
    tokens = np.arange(2**24, 2**24 + 20, dtype=">i4").reshape(10, 2)
    path = write(tokens=tokens, dense=np.ones((10, 2)), y=np.arange(10))
    x, _ = H5ChunkSequence(path, ["tokens", "dense"], dtype={"tokens": "stored"}, shuffle=False)[0]
    assert x[0].dtype == np.int32
    assert np.array_equal(x[0], tokens)
    assert x[1].dtype == np.float32
    assert H5ChunkSequence(path, "dense", dtype="float16")[0][0].dtype == np.float16
    assert H5ChunkSequence(path, "dense", dtype=np.float64)[0][0].dtype == np.float64
    with pytest.raises(UsageError, match="contradict"):
        H5ChunkSequence(path, "tokens", dtype="stored", scale=2)
    with pytest.raises(UsageError, match=r"dtype must be one of .*; got 'int8'"):
        H5ChunkSequence(path, dtype="int8")


def test_structures_and_nested_names(write):
    rows = np.arange(12)
    path = write(train__a=rows[:, None], train__b=-rows[:, None], y=rows, z=rows * 2.0, w=rows)
    a, b = "train/a", "/train/b"
    x, y = H5ChunkSequence(path, [a, b], {"one": "y", "two": "z"}, batch_size=12)[0]
    assert isinstance(x, tuple)
    assert isinstance(y, dict)
    assert np.array_equal(x[0], -x[1])
    assert np.array_equal(x[0][:, 0], y["one"])
    assert np.array_equal(y["one"] * 2, y["two"])
    (x,) = H5ChunkSequence(path, {"left": a, "right": b}, None)[0]
    assert list(x) == ["left", "right"]
    x, y, w = H5ChunkSequence(path, a, ("y", "z"), sample_weight=["w", "w"])[0]
    assert np.array_equal(w[0], w[1])
    assert w[0] is not w[1]


def test_one_dataset_as_features_and_targets(write):
    path = write(images=np.arange(24, dtype=np.uint8).reshape(8, 3))
    sequence = H5ChunkSequence(path, "images", "images", scale={"images": 0.5})
    x, y = sequence[0]
    assert np.array_equal(x, y)
    assert not np.shares_memory(x, y)
    x, y = H5ChunkSequence(path, "images", "images", scale=0.5)[0]
    assert (x.dtype, y.dtype) == (np.float32, np.uint8), "a plain scale is for features"


def test_last_batch_is_kept_or_dropped(numbered):
    path = numbered(rows=100)
    whole = H5ChunkSequence(path, batch_size=32)
    assert (len(whole), whole.num_batches) == (4, 4)
    assert [len(y) for _, y in whole] == [32, 32, 32, 4]
    cut = H5ChunkSequence(path, batch_size=32, remainder="drop")
    assert [len(y) for _, y in cut] == [32, 32, 32]
    left_out = {frozenset(range(100)) - frozenset(joined_epoch(cut, epoch)) for epoch in range(3)}
    assert len(left_out) == 3, "other rows are left out each epoch"
    with pytest.raises(UsageError, match="no full batch of 101 in 100 rows"):
        H5ChunkSequence(path, batch_size=101, remainder="drop")
    assert len(H5ChunkSequence(path, batch_size=101)) == 1


def joined_epoch(sequence, epoch):
    return np.concatenate([sequence.batch(i, epoch)[1] for i in range(len(sequence))]).tolist()


def test_file_order(numbered):
    sequence = H5ChunkSequence(numbered(rows=50), batch_size=8, shuffle=False, rows=[3, 5, 6, 40])
    assert joined(sequence, 1).tolist() == [3, 5, 6, 40]
    sequence = H5ChunkSequence(sequence.paths[0], batch_size=8, shuffle=False)
    assert sequence[2][1].tolist() == list(range(16, 24)), "an index is a place"
    assert sequence[2][1].tolist() == sequence.batch_rows(2).tolist()
    with pytest.raises(IndexError, match="there are 7 batches"):
        sequence[7]
    with pytest.raises(IndexError):
        sequence[-1]


@pytest.mark.parametrize("chunks", [None, 300])
@pytest.mark.parametrize("settings", [{}, {"rows": (77, 2500)}, {"scale": 0.5}, {"workers": 3}, {"remainder": "drop"}])
def test_large_batches_in_file_order_need_small_windows(write, chunks, settings):
    x = np.arange(3000 * 64, dtype="f4").reshape(3000, 64)
    path = write(x=x, y=np.arange(3000), chunks=chunks)
    stream = H5ChunkSequence(path, batch_size=1024, shuffle=False, memory_budget="2MiB", **settings)
    for epoch in range(2):
        stream.set_epoch(epoch)
        stream.on_epoch_begin()
        for place in range(len(stream)):
            features, rows = stream[place]
            assert rows.tolist() == stream.batch_rows(place).tolist()
            assert np.array_equal(features, x[rows] * settings.get("scale", 1))
    read = stream.open_stream().reader.rows_read
    assert 2 * stream.num_rows >= read >= 2 * (stream.num_rows // 1024 * 1024)
    stream.close()


def test_transform(numbered):
    path = numbered(rows=40)
    sequence = H5ChunkSequence(path, batch_size=8, shuffle=False, transform=lambda x, y: (x * 10, y + 1))
    x, y = sequence[1]
    assert np.array_equal(x[:, 0], np.arange(8, 16) * 10)
    assert np.array_equal(y, np.arange(9, 17))
    (x,) = H5ChunkSequence(path, y=None, batch_size=8, shuffle=False, transform=lambda x: x + 1)[0]
    assert x[0, 0] == 1


def fail(text):
    raise RuntimeError(text)


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (lambda x, y: x / None, r"batch 1 of epoch 0, raised TypeError: unsupported"),
        (lambda x, y: next(iter(())), "raised StopIteration"),
        (lambda x, y: {}["\x1b[2J\nb"], r"raised KeyError: '.x1b\[2J.nb'"),
        (lambda x, y: int("\x1b[2J"), r"raised ValueError: [^\x1b]+$"),
        (lambda x, y: fail("one\n\x1b[2J  two\u202e"), r"raised RuntimeError: one .x1b\[2J two.u202e$"),
        (lambda x, y: x, r"must return \(x, y\); got ndarray"),
        (lambda x, y: (x, y, y), "got 3 values"),
        (lambda x: x, "raised TypeError"),
    ],
)
def test_a_failing_transform_is_named(numbered, transform, text):
    sequence = H5ChunkSequence(numbered(rows=40), batch_size=8, shuffle=False, transform=transform)
    with pytest.raises(DataError, match=text) as caught:
        sequence[1]
    if "raised" in text:
        assert caught.value.__cause__ is not None
