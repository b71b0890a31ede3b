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
    "inspect": "kerasmem.datatools.inspecting.inspection",
    "convert": "kerasmem.datatools.converting.conversion",
    "repack": "kerasmem.datatools.converting.conversion",
    "stats": "kerasmem.datatools.inspecting.statistics",
    "index": "kerasmem.datatools.inspecting.indexing",
}

__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from kerasmem.datatools.converting.conversion import convert as convert
    from kerasmem.datatools.converting.conversion import repack as repack
    from kerasmem.datatools.inspecting.indexing import index as index
    from kerasmem.datatools.inspecting.inspection import inspect as inspect
    from kerasmem.datatools.inspecting.statistics import stats as stats


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kerasmem.data' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
