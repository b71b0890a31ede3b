"""Connections to stores: one fsspec file system a store, made for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from kerasmem.compat.files import close_connections, is_s3, no_running_loop
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.format.urls import scheme_of
from kerasmem.hdf5.io.access import SMALL_REQUESTS, RemoteAccess
from kerasmem.hdf5.io.cache import DiskCache
from kerasmem.hdf5.io.failures import PermanentError
from kerasmem.hdf5.io.objects import HttpObject, OtherObject, RemoteObject, S3Object
from kerasmem.units import MIB

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "remote", "https": "remote"}

_FOR_ANY_SERVER = ("range", "if-match", "accept", "accept-encoding", "user-agent")  # headers that a redirect keeps


class Stores:
    """An event loop with the file systems of stores, made as URLs need them.

    Args:
        access: the settings.

    Attributes:
        loop: runs their coroutines, in the thread that calls `run` or in one of its own.
        cache: the folder of fetched bytes; None for none.
    """

    def __init__(self, access: RemoteAccess) -> None:
        self._access = access
        self.loop = asyncio.new_event_loop()
        self.cache = None if access.cache is None else DiskCache(access.cache, access.cache_size)
        self._made: dict[str, Any] = {}

    def object_at(self, url: str) -> RemoteObject:
        """Return the object that a URL names, without a request.

        Raises:
            MissingExtraError: If the package for this kind of store is not installed.
            UsageError: If there is no such kind, or the store's options are wrong.
        """
        system, path = self.system_of(url)
        if scheme_of(url) in ("http", "https") and hasattr(system, "set_session"):
            return HttpObject(system, url)
        if not is_s3(system):
            return OtherObject(system, path)
        return S3Object(system, path)

    def system_of(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, and the object's path in it."""
        try:
            from fsspec.core import strip_protocol
        except ImportError:
            raise MissingExtraError("reading a file behind a URL", "remote") from None
        scheme = scheme_of(url)
        key = f"{scheme}://{urlsplit(url).netloc}"
        try:
            if key not in self._made:
                self._made[key] = self._make(url, scheme)
            return self._made[key], strip_protocol(url)
        except (ImportError, ValueError, TypeError, KeyError) as error:
            missing = isinstance(error, ImportError)
            if missing and scheme in _EXTRAS:
                raise MissingExtraError(f"reading {scheme}:// URLs", _EXTRAS[scheme]) from None
            if missing or "Protocol not known" in str(error):
                which = "fsspec lacks the package for it" if missing else "fsspec knows no such scheme"
                raise UsageError(f"path: {shown(url)} cannot be read: {which} ({scheme}://)") from None
            raise UsageError(f"storage_options: {scheme}:// does not take them ({type(error).__name__})") from None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this thread, which may have a running loop, as in a notebook."""
        with no_running_loop():
            return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Cancel what is under way and close the connections. No other thread may run the loop."""
        with contextlib.suppress(Exception):
            self.run(self.shut_down())
        self.loop.close()

    async def shut_down(self) -> None:
        """Cancel the other tasks of the loop and close the connections."""
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for system in self._made.values():
            with contextlib.suppress(Exception):
                await close_connections(system)
        self._made.clear()
        await self.loop.shutdown_default_executor()

    def _make(self, url: str, scheme: str) -> Any:
        from fsspec import get_filesystem_class
        from fsspec.asyn import AsyncFileSystem
        from fsspec.core import url_to_fs

        options = dict(self._access.storage_options)
        if issubclass(get_filesystem_class(scheme), AsyncFileSystem):
            options |= {"asynchronous": True, "loop": self.loop}
        system, _ = url_to_fs(url, skip_instance_cache=True, **_with_defaults(scheme, options))
        if hasattr(system, "retries"):
            system.retries = 1  # what is tried again is decided in `failures`
        return system


def _with_defaults(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a file system's options with kerasmem's defaults."""
    if scheme in ("http", "https"):
        import aiohttp

        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_check_redirect)
        client = dict(options.get("client_kwargs") or {})
        client["trace_configs"] = [*client.get("trace_configs", ()), tracing]
        client.setdefault("read_bufsize", MIB)
        options["client_kwargs"] = client
    elif scheme in ("s3", "s3a"):
        config = {
            "connect_timeout": 15,
            "read_timeout": 30,
            "max_pool_connections": SMALL_REQUESTS,
            "retries": {"max_attempts": 0},
        }
        options["config_kwargs"] = {**config, **(options.get("config_kwargs") or {})}
    return options


async def _check_redirect(session: Any, context: Any, params: Any) -> None:
    """Refuse redirects to unsafe places, and keep secrets from another server."""
    from yarl import URL

    here = params.url
    target = URL(params.response.headers.get("Location") or params.response.headers.get("URI") or "")
    target = target if target.scheme else here.join(target)
    if target.scheme not in ("http", "https") or (here.scheme, target.scheme) == ("https", "http"):
        raise PermanentError(
            f"it redirects from {here.scheme}:// to {shown(target.scheme)[1:-1]}://, which is not followed"
        )
    if not hasattr(context, "began_inside"):
        context.began_inside = await _is_inside(here.host)
    if not context.began_inside and await _is_inside(target.host):
        raise PermanentError("it redirects to an address of a private network, which is not followed")
    if (target.scheme, target.host, target.port) != (here.scheme, here.host, here.port):
        for name in set(params.headers):
            if name.lower() not in _FOR_ANY_SERVER:  # an API's key, say
                params.headers.popall(name)


async def _is_inside(host: str | None) -> bool:
    """Return whether a name leads to this machine, its network or another that is no part of the internet."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return False  # nobody can connect to it
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    return any(not (getattr(each, "ipv4_mapped", None) or each).is_global for each in addresses)
