"""Archives of arrays: no changed byte goes unnoticed, and those without a checksum are read as before."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from kerasmem.archives import open_archive, write_archive

ARRAYS = {"saved": np.arange(30, dtype=np.uint8), "model0": np.ones((3, 2), np.float32), "none": np.zeros(0)}


def read(data):
    with open_archive(io.BytesIO(data)) as content:
        return {name: content[name] for name in content}


def written():
    file = io.BytesIO()
    write_archive(file, ARRAYS)
    return file.getvalue()


def test_what_was_written_is_read_and_numpy_reads_it_too():
    data = written()
    for found in (read(data), np.load(io.BytesIO(data))):
        assert sorted(found) == sorted(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("change", [1, 0x80, 0xFF])
def test_each_changed_byte_is_refused(change):
    data = written()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= change
        with pytest.raises((ValueError, zipfile.BadZipFile)):
            read(bytes(damaged))


def test_each_missing_end_is_refused_and_so_is_what_follows_it():
    data = written()
    for damaged in (*(data[:size] for size in range(len(data))), data + b"\0", data + data):
        with pytest.raises(ValueError, match=r"."):
            read(damaged)
