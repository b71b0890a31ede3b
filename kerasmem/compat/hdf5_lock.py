"""The lock that h5py holds while it calls the HDF5 library.

Up to 3.14, `read_direct_chunk` and `write_direct_chunk` do not take it (h5py/h5py#2764); TensorFlow asks for these
versions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from kerasmem.compat.borrowing import Borrowed

_LOCK = Borrowed("h5py._objects:phil", feature="writing compressed chunks")


def hdf5_lock() -> AbstractContextManager[object]:
    """Return h5py's reentrant lock.

    Raises:
        NotAvailableError: If h5py has none under that name.
    """
    return _LOCK.get()
