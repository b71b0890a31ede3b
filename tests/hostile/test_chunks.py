"""Mutated chunks, and ways around the decoders that check them: errors or numbers, but never leaked memory."""

from __future__ import annotations

import struct
import zlib

import h5py
import numpy as np
import pytest

from kerasmem.errors import DataError
from kerasmem.hdf5.format.filters import SHUFFLE, DecodeError, Pipeline
from kerasmem.hdf5.rows.paths import Access
from kerasmem.streaming.data_source import read_windows

# Each chunk is decoded into two different fillings. Bytes that a decoder does not write would leak memory.
MUTATE = """
import sys
import h5py, numpy as np
from kerasmem.hdf5.format.filters import DecodeError, Pipeline
from kerasmem.hdf5.format.filters import Scratch

KINDS = {"gzip": dict(compression="gzip", shuffle=True), "checked": dict(compression="gzip", fletcher32=True),
         "shuffle": dict(shuffle=True), "lzf": dict(compression="lzf")}
try:
    import hdf5plugin as plugin, imagecodecs
    KINDS |= {"blosc": plugin.Blosc("lz4", shuffle=1), "blosc zstd": plugin.Blosc("zstd", shuffle=2),
              "blosclz": plugin.Blosc("blosclz"), "zstd": plugin.Zstd(), "bzip2": plugin.BZip2()}
except ImportError:
    pass

def make(shape, dtype, options):
    values = (np.arange(np.prod(shape)) % 97).astype(dtype).reshape(shape)
    with h5py.File("chunk", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("x", data=values, chunks=shape, **options)
        creation = dataset.id.get_create_plist()
        filters = [creation.get_filter(at) for at in range(creation.get_nfilters())]
        stored = dataset.id.read_direct_chunk((0,) * len(shape))[1]
        return values.nbytes, stored, [(code, numbers) for code, _, numbers, _ in filters]

def mutate(random, stored, filters):
    data, filters = bytearray(stored), [(code, list(numbers)) for code, numbers in filters]
    for _ in range(random.integers(1, 5)):
        kind, at = random.integers(6), int(random.integers(max(1, len(data))))
        if kind < 2:
            data[at : at + 1] = random.bytes(1)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data += random.bytes(int(random.integers(40)))
        elif kind == 4:
            at = int(random.integers(48))
            data[at : at + 4] = random.choice([b"\\xff" * 4, bytes(4), b"\\xff\\xff\\xff\\x7f", b"\\0\\0\\1\\0"])
        elif random.random() < 0.3 and (numbers := filters[random.integers(len(filters))][1]):
            numbers[random.integers(len(numbers))] = int(random.choice([0, 1, 3, 255, 65535, 2**31, 2**32 - 1]))
    return bytes(data), filters

def decode(filters, size, data, filling):
    scratch = Scratch()
    for name in ("decoded", "unshuffled"):
        scratch.take(name, size + 64)[:] = filling
    try:
        return bytes(Pipeline(filters, size).decode(np.frombuffer(data, "u1"), 0, scratch))
    except DecodeError as error:
        return str(error)

random = np.random.default_rng(17)
for name, options in KINDS.items():
    found = set()
    for shape, dtype in (((33, 17), "<i4"), ((999,), "u1"), ((7, 5, 8), "<f8")):
        size, stored, filters = make(shape, dtype, options)
        for _ in range(200):
            data, changed = mutate(random, stored, filters)
            one, other = decode(changed, size, data, 0xAA), decode(changed, size, data, 0x55)
            assert one == other and (isinstance(one, str) or len(one) == size), (name, changed, data)
            found.add(type(one))
    assert str in found, name
print("done", len(KINDS))
"""


def test_mutated_chunks_neither_leak_memory_nor_crash(attack):
    done = attack(script=MUTATE, seconds=60, memory=1 << 29)
    assert done.code == 0 and done.out.startswith("done"), done.text


def write_chunk(path, chunk, set_filters, shape=(64, 8)):
    """Write a dataset with `chunk` as its only stored chunk."""
    with h5py.File(path, "w") as file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk(shape)
        set_filters(creation)
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, h5py.h5s.create_simple(shape), creation)
        dataset.write_direct_chunk((0,) * len(shape), chunk, 0)
    return path


