"""How remote files are reached and kept: the settings that every process needs."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kerasmem import checks, files
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.urls import identity
from kerasmem.hdf5.io.cache import DiskCache
from kerasmem.units import GIB, MIB, parse_size

DEFAULT_CACHE = 10 * GIB
AHEAD_BYTES = 32 * MIB
"""Bytes in flight or fetched and not yet used, where a memory budget does not say otherwise."""
REQUESTS = 16
"""Requests in flight."""
_LEAST_AHEAD = MIB // 4
_MOST_AHEAD = 64 * MIB
_SETTINGS = ("storage_options", "cache", "cache_size")


@dataclass(frozen=True)
class RemoteAccess:
    """How remote files are reached and kept.

    Args:
        storage_options: what fsspec's file system is made with: credentials, an endpoint, headers. Never shown.
        cache: folder in which what was fetched is kept; None for none.
        cache_size: bytes it may hold.
        ahead_bytes: bytes in flight or fetched and not yet used.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: str | None = None
    cache_size: int = DEFAULT_CACHE
    ahead_bytes: int = AHEAD_BYTES

    def open_cache(self) -> DiskCache | None:
        """Return the disk cache."""
        return None if self.cache is None else DiskCache(self.cache, self.cache_size)

    def cache_key(self, url: str, tag: str | None, size: int) -> str | None:
        """Return the name of a file's folder in the cache; None without a cache or a known version."""
        if self.cache is None or tag is None:
            return None
        text = f"{identity(url)}\n{tag}\n{size}"
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def read_remote(value: Any) -> RemoteAccess:
    """Return the checked `remote` argument of a data set.

    Args:
        value: a dict with any of "storage_options", "cache" and "cache_size", or None.

    Raises:
        UsageError: If an entry is unknown or wrong.
    """
    settings = _read_dict("remote", value)
    for name in settings:
        if name not in _SETTINGS:
            raise UsageError(
                f"remote: {name!r} is none of {', '.join(_SETTINGS)}; credentials belong in storage_options"
            )
    options = _read_dict("storage_options", settings.get("storage_options"))
    try:
        pickle.dumps(options)
    except Exception as error:
        raise UsageError(f"storage_options: must be picklable; got {type(error).__name__}") from None
    cache, size = settings.get("cache"), settings.get("cache_size", DEFAULT_CACHE)
    if cache is not None:
        cache = os.path.realpath(os.path.expanduser(checks.path("cache", cache)))
        files.refuse_foreign("cache", cache)
    elif "cache_size" in settings:
        raise UsageError("cache_size: name a folder for it with cache")
    return RemoteAccess(options, cache, parse_size(size, field="cache_size"))


def _read_dict(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{name}: must be a dict; got {type(value).__name__}")
    return dict(value or {})


def ahead_bytes(budget: int | None, planned: int) -> int:
    """Return the bytes that may be in flight: the rest of the memory budget, at least 256 KiB.

    Args:
        budget: the memory budget in bytes; None if there is none.
        planned: bytes of windows, buffers and batches.
    """
    return AHEAD_BYTES if budget is None else min(max(budget - planned, _LEAST_AHEAD), _MOST_AHEAD)
