"""Reading without the HDF5 library, compared with h5py, and damaged files."""

from __future__ import annotations

import os
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError
from kerasmem.hdf5.rows.sources import Hdf5Source
from kerasmem.units import MIB

DTYPES = ["<f4", ">f4", "<f8", "<f2", "|u1", "|i1", ">u2", "<i4", ">i8", "|b1"]
SHAPES = [(), (1,), (5,), (600,), (3, 4), (7, 2, 3), (40, 40)]


def codecs():
    """Return filters by name, including those of `kerasmem[codecs]` if installed."""
    found = {
        "none": {},
        "gzip": {"compression": "gzip", "compression_opts": 1},
        "gzip+shuffle": {"compression": "gzip", "shuffle": True},
        "gzip+shuffle+fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
        "shuffle": {"shuffle": True},
        "fletcher32": {"fletcher32": True},
        "lzf": {"compression": "lzf"},
        "lzf+shuffle+fletcher32": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    }
    try:
        import hdf5plugin as plugin
    except ImportError:
        return found
    return found | {
        "blosc-zstd": dict(plugin.Blosc(cname="zstd")),
        "blosc-bits": dict(plugin.Blosc(cname="lz4", shuffle=plugin.Blosc.BITSHUFFLE)),
        "zstd": dict(plugin.Zstd()),
        "zstd+shuffle": {"shuffle": True, **plugin.Zstd()},
    }


@st.composite
def datasets(draw):
    """Rows of any shape and type, and how to store them."""
    rows, shape, dtype = draw(st.integers(1, 120)), draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    storage = draw(st.sampled_from(sorted(codecs())))
    options = dict(codecs()[storage])
    if storage != "none" or draw(st.booleans()):
        options["chunks"] = (draw(st.integers(1, rows)), *(draw(st.integers(1, size)) for size in shape))
        options["maxshape"] = draw(st.sampled_from([None, (None, *shape)]))
    values = np.random.default_rng(rows).random((rows, *shape))
    return (values > 0.5 if dtype == "|b1" else values * 100).astype(dtype), options


def some_rows(rows):
    pairs = st.tuples(st.integers(0, rows - 1), st.integers(1, rows)).filter(lambda pair: pair[0] < pair[1])
    runs = pairs.map(lambda pair: list(range(*pair)))
    return st.none() | runs | st.sets(st.integers(0, rows - 1), min_size=1).map(sorted)


@settings(max_examples=50)
@given(datasets(), st.data())
def test_any_dataset_is_read_unchanged(tmp_path_factory, dataset, data):
    x, options = dataset
    path = tmp_path_factory.getbasetemp() / "any kind.h5"
    user_block, version = data.draw(st.sampled_from([0, 512])), data.draw(st.sampled_from(["earliest", "latest"]))
    with h5py.File(path, "w", userblock_size=user_block, libver=version) as file:
        file.create_dataset("x", data=x, **options)
        file["n"] = np.arange(len(x))
    out = data.draw(st.sampled_from(["float32", "float64", "stored"]))
    scale = None if out == "stored" else data.draw(st.sampled_from([None, (0.37, 0.0), (1 / 3, -2.0)]))
    chosen = data.draw(some_rows(len(x)))
    more = {
        "rows": chosen, "scale": scale, "dtype": out, "batch_size": data.draw(st.integers(1, 40)),
        "shuffle": data.draw(st.booleans()),
        "memory_budget": data.draw(st.sampled_from([64 * MIB, 400_000 + 120 * x.size])),
    }  # fmt: skip
    wanted = x if scale is None else x.astype("f8") * scale[0] + scale[1]
    with H5ChunkSequence(path, "x", "n", **more) as stream:
        delivered = []
        for features, n in stream:
            assert np.array_equal(features, wanted[n].astype(features.dtype))
            delivered += n.tolist()
        assert sorted(delivered) == (list(range(len(x))) if chosen is None else chosen)
        assert not isinstance(stream.open_stream().reader.files._files[0].source("x"), Hdf5Source)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True}])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("chunks", [100, None])
def test_each_byte_is_read_once_per_epoch(write, options, shuffle, chunks):
    if options and chunks is None:
        pytest.skip("filters need chunks")
    x = np.random.default_rng(0).integers(0, 50, (4000, 300)).astype("f4")
    path = write(x=x, y=np.arange(4000), chunks=chunks, options={"x": options})
    stored = os.path.getsize(path)
    stream = H5ChunkSequence(path, batch_size=32, memory_budget="2MB", shuffle=shuffle)
    assert stream.stream_plan.memory.windows == 2
    for epoch in range(3):
        stream.set_epoch(epoch)
        for _ in stream:
            pass
        assert stream.read_bytes <= 1.05 * stored * (epoch + 1)
    stream.close()


