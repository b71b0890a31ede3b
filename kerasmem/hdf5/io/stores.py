"""Connections to stores: one fsspec file system a store, made for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from kerasmem.compat.files import close_connections, no_running_loop
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.hdf5.format.layout import one_line, shown
from kerasmem.hdf5.format.urls import redact, scheme_of
from kerasmem.hdf5.io.access import REQUESTS, RemoteAccess
from kerasmem.hdf5.io.objects import HttpObject, OtherObject, RemoteObject
from kerasmem.units import MIB

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_FOR_ANY_SERVER = ("range", "if-match", "accept", "accept-encoding", "user-agent")  # headers that a redirect keeps


class Stores:
    """An event loop with the file systems of stores, made as URLs need them.

    Args:
        access: the settings.

    Attributes:
        loop: runs their coroutines, in the thread that calls `run` or in one of its own.
    """

    def __init__(self, access: RemoteAccess) -> None:
        self._access = access
        self.loop = asyncio.new_event_loop()
        self._systems: dict[str, Any] = {}

    def object_at(self, url: str) -> RemoteObject:
        """Return the object that a URL names, without a request.

        Raises:
            MissingExtraError: If the package for this kind of store is not installed.
            UsageError: If there is no such kind, or the store's options are wrong.
        """
        system, path = self.system_of(url)
        if scheme_of(url) in ("http", "https") and hasattr(system, "set_session"):
            return HttpObject(system, url)
        return OtherObject(system, path)

    def system_of(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, and the object's path in it."""
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
            raise UsageError(f"path: {shown(url)} with these storage_options cannot be opened: {reason}") from None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this thread, which may have a running loop, as in a notebook."""
        with no_running_loop():
            return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Cancel requests and close the connections. No other thread may run the loop."""
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
            options["config_kwargs"] = {"max_pool_connections": REQUESTS, **(options.get("config_kwargs") or {})}
        system, _ = url_to_fs(url, skip_instance_cache=True, **options)
        return system


def _with_tracing(client: dict[str, Any]) -> dict[str, Any]:
    """Return options of an aiohttp session that watches redirects."""
    import aiohttp

    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(_drop_headers)
    return {"read_bufsize": MIB, **client, "trace_configs": [*client.get("trace_configs", ()), tracing]}


async def _drop_headers(session: Any, context: Any, params: Any) -> None:
    """Keep secrets such as an API's key from another server: aiohttp itself withholds Authorization and cookies."""
    from yarl import URL

    here, target = params.url, URL(params.response.headers.get("Location", ""))
    target = target if target.scheme else here.join(target)
    if (target.scheme, target.host, target.port) != (here.scheme, here.host, here.port):
        for name in set(params.headers):
            if name.lower() not in _FOR_ANY_SERVER:
                params.headers.popall(name)
