"""Access to remote files: its settings, and connections to their stores."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kerasmem import checks, files
from kerasmem.compat.file_systems import close_connections, no_running_loop
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.hdf5.format.layout import one_line, quote
from kerasmem.hdf5.format.urls import identity, redact, scheme_of
from kerasmem.hdf5.io.cache import DiskCache
from kerasmem.hdf5.io.objects import HttpObject, OtherObject, RemoteObject, S3Links, S3Object
from kerasmem.units import GIB, MIB, parse_size

DEFAULT_CACHE = 10 * GIB
AHEAD_BYTES = 32 * MIB
"""Default limit of bytes in flight, or fetched and not yet used."""
REQUESTS = 16
"""Maximum number of requests in flight."""
SMALL_REQUESTS = 64
"""The same while all of them together are small, so that most of their time is latency."""
_LEAST_AHEAD = MIB // 4
_MOST_AHEAD = 64 * MIB
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # by URL scheme
_PUBLIC_HEADERS = ("range", "if-match", "accept", "accept-encoding", "user-agent")  # kept on redirects
_SETTINGS = ("storage_options", "cache", "cache_size")
_loaders: dict[str, Any] = {}  # botocore's loader of its description of S3


@dataclass(frozen=True)
class RemoteAccess:
    """Settings for reading remote files.

    Args:
        storage_options: options of fsspec's file system: credentials, an endpoint, headers. Never shown.
        cache: folder of the disk cache. Defaults to None: no cache.
        cache_size: maximum size of the cache in bytes. Defaults to 10 GiB.
        ahead_bytes: maximum bytes in flight, or fetched and not yet used. Defaults to 32 MiB.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: str | None = None
    cache_size: int = DEFAULT_CACHE
    ahead_bytes: int = AHEAD_BYTES

    def open_cache(self) -> DiskCache | None:
        """Return the disk cache, or None."""
        return None if self.cache is None else DiskCache(self.cache, self.cache_size)

    def cache_key(self, url: str, tag: str | None, size: int) -> str | None:
        """Return the cache key of one version of a file, or None if it is not cached."""
        if self.cache is None or tag is None:
            return None
        text = f"{identity(url)}\n{tag}\n{size}"
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def read_remote(value: Any) -> RemoteAccess:
    """Read the `remote` argument of a data set.

    Args:
        value: a dict with any of "storage_options", "cache" and "cache_size", or None.

    Raises:
        UsageError: If an entry is unknown or invalid.
    """
    settings = _read_dict("remote", value)
    for name in settings:
        if name not in _SETTINGS:
            raise UsageError(
                f"remote: must be keyed by {', '.join(_SETTINGS)}; got {name!r}. Credentials belong in storage_options"
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
        raise UsageError("cache_size: needs a folder; pass cache=FOLDER as well")
    return RemoteAccess(options, cache, parse_size(size, field="cache_size"))


def _read_dict(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{name}: must be a dict; got {type(value).__name__}")
    return dict(value or {})


def ahead_bytes(budget: int | None, planned: int) -> int:
    """Return the maximum bytes in flight: the rest of the memory budget, at least 256 KiB.

    Args:
        budget: memory budget in bytes, or None if unlimited.
        planned: bytes of windows, buffers and batches.
    """
    return AHEAD_BYTES if budget is None else min(max(budget - planned, _LEAST_AHEAD), _MOST_AHEAD)


class Stores:
    """An event loop, and one fsspec file system per store, created on first use.

    Args:
        access: settings for remote files.

    Attributes:
        loop: event loop of all requests. It runs in the thread that calls `run`, or in a background thread.
    """

    def __init__(self, access: RemoteAccess) -> None:
        self._access = access
        self.loop = asyncio.new_event_loop()
        self._systems: dict[str, Any] = {}  # fsspec's file systems by scheme and host

    def object_at(self, url: str) -> RemoteObject:
        """Return the object at a URL. No request is sent.

        Raises:
            MissingExtraError: If the package for this kind of store is not installed.
            UsageError: If the scheme is unknown, or the storage options are invalid.
        """
        system, path = self.system_of(url)
        if scheme_of(url) in ("http", "https") and hasattr(system, "set_session"):
            return HttpObject(system, url)
        if scheme_of(url) in ("s3", "s3a"):
            return S3Object(system, path, self._s3_links)
        return OtherObject(system, path)

    def system_of(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, and the path in it."""
        scheme = scheme_of(url)
        key = f"{scheme}://{urlsplit(url).netloc}"
        try:
            from fsspec.core import strip_protocol

            if key not in self._systems:
                self._systems[key] = self._connect(url, scheme)
            return self._systems[key], strip_protocol(url)
        except ImportError:
            raise MissingExtraError(f"reading {scheme}:// URLs", _EXTRAS.get(scheme, "remote")) from None
        except (ValueError, TypeError, KeyError) as error:
            reason = redact(one_line(str(error)))
            raise UsageError(f"path: {quote(url)} cannot be opened with these storage_options: {reason}") from None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this thread, even if a loop is running in it (a notebook's)."""
        with no_running_loop():
            return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Cancel requests and close the connections. The loop must not run in another thread."""
        with contextlib.suppress(Exception):
            self.run(self.shut_down())
        self.loop.close()

    async def shut_down(self) -> None:
        """Cancel the other tasks of the loop and close the connections."""
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for system in self._systems.values():
            with contextlib.suppress(Exception):
                await close_connections(system)
        self._systems.clear()
        await self.loop.shutdown_default_executor()

    def _connect(self, url: str, scheme: str) -> Any:
        from fsspec import get_filesystem_class
        from fsspec.asyn import AsyncFileSystem
        from fsspec.core import url_to_fs

        options = dict(self._access.storage_options)
        if issubclass(get_filesystem_class(scheme), AsyncFileSystem):
            options |= {"asynchronous": True, "loop": self.loop}
        if scheme in ("http", "https"):
            options["client_kwargs"] = _with_tracing(options.get("client_kwargs") or {})
        elif scheme in ("s3", "s3a"):
            config = {"max_pool_connections": SMALL_REQUESTS, "signature_version": "s3v4"}  # of links too
            options["config_kwargs"] = {**config, **(options.get("config_kwargs") or {})}
            if "profile" not in options:
                options.setdefault("session", _s3_session())
        system, _ = url_to_fs(url, skip_instance_cache=True, **options)
        return system

    @functools.cached_property
    def _s3_links(self) -> S3Links:
        from fsspec import filesystem

        client = _with_tracing({"trust_env": True})  # like s3fs, use the proxies of the environment
        options = {"asynchronous": True, "loop": self.loop, "client_kwargs": client, "encoded": True}
        web = self._systems["links"] = filesystem("https", skip_instance_cache=True, **options)
        return S3Links(web)


def _s3_session() -> Any:
    """Return a session that shares botocore's description of S3, which takes 0.1 s of CPU time to read."""
    from aiobotocore.session import AioSession

    session = AioSession()
    session.register_component("data_loader", _loaders.setdefault("s3", session.get_component("data_loader")))
    return session


def _with_tracing(client: dict[str, Any]) -> dict[str, Any]:
    """Add the check of redirects to the options of an aiohttp session."""
    import aiohttp

    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(_drop_headers)
    return {"read_bufsize": MIB, **client, "trace_configs": [*client.get("trace_configs", ()), tracing]}


async def _drop_headers(session: Any, context: Any, params: Any) -> None:
    """Drop headers such as API keys on a redirect to another server. aiohttp drops only Authorization and cookies."""
    from yarl import URL

    here, target = params.url, URL(params.response.headers.get("Location", ""))
    target = target if target.scheme else here.join(target)
    if (target.scheme, target.host, target.port) != (here.scheme, here.host, here.port):
        for name in set(params.headers):
            if name.lower() not in _PUBLIC_HEADERS:
                params.headers.popall(name)
