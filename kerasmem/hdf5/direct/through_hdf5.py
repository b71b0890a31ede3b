"""Rows of whatever HDF5 alone can read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.direct.runs import RowRun
from kerasmem.hdf5.direct.scratch import Scratch
from kerasmem.hdf5.direct.sources import Outputs, Refuse, Source
from kerasmem.hdf5.layout import one_line
from kerasmem.hdf5.links import DAMAGED


class Hdf5Source(Source):
    """A dataset that is read by HDF5: one thread at a time, whatever the storage.

    Args:
        dataset: returns the dataset, open.
        shape: shape of the rows and all, the extents of an array type included.
        dtype: type as read.
        cell: rows read at a time, and not read where none of them is picked.
        refuse: raises the error for rows that cannot be read.
    """

    def __init__(
        self,
        dataset: Callable[[], h5py.Dataset],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        cell: int,
        refuse: Refuse,
    ) -> None:
        self._dataset = dataset
        self._shape = shape
        self._dtype = dtype
        self._cell = cell
        self._refuse = refuse
        self._reading = threading.Lock()
        self._scratch = Scratch()
        self.bytes_read = 0

    def lies_where(self, other: Source) -> bool:
        """Return whether the data known to `other`, made earlier, still lies where it did."""
        return isinstance(other, Hdf5Source)

    def read(self, run: RowRun, outputs: Outputs, scratch: Scratch) -> None:
        """Read rows into the windows."""
        for part in run.cells(self._cell):
            with self._reading:
                shape = (part.stop - part.start, *self._shape[1:])
                raw = self._scratch.take("rows", prod(shape) * self._dtype.itemsize)
                rows = raw.view(self._dtype).reshape(shape)
                try:
                    self._fetch(part.start, part.stop, rows)
                except DataError:
                    raise
                except DAMAGED as error:
                    self._refuse(part.start, part.stop, one_line(str(error)), error)
                self.bytes_read += raw.nbytes
                for delivery, target in outputs:
                    delivery.put(rows, part.picked, target, part.places, scratch)

    def _fetch(self, start: int, stop: int, into: np.ndarray) -> None:
        dataset = self._dataset()
        if dataset.dtype.subdtype is None:
            dataset.read_direct(into, np.s_[start:stop])
            return
        # Rows whose every element is an array (PyTables writes such), which `read_direct` cannot.
        extent = (stop - start, *dataset.shape[1:])
        there = dataset.id.get_space()
        there.select_hyperslab((start, *[0] * (len(extent) - 1)), extent)
        dataset.id.read(h5py.h5s.create_simple(extent), there, into, h5py.h5t.py_create(dataset.dtype))
