"""Archives of arrays."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from kerasmem.files import open_archive

ARRAYS = {"saved": np.arange(30, dtype=np.uint8), "model0": np.ones((3, 2), np.float32), "none": np.zeros(0)}


def read(data):
    with open_archive(io.BytesIO(data)) as content:
        return {name: content[name] for name in content}


def written():
    file = io.BytesIO()
    np.savez(file, **ARRAYS)
    return file.getvalue()


def test_archive_of_savez_is_read():
    found = read(written())
    assert sorted(found) == sorted(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_changed_array_is_refused():
    data = bytearray(written())
    data[data.index(bytes(range(30)))] ^= 1
    with pytest.raises((ValueError, zipfile.BadZipFile)):
        read(bytes(data))


def test_each_missing_end_is_refused():
    data = written()
    for size in range(len(data)):
        with pytest.raises(ValueError, match=r"."):
            read(data[:size])
