"""Inspect data files, convert and repack them to HDF5, compute statistics, and index them.

Examples:
    >>> import kerasmem
    >>> kerasmem.data.convert(["x.npy", "y.npy"], "train.h5", shuffle=True)  # doctest: +SKIP
    >>> kerasmem.data.inspect("train.h5").line  # doctest: +SKIP
    "H5ChunkSequence('train.h5', x='x', y='y', batch_size=32)"
"""

from __future__ import annotations

from kerasmem.datatools.conversion import convert, repack
from kerasmem.datatools.indexing import index
from kerasmem.datatools.inspection import inspect
from kerasmem.datatools.statistics import stats

__all__ = ["inspect", "convert", "repack", "stats", "index"]
