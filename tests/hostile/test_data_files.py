"""HDF5 files from strangers: no other file is read, no memory leaks into the data, nothing hangs or crashes."""

from __future__ import annotations

import struct

import h5py
import numpy as np
import pytest

from kerasmem.hdf5.direct.codecs import SHUFFLE, DecodeError, Pipeline

BLOSC, LZ4, BITSHUFFLE, ZSTD = 32001, 32004, 32008, 32015


def forged(path, filters, chunk, shape=(1, 1 << 20), dtype="u1", mask=0):
    """Write a dataset of one chunk whose stored bytes are `chunk`."""
    pytest.importorskip("hdf5plugin")
    with h5py.File(path, "w") as file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk(shape)
        for code, numbers in filters:
            creation.set_filter(code, h5py.h5z.FLAG_OPTIONAL, numbers)
        space = h5py.h5s.create_simple(shape)
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.py_create(np.dtype(dtype)), space, creation)
        dataset.write_direct_chunk((0,) * len(shape), chunk, mask)
        file.create_dataset("y", data=np.zeros(shape[0], "i4"))
    return path


def blosc_header(total, stored, flags=0x02, typesize=1, block=None):
    """A Blosc 1 header; flag 2 says that the bytes after it are a plain copy."""
    return struct.pack("<BBBBiii", 2, 1, flags, typesize, total, block or total, stored)


BLOSC_CHUNKS = {
    "a plain copy longer than what is stored": blosc_header(1 << 20, (1 << 20) + 16) + b"x" * 4000,
    "compressed bytes longer than what is stored": blosc_header(1 << 20, 1 << 20, flags=0x01) + b"x" * 4000,
    "a negative size": blosc_header(1 << 20, -1) + b"x" * 4000,
    "block starts outside": blosc_header(1 << 20, 4016, 0x21, 1, 1 << 12) + b"\0\0\0\x40" * 256 + b"x" * 2976,
    "only a header": blosc_header(1 << 20, 16),
    "half a header": blosc_header(1 << 20, 16)[:9],
}  # fmt: skip


@pytest.mark.parametrize("name", BLOSC_CHUNKS)
def test_a_blosc_chunk_gives_no_foreign_memory(attack, tmp_path, name):
    path = forged(tmp_path / "blosc.h5", [(BLOSC, (2, 2, 1, 1 << 20, 5, 0, 0))], BLOSC_CHUNKS[name])
    done = attack("data", "convert", path, "-o", tmp_path / "out.h5")
    assert done.code == 2, done.text
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize("code", [LZ4, BITSHUFFLE, ZSTD])
@pytest.mark.parametrize("size", [7, 16, 4000])
def test_other_codecs_refuse_garbage(attack, tmp_path, code, size):
    chunk = np.random.default_rng(0).bytes(size)
    path = forged(tmp_path / "codec.h5", [(code, (0, 0, 1, 0, 2))], chunk)
    done = attack("data", "convert", path, "-o", tmp_path / "out.h5")
    assert done.code == 2 and not (tmp_path / "out.h5").exists(), done.text


@pytest.mark.parametrize("numbers", [(), (0,)])
def test_a_shuffle_without_an_element_size_is_left_to_hdf5(numbers):
    with pytest.raises(DecodeError, match="no size of an element"):
        Pipeline([(SHUFFLE, numbers)], 64)


def with_external(path, name, secret, dtype="S64", shape=(4,)):
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.zeros((8, 3), "f4"), np.arange(8) % 4
        file.create_dataset(name, shape, dtype, external=[(str(secret), 0, 256)])
    return path


def with_virtual(path, name, source, shape=(4,)):
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.zeros((8, 3), "f4"), np.arange(8) % 4
        layout = h5py.VirtualLayout(shape, "S64")
        layout[:] = h5py.VirtualSource(str(source), "secret", shape)
        file.create_virtual_dataset(name, layout)
    return path


@pytest.mark.parametrize("make", [with_external, with_virtual])
def test_class_names_come_from_no_other_file(attack, tmp_path, secret, make):
    if make is with_virtual:
        with h5py.File(tmp_path / "private" / "other.h5", "w") as file:
            file["secret"] = np.array([b"TOP-SECRET-"] * 4)
        secret = tmp_path / "private" / "other.h5"
    path = make(tmp_path / "data.h5", "y_class_names", secret)
    assert "TOP-SECRET" not in attack("data", "inspect", path, "--json").text
    done = attack("data", "convert", path, "-o", tmp_path / "out.h5", "--json")
    assert "TOP-SECRET" not in done.text
    if (tmp_path / "out.h5").exists():
        assert b"TOP-SECRET" not in (tmp_path / "out.h5").read_bytes()


@pytest.mark.parametrize("part", ["data", "indices", "indptr"])
def test_a_sparse_matrix_is_of_its_own_file(attack, tmp_path, secret, part):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", [4, 8]
        for name, values in {"data": np.ones(8, "u1"), "indices": np.arange(8, dtype="u1"),
                             "indptr": np.array([0, 2, 4, 6, 8], "u1")}.items():  # fmt: skip
            if name == part:
                group.create_dataset(name, values.shape, "u1", external=[(str(secret), 0, len(values))])
            else:
                group[name] = values
    done = attack("data", "convert", tmp_path / "data.h5", "-o", tmp_path / "out.h5")
    assert done.code == 2 and "another file" in done.err, done.text
    assert attack("data", "inspect", tmp_path / "data.h5", "--json").code in (0, 2)
