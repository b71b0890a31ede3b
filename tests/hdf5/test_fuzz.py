"""Damaged files, thousands of bytes changed at random: the rows, or a named error; never a hang, never other rows."""

from __future__ import annotations

import time

import h5py
import numpy as np
import pytest

from kerasmem import H5ChunkSequence
from kerasmem.errors import DataError, KerasmemError

ROWS = 60
MUTANTS = 200
LONGEST = 10  # seconds for a file of a few kB
# Fletcher32 cannot tell 0x0000 from 0xFFFF, and a chunk all of zeros has the checksum 0: zlib's can and does not.
CHECKED = {"compression": "gzip", "fletcher32": True}


def earliest(path, x):
    """Write metadata without checksums: symbol tables, B-trees of version 1."""
    with h5py.File(path, "w", libver="earliest") as file:
        group = file.create_group("train")
        group.create_dataset("x", data=x, chunks=(7, 3), **CHECKED)
        group.create_dataset("y", data=np.arange(ROWS), chunks=(20,), **CHECKED)


def latest(path, x):
    """Write metadata with checksums: a fixed and an extensible array as indices, a link by name."""
    with h5py.File(path, "w", libver="latest") as file:
        group = file.create_group("train")
        group.create_dataset("x", data=x, chunks=(7, 3), shuffle=True, **CHECKED)
        group.create_dataset("y", data=np.arange(ROWS), chunks=(20,), maxshape=(None,), **CHECKED)


def trees(path, x):
    """Write B-trees of version 2, an index of one chunk, a user block, many attributes."""
    with h5py.File(path, "w", libver="latest", userblock_size=512) as file:
        group = file.create_group("train")
        group.create_dataset("x", data=x, chunks=(7, 3), maxshape=(None, None), **CHECKED)
        group.create_dataset("y", data=np.arange(ROWS), chunks=(ROWS,), **CHECKED)
        for number in range(12):
            group["x"].attrs[f"note {number}"] = "x" * number


def flip_bits(data, random, where):
    for _ in range(int(random.integers(1, 4))):
        data[int(random.choice(where))] ^= 1 << int(random.integers(8))


def change_bytes(data, random, where):
    for _ in range(int(random.integers(1, 9))):
        data[int(random.choice(where))] = int(random.integers(256))


def clear(data, random, where):
    start = int(random.choice(where))
    stop = min(start + int(random.integers(1, 600)), len(data))
    data[start:stop] = bytes(stop - start)


def extreme_numbers(data, random, where):
    start = int(random.choice(where)) // 8 * 8
    size = int(random.choice([2, 4, 8]))
    data[start : start + size] = (b"\xff", b"\x7f", b"\x80", b"\x01")[int(random.integers(4))] * size


def copy_over(data, random, where):
    source, target = (int(number) for number in random.choice(where, 2))
    size = int(random.integers(8, 300))
    size = min(size, len(data) - max(source, target))
    data[target : target + size] = data[source : source + size]


def cut(data, random, where):
    del data[int(random.choice(where)) :]


DAMAGE = [flip_bits, change_bytes, change_bytes, clear, extreme_numbers, copy_over, cut]


def metadata_of(data, path):
    """Return the places in the file at which no chunk lies."""
    free = np.ones(len(data), bool)

    def note(name, found):
        if isinstance(found, h5py.Dataset):
            for number in range(found.id.get_num_chunks()):
                chunk = found.id.get_chunk_info(number)
                free[chunk.byte_offset : chunk.byte_offset + chunk.size] = False

    with h5py.File(path) as file:
        file.visititems(note)
    return np.flatnonzero(free)


def as_h5py_reads(path):
    """Return what the file says now, by HDF5 itself, which reads metadata without checksums as they are."""
    with h5py.File(path) as file:
        return file["train/x"][:], file["train/y"][:]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers that a changed type makes too large for float32
@pytest.mark.parametrize("write_file", [earliest, latest, trees])
def test_a_damaged_file_gives_its_rows_or_a_named_error(tmp_path, write_file):
    seed = [earliest, latest, trees].index(write_file)
    random = np.random.default_rng([2024, seed])
    path = tmp_path / "mutant.h5"
    x = np.random.default_rng(seed).integers(0, 9, (ROWS, 8)).astype("f4")
    write_file(path, x)
    sound = path.read_bytes()
    places = metadata_of(sound, path)
    assert len(places) > 500
    outcomes = {"error": 0, "rows": 0, "as HDF5 reads it": 0}
    for number in range(MUTANTS):
        data = bytearray(sound)
        anywhere = random.random() < 0.2
        DAMAGE[number % len(DAMAGE)](data, random, np.arange(len(data)) if anywhere else places)
        path.write_bytes(data)
        began = time.monotonic()
        try:
            with H5ChunkSequence(
                path, "train/x", "train/y", batch_size=16, memory_budget="20MB", shuffle=number % 2 == 0
            ) as stream:
                batches = [stream[place] for place in range(min(10, len(stream)))]
                rows = [stream.batch_rows(place) for place in range(len(batches))]
        except KerasmemError as error:
            assert isinstance(error, DataError), error
            assert str(path) in str(error), error
            assert "\n" not in str(error)
            outcomes["error"] += 1
        else:
            same = len(batches) == 4 and all(
                np.array_equal(features, x[picked]) and np.array_equal(y, picked)
                for (features, y), picked in zip(batches, rows, strict=True)
            )
            outcomes["rows" if same else "as HDF5 reads it"] += 1
            if not same:
                assert write_file is earliest, "metadata under a checksum lets nothing else through"
                wanted = as_h5py_reads(path)
                for (features, y), picked in zip(batches, rows, strict=True):
                    assert np.array_equal(features, wanted[0][picked].astype("f4"), equal_nan=True)
                    assert np.array_equal(y, wanted[1][picked].astype(y.dtype), equal_nan=True)
        assert time.monotonic() - began < LONGEST
    assert min(outcomes["error"], outcomes["rows"]) > 5, outcomes