def optional(code, numbers):
    return lambda creation: creation.set_filter(code, h5py.h5z.FLAG_OPTIONAL, numbers)


def read(path, name="x", **access):
    return next(read_windows([str(path)], [name], access=Access(**access)))[1][name]


BLOSC = 32001


def blosc_header(total, stored, flags=0x02, typesize=1, block=None):
    """A Blosc 1 header. Flag 2 marks the following bytes as uncompressed."""
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
def test_blosc_chunk_leaks_no_memory(tmp_path, name):
    pytest.importorskip("hdf5plugin")
    filters = optional(BLOSC, (2, 2, 1, 1 << 20, 5, 0, 0))
    with pytest.raises(DataError, match="cannot be read"):
        read(write_chunk(tmp_path / "blosc.h5", BLOSC_CHUNKS[name], filters, (1, 1 << 20)))


@pytest.mark.parametrize("numbers", [(), (0,)])
def test_shuffle_without_element_size_is_refused(numbers):
    with pytest.raises(DecodeError, match="no element size"):
        Pipeline([(SHUFFLE, numbers)], 64)


SHORT = zlib.compress(b"\7" * 40)


@pytest.mark.parametrize(
    ("set_filters", "chunk"),
    [
        (lambda creation: creation.set_deflate(4), SHORT),
        (lambda creation: creation.set_fletcher32(), b"abc"),
        (lambda creation: creation.set_shuffle(), b"ab"),
        (lambda creation: creation.set_szip(h5py.h5z.SZIP_NN_OPTION_MASK, 8), b"\xff\xff\xff\x7fab"),
        (lambda creation: creation.set_scaleoffset(h5py.h5z.SO_INT, 0), b"\x08\0\0\0\x08" + bytes(8)),
    ],
)
@pytest.mark.parametrize("virtual", [False, True])
def test_short_chunks_never_reach_hdf5(tmp_path, set_filters, chunk, virtual):
    """If HDF5 reads one of these, it leaks memory of the process into the rows, or crashes."""
    path = write_chunk(tmp_path / "short.h5", chunk, set_filters)
    if virtual:
        layout = h5py.VirtualLayout((64, 8), "u1")
        layout[:] = h5py.VirtualSource(".", "x", (64, 8))
        with h5py.File(path, "a") as file:
            file.create_virtual_dataset("v", layout)
    with pytest.raises(DataError, match=r"cannot be read|trust_file=True"):
        read(path, "v" if virtual else "x")


def test_damaged_chunk_as_large_as_its_data_is_refused(tmp_path):
    """Only a chunk beyond the edge of its dataset may lack its filters."""
    path = write_chunk(tmp_path / "raw.h5", bytes(64 * 8), lambda creation: creation.set_deflate(4))
    with pytest.raises(DataError, match="cannot be read"):
        read(path)


def test_short_unfiltered_chunk_is_refused(tmp_path):
    """HDF5 does not check the size of unfiltered chunks either. Only HDF5 reads 12-bit integers."""
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        kind = h5py.h5t.STD_U16LE.copy()
        kind.set_precision(12)
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((4096,))
        h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((4096,)), creation)
        file["x"][:] = 7
    assert (read(path) == 7).all()
    data = bytearray(path.read_bytes())
    at = data.index((8192).to_bytes(4, "little"), data.rindex(b"TREE"))
    data[at : at + 4] = (16).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match="a chunk of 8,192 bytes takes 16 in the file"):
        read(path)


def test_szip_needs_trust(tmp_path):
    if not h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP):
        pytest.skip("this HDF5 has no szip")
    x = np.arange(512, dtype="u1").reshape(64, 8)
    with h5py.File(tmp_path / "szip.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(64, 8), compression="szip")
    with pytest.raises(DataError, match=r"HDF5 would decode unchecked.*trust_file=True"):
        read(tmp_path / "szip.h5")
    assert np.array_equal(read(tmp_path / "szip.h5", trust_file=True), x)


def test_windows_have_plain_names(tmp_path):
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["train/x"] = np.arange(8)
    for name in ("/train/x", "train//x", "./train/x"):
        ((_, window),) = read_windows([str(tmp_path / "plain.h5")], [name])
        assert window["train/x"].tolist() == list(range(8))
