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
from kerasmem.hdf5.remote.urls import identity
from kerasmem.units import GIB, MIB, format_size, parse_size

DEFAULT_CACHE = 10 * GIB
_LEAST_CACHE = 16 * MIB
AHEAD_BYTES = 32 * MIB
"""Bytes in flight or fetched and not yet used, where a memory budget does not say otherwise."""
REQUESTS = 16
"""Requests in flight, however large."""
SMALL_REQUESTS = 64
"""Requests in flight where they are small: a link is filled by bytes, and each waits as long for its first one."""
_LEAST_AHEAD = MIB // 4
_MOST_AHEAD = 64 * MIB
_OURS = {"asynchronous", "loop", "skip_instance_cache"}


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

    def cache_key(self, url: str, tag: str | None, size: int) -> str | None:
        """Return the name of a file's folder in the cache; None without a cache, or a version to know it by."""
        if self.cache is None or tag is None:
            return None
        options = self.storage_options
        endpoint = options.get("endpoint_url") or dict(options.get("client_kwargs") or {}).get("endpoint_url") or ""
        text = "\n".join((identity(url), tag, str(size), str(endpoint)))
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def read_remote(storage_options: Any, cache: Any, cache_size: Any, *, remote: bool = True) -> RemoteAccess:
    """Return the settings, checked.

    Args:
        storage_options: a dict, or None.
        cache: a folder, or None.
        cache_size: bytes or text; None for 10 GiB.
        remote: whether there are any remote files.

    Raises:
        UsageError: a setting is wrong.
    """
    options = _read_options(storage_options)
    folder = None
    if cache is not None:
        folder = files.follow("cache", os.path.abspath(os.path.expanduser(checks.path("cache", cache))))
        files.refuse_shared("cache", folder)
    elif cache_size is not None:
        raise UsageError("cache_size: name a folder for it with cache")
    if not remote and (options or folder is not None):
        raise UsageError("storage_options, cache: these are for URLs, and all files given are on this machine")
    size = DEFAULT_CACHE if cache_size is None else parse_size(cache_size, field="cache_size")
    if size < _LEAST_CACHE:
        raise UsageError(f"cache_size: {format_size(size)} is too small; {format_size(_LEAST_CACHE)} is the least")
    return RemoteAccess(options, folder, size)


def _read_options(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"storage_options: give a dict of what fsspec takes, not {type(value).__name__}")
    options = dict(value or {})
    ours = sorted(_OURS & set(options))
    if ours:
        raise UsageError(f"storage_options: {ours[0]!r} is for kerasmem to choose; leave it out")
    try:
        pickle.dumps(options)
    except Exception as error:
        raise UsageError(
            "storage_options: they have to be picklable, for a sequence goes to other processes with them; "
            f"{type(error).__name__} says they are not"
        ) from None
    return options


def ahead_bytes(budget: int | None, planned: int) -> int:
    """Return the bytes that may be in flight: of a memory budget what its plan leaves, with a part of a MiB at least.

    Args:
        budget: the memory budget in bytes; None where there is none.
        planned: bytes of windows, buffers and batches.
    """
    return AHEAD_BYTES if budget is None else min(max(budget - planned, _LEAST_AHEAD), _MOST_AHEAD)
