"""Files to stream from, written with h5py."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py
import numpy as np
import pytest


@pytest.fixture
def write(tmp_path):
    """Return a function that writes arrays to an HDF5 file and returns its path."""

    def write(name="data.h5", chunks=None, options=None, **arrays) -> Path:
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            for key, array in arrays.items():
                array = np.asarray(array)
                extra = dict((options or {}).get(key, {}))
                if chunks:
                    extra.setdefault("chunks", (min(chunks, len(array)), *array.shape[1:]))
                file.create_dataset(key.replace("__", "/"), data=array, **extra)
        return path

    return write


@pytest.fixture
def numbered(write):
    """Return a function that writes `rows` rows whose every value is the number of the row."""

    def numbered(rows=100, chunks=8, width=3, **more) -> Path:
        x = np.repeat(np.arange(rows, dtype=np.float32)[:, None], width, axis=1)
        return write(x=x, y=np.arange(rows), chunks=chunks, **more)

    return numbered
