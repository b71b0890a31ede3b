"""Files written by other programs, if installed, and layouts that they use."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError
from kerasmem.hdf5.rows.sources import ChunkedSource, Hdf5Source

ROWS = 300
X = np.random.default_rng(0).random((ROWS, 6)).astype("f4")


def check(path, x, y, wanted=X, **settings):
    """Check that each row is delivered once and unchanged. The targets are the row numbers."""
    for shuffle in (True, False):
        with H5ChunkSequence(path, x, y, batch_size=64, shuffle=shuffle, **settings) as stream:
            seen = []
            for features, rows in stream:
                rows = np.asarray(rows).reshape(-1).astype(int)
                assert np.array_equal(features, wanted[rows].astype("f4"))
                seen += rows.tolist()
            assert sorted(seen) == list(range(ROWS))


# ---- programs


@pytest.mark.parametrize("complib", ["zlib", "blosc", "bzip2"])
def test_pytables(tmp_path, complib):
    tables = pytest.importorskip("tables")
    if tables.which_lib_version(complib) is None:
        pytest.skip(f"this PyTables has no {complib}")
    path = tmp_path / "tables.h5"
    with tables.open_file(str(path), "w", filters=tables.Filters(5, complib, fletcher32=complib == "zlib")) as file:
        file.create_carray("/", "x", obj=X, chunkshape=(32, 6))
        grown = file.create_earray("/", "y", tables.Int64Atom(), (0,))
        for start in range(0, ROWS, 50):
            grown.append(np.arange(start, start + 50))
    check(path, "x", "y")


def test_pandas(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("tables")
    path = tmp_path / "pandas.h5"
    frame = pandas.DataFrame(X, columns=list("abcdef"))
    frame.to_hdf(path, key="fixed", mode="w", format="fixed", complevel=4, complib="zlib")
    frame.to_hdf(path, key="table", mode="a", format="table")
    check(path, "fixed/block0_values", "fixed/axis1")
    with pytest.raises(DataError, match=r"'table/table' is a table with the columns 'index', 'values_block_0'"):
        H5ChunkSequence(path, "table/table", None)
    with pytest.raises(DataError, match=r"'fixed' is a group or a type.*It holds: .*'fixed/block0_values'"):
        H5ChunkSequence(path, "fixed", None)


@pytest.mark.parametrize("compressed", [True, False])
def test_matlab(tmp_path, compressed):
    """MATLAB 7.3 writes a user block of 512 bytes, transposed arrays and class attributes."""
    path = tmp_path / "matlab.mat"
    options = {"chunks": (25, 6), "compression": "gzip", "compression_opts": 3} if compressed else {}
    with h5py.File(path, "w", userblock_size=512, libver="earliest") as file:
        file.create_dataset("X", data=X.astype("f8"), **options).attrs["MATLAB_class"] = np.bytes_("double")
        n = file.create_dataset("train/n", data=np.arange(ROWS, dtype="f8").reshape(ROWS, 1))
        n.attrs["MATLAB_class"] = np.bytes_("double")
        flag = file.create_dataset("flag", data=np.ones((ROWS, 1), "u1"))
        flag.attrs["MATLAB_class"], flag.attrs["MATLAB_int_decode"] = np.bytes_("logical"), 1
    with open(path, "r+b") as file:
        head = b"MATLAB 7.3 MAT-file, Platform: GLNXA64, HDF5 schema 1.00 ."
        file.write(head.ljust(116) + bytes(8) + b"\x00\x02IM")
    check(path, "X", "train/n", X.astype("f8"))
    assert H5ChunkSequence(path, "flag", None, shuffle=False)[0][0].dtype == np.float32


@pytest.mark.optional
def test_anndata(tmp_path):
    anndata = pytest.importorskip("anndata")
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "cells.h5ad"
    kinds = np.array(["b", "t"])[np.arange(ROWS) % 2]
    obs = pandas.DataFrame(
        {"n": np.arange(ROWS), "kind": pandas.Categorical(kinds)}, index=[f"c{i}" for i in range(ROWS)]
    )
    data = anndata.AnnData(X, obs=obs)
    data.obsm["pca"] = X[:, :2].astype("f8")
    data.write_h5ad(path, compression="gzip")
    check(path, "X", "obs/n")
    check(path, "obsm/pca", "obs/n", X[:, :2])
    with H5ChunkSequence(path, "X", "obs/kind/codes", shuffle=False, batch_size=ROWS) as stream:
        assert np.array_equal(stream[0][1], np.arange(ROWS) % 2)


def test_netcdf(tmp_path):
    """netCDF-4 attaches dimension scales to the axes of variables."""
    path = tmp_path / "field.nc"
    with h5py.File(path, "w", libver="latest", track_order=True) as file:
        for name, size in {"time": ROWS, "column": 6}.items():
            file[name] = np.arange(size)
            file[name].make_scale(name)
        file.create_dataset("field", data=X, chunks=(50, 6), compression="gzip", shuffle=True, fillvalue=9.97e36)
        for axis, name in enumerate(("time", "column")):
            file["field"].dims[axis].attach_scale(file[name])
        file["field"].attrs["_Netcdf4Dimid"] = 0
        file["row"] = np.arange(ROWS)
    check(path, "field", "row")


# ---- layouts


@pytest.mark.parametrize("chunks", [(300, 1), (300, 4), (64, 1), (1, 4), (7, 5)])
def test_chunks_of_parts_of_rows_are_read_once(tmp_path, chunks):
    path = tmp_path / "columns.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=chunks, compression="gzip")
        file["y"] = np.arange(ROWS)
        stored = file["x"].id.get_storage_size() + file["y"].id.get_storage_size()
    check(path, "x", "y", memory_budget="60kB")
    with H5ChunkSequence(path, batch_size=16, memory_budget="60kB") as stream:
        assert sum(len(y) for _, y in stream.next_epoch()) == ROWS
        assert stream.read_bytes <= 1.05 * stored
        assert isinstance(stream.open_stream().reader.files._files[0].source("x"), ChunkedSource)


def test_appended_rows_are_ignored(tmp_path):
    path = tmp_path / "growing.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", data=X[:192], maxshape=(None, 6), chunks=(16, 6), compression="gzip")
        file.create_dataset("y", data=np.arange(192), maxshape=(None,), chunks=(64,))
    with H5ChunkSequence(path, batch_size=32, memory_budget="12kB") as stream:
        with h5py.File(path, "r+", libver="latest") as file:
            file["x"].resize(200, 0)
            file["y"].resize(200, 0)
            file["x"][192:], file["y"][192:] = X[192:200], np.arange(192, 200)
        assert sorted(row for _, y in stream for row in y) == list(range(192))
        with open(path, "ab") as file:
            file.write(b"more")
        with pytest.raises(DataError, match="written to while in use; make the sequence again"):
            list(stream)
    assert H5ChunkSequence(path).num_rows == 200


# ---- locks


def test_locked_file(tmp_path):
    """As on NFS with stale locks. The message names a fix, and it works."""
    path = tmp_path / "held.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = X, np.arange(ROWS)
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout.readline()
            with pytest.raises(DataError, match=r"held.h5'?: the file is locked.*HDF5_USE_FILE_LOCKING=FALSE"):
                H5ChunkSequence(path)
        finally:
            holder.communicate(b"\n", timeout=10)
    check(path, "x", "y")


def test_compact_dataset_is_read_through_hdf5(tmp_path):
    path = tmp_path / "compact.h5"
    with h5py.File(path, "w") as file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(X.shape), creation)
        file["x"][:] = X
        file["y"] = np.arange(ROWS)
    check(path, "x", "y")
    with H5ChunkSequence(path) as stream:
        stream[0]
        assert isinstance(stream.open_stream().reader.files._files[0].source("x"), Hdf5Source)


@pytest.mark.parametrize("kind", ["gzip", "checksum", "shuffle"])
def test_unfiltered_edge_chunks(tmp_path, kind):
    """HDF5 writes them after H5Pset_chunk_opts, a function that h5py lacks."""
    libraries = list(Path(h5py.__file__).parent.parent.glob("h5py.libs/libhdf5-*.so*"))
    if not libraries:
        pytest.skip("this h5py has no HDF5 of its own")
    library = ctypes.CDLL(str(libraries[0]))
    library.H5Pset_chunk_opts.argtypes = (ctypes.c_int64, ctypes.c_uint)
    path, values = tmp_path / "edges.h5", X.round(1)
    with h5py.File(path, "w", libver="latest") as file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((64, 4))
        add = {"gzip": lambda: creation.set_deflate(4), "checksum": creation.set_fletcher32,
               "shuffle": creation.set_shuffle}  # fmt: skip
        add[kind]()
        library.H5Pset_chunk_opts(creation.id, 2)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(X.shape), creation)
        file["x"][:], file["y"] = values, np.arange(ROWS)
    if kind == "shuffle":  # nothing in the file shows it
        with pytest.raises(DataError, match="only HDF5 can read"):
            check(path, "x", "y", values)
    check(path, "x", "y", values, trust_file=True)
