"""Data files: inspect them, convert and repack them to HDF5, compute statistics, write an index.

Examples:
    >>> import kerasmem
    >>> kerasmem.data.convert(["x.npy", "y.npy"], "train.h5", shuffle=True)  # doctest: +SKIP
    >>> kerasmem.data.inspect("train.h5").line  # doctest: +SKIP
    "H5ChunkSequence('train.h5', x='x', y='y', batch_size=32)"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# public function -> module that defines it
_PUBLIC = {
    "inspect": "kerasmem.datatools.inspection",
    "convert": "kerasmem.datatools.conversion",
    "repack": "kerasmem.datatools.conversion",
    "stats": "kerasmem.datatools.statistics",
    "index": "kerasmem.datatools.indexing",
}

__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from kerasmem.datatools.conversion import convert as convert
    from kerasmem.datatools.conversion import repack as repack
    from kerasmem.datatools.indexing import index as index
    from kerasmem.datatools.inspection import inspect as inspect
    from kerasmem.datatools.statistics import stats as stats


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kerasmem.data' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