def test_skipped_filters(tmp_path):
    """HDF5 skips an optional filter that fails, and writers may skip any filter."""
    path = tmp_path / "masks.h5"
    x = np.arange(400, dtype="<i4").reshape(40, 10)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", x.shape, "<i4", chunks=(10, 10), compression="gzip", shuffle=True)
        for start in range(0, 40, 10):
            piece = x[start : start + 10]
            shuffled = piece.view("u1").reshape(-1, 4).T.tobytes()
            stored = [
                (zlib.compress(shuffled), 0b00),
                (zlib.compress(piece.tobytes()), 0b01),
                (shuffled, 0b10),
                (piece.tobytes(), 0b11),
            ][start // 10]
            dataset.id.write_direct_chunk((start, 0), stored[0], stored[1])
        assert np.array_equal(dataset[:], x)
    assert np.array_equal(H5ChunkSequence(path, y=None, shuffle=False, batch_size=40, dtype="stored")[0][0], x)


def test_types_that_numpy_lacks_are_read_through_hdf5(tmp_path):
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_precision(12)
        odd.set_offset(4)
        space = h5py.h5s.create_simple((20, 3))
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", odd, space))
        dataset[:] = np.arange(60).reshape(20, 3) - 30
        file["nbit"] = np.zeros(1)
    stream = H5ChunkSequence(tmp_path / "odd.h5", y=None, shuffle=False, batch_size=20)
    assert np.array_equal(stream[0][0], np.arange(60).reshape(20, 3) - 30)
    assert isinstance(stream.open_stream().reader.files._files[0].source("x"), Hdf5Source)
    stream.close()


def test_fill_values_of_unwritten_chunks(tmp_path):
    path = tmp_path / "holes.h5"
    with h5py.File(path, "w") as file:
        for name, dtype, fill in (("x", ">i4", 7), ("z", "<f4", np.nan)):
            dataset = file.create_dataset(name, (60, 30), dtype, chunks=(7, 20), fillvalue=fill, compression="gzip")
            dataset[20:31, 5:10] = 3
        wanted = file["x"][:], file["z"][:]
    for shuffle in (False, True):
        settings = {"shuffle": shuffle, "batch_size": 60, "scale": {"x": (0.5, 1)}, "trust_file": True}
        stream = H5ChunkSequence(path, ["x", "z"], None, **settings)
        x, z = stream[0][0]
        rows = stream.batch_rows(0)
        assert np.array_equal(x, wanted[0][rows] * 0.5 + 1)
        assert np.array_equal(z, wanted[1][rows], equal_nan=True)


# ---- damage


def test_chunk_that_decompresses_to_another_size_is_refused(tmp_path):
    path = tmp_path / "bomb.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (40, 10), "f4", chunks=(10, 10), compression="gzip")
        dataset[:] = 1
        dataset.id.write_direct_chunk((20, 0), zlib.compress(bytes(1 << 26), 9))
        dataset.id.write_direct_chunk((10, 0), zlib.compress(bytes(100), 9))
    stream = H5ChunkSequence(path, y=None, shuffle=False, rows=(20, 30))
    with pytest.raises(DataError, match="rows 20 to 30 of dataset 'x' cannot be read"):
        stream[0]
    stream = H5ChunkSequence(path, y=None, shuffle=False, rows=(10, 20))
    with pytest.raises(DataError, match="rows 10 to 20 of dataset 'x' cannot be read"):
        stream[0]
    assert H5ChunkSequence(path, y=None, shuffle=False, rows=[0, 5, 30])[0][0].min() == 1


def replace_file(path, other):
    os.replace(other, path)


def overwrite_file(path, other):
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("change", [replace_file, overwrite_file])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
@pytest.mark.parametrize("alike", [True, False])
def test_replaced_or_overwritten_file_is_refused(write, change, options, alike):
    rows = 20_000
    old = np.random.default_rng(1).integers(0, 9, (rows, 50)).astype("f4")
    path = write(x=old, y=np.arange(rows), chunks=50, options={"x": options})
    more = {} if alike else {"a": np.ones((77, 5))}
    other = write(name="other.h5", **more, x=old[::-1] + 1, y=np.arange(rows), chunks=50, options={"x": options})
    stream = H5ChunkSequence(path, batch_size=100, shuffle=False, memory_budget="1MB")
    batches = iter(stream)
    assert np.array_equal(next(batches)[0], old[:100])
    change(path, other)
    with pytest.raises(DataError, match=r"file was (replaced by another|rewritten|cut|written to) while in use"):
        for features, n in batches:
            assert np.array_equal(features, old[n]), "what comes before the error is right"
    with pytest.raises(DataError, match="while in use"):
        list(stream)
    stream.close()
