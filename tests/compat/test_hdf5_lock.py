"""h5py's lock: what every call of the HDF5 library waits for, and what two of them leave out in some versions."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor, wait

import h5py
import numpy as np

from kerasmem.compat.files import hdf5_lock


def test_other_threads_wait_for_it(write):
    path = write(x=np.arange(10))
    with ThreadPoolExecutor(1) as pool:
        with hdf5_lock(), hdf5_lock():
            read = pool.submit(lambda: h5py.File(path)["x"][3])
            assert not wait([read], timeout=0.2).done
        assert read.result() == 3


def test_chunks_are_written_by_threads_at_once(tmp_path):
    """Without the lock, HDF5 refuses calls, or ends the process."""
    chunk = zlib.compress(bytes(4000))

    def write(number):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            dataset = file.create_dataset("x", (200_000,), "f4", chunks=(1000,), compression="gzip")
            for start in range(0, 200_000, 1000):
                with hdf5_lock():
                    dataset.id.write_direct_chunk((start,), chunk)
            return float(np.abs(dataset[:]).max())

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(write, range(12))) == [0.0] * 12
