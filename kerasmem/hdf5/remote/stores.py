"""The stores that a process reads from: one fsspec file system a store, made for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.remote.access import SMALL_REQUESTS, RemoteAccess
from kerasmem.hdf5.remote.failures import Final, Passing, classify
from kerasmem.hdf5.remote.objects import AnyObject, HttpObject, RemoteObject, S3Object
from kerasmem.hdf5.remote.urls import scheme_of
from kerasmem.units import MIB

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_TRIES = 7
_FIRST_WAIT, _LONGEST_WAIT, _LONGEST_ASKED = 0.2, 8.0, 60.0  # seconds
_Result = TypeVar("_Result")


class Stores:
    """File systems, made as URLs need them.

    Args:
        access: the settings.
        loop: where their coroutines will run.
    """

    def __init__(self, access: RemoteAccess, loop: asyncio.AbstractEventLoop) -> None:
        self._access = access
        self._loop = loop
        self._systems: dict[tuple[str, str], Any] = {}

    def find(self, url: str) -> RemoteObject:
        """Return the object that a URL names; nothing is asked of its store yet.

        Raises:
            MissingExtraError: the package for this kind of store is not installed.
            UsageError: there is no such kind, or the store's options are wrong.
        """
        system, path = self.system(url)
        if scheme_of(url) in ("http", "https") and hasattr(system, "set_session"):
            return HttpObject(system, url)
        if hasattr(system, "_call_s3"):
            return S3Object(system, path)
        return AnyObject(system, path)

    def system(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, and the object's path in it."""
        try:
            import fsspec
            from fsspec.core import url_to_fs
        except ImportError:
            raise MissingExtraError("reading a file behind a URL", "remote") from None
        scheme = scheme_of(url)
        options = dict(self._access.storage_options)
        try:
            if "::" in url:
                key = (url, "")
                if key not in self._systems:
                    self._systems[key] = url_to_fs(url, **options)[0]
                return self._systems[key], url_to_fs(url, **options)[1]
            kind = fsspec.get_filesystem_class(scheme)
            within = kind._get_kwargs_from_urls(url)
            key = (scheme, repr(sorted(within.items())))
            if key not in self._systems:
                if issubclass(kind, fsspec.asyn.AsyncFileSystem):
                    options |= {"asynchronous": True, "loop": self._loop}
                made = _prepare(scheme, {**within, **options})
                self._systems[key] = kind(skip_instance_cache=True, **made)
                if hasattr(self._systems[key], "retries"):
                    self._systems[key].retries = 1  # what is tried again is decided here
            return self._systems[key], kind._strip_protocol(url)
        except (ImportError, ValueError) as error:
            missing = isinstance(error, ImportError)
            if missing and scheme in ("http", "https", *_EXTRAS):
                raise MissingExtraError(f"reading {scheme}:// URLs", _EXTRAS.get(scheme, "remote")) from None
            if missing or "Protocol not known" in str(error):
                which = "fsspec lacks the package for it" if missing else "fsspec knows no such scheme"
                raise UsageError(f"path: {shown(url)} cannot be read: {which} ({scheme}://)") from None
            raise UsageError(f"storage_options: {scheme}:// does not take them ({type(error).__name__})") from None
        except (TypeError, KeyError) as error:
            raise UsageError(f"storage_options: {scheme}:// does not take them ({type(error).__name__})") from None

    async def close(self) -> None:
        """Close all connections."""
        for system in self._systems.values():
            session = getattr(system, "_session", None)
            for closing in (getattr(session, "close", None), getattr(getattr(system, "_s3", None), "close", None)):
                if closing is not None:
                    with contextlib.suppress(Exception):
                        done = closing()
                        if asyncio.iscoroutine(done):
                            await done
        self._systems.clear()


async def insist(
    ask: Callable[[], Awaitable[_Result]], failed: Callable[[], bool] = lambda: False, tries: int = _TRIES
) -> _Result:
    """Return what a store answers, asking again after ever longer pauses while its failures are passing ones.

    Args:
        ask: asks once.
        failed: told of each failure after which it is asked again; returns whether it got on all the same.
        tries: how often to ask in a row without getting on.

    Raises:
        Final: it fails for good, or too often.
        Changed: the object is another.
    """
    number = 0
    while True:
        try:
            return await ask()
        except Exception as error:
            failure = classify(error)
        if not isinstance(failure, Passing):
            raise failure
        number = 1 if failed() else number + 1
        if number == tries:
            raise Final(f"the store failed {tries} times in a row, the last time so: {failure}")
        pause = min(_FIRST_WAIT * 2 ** (number - 1), _LONGEST_WAIT) * random.uniform(0.5, 1.0)
        await asyncio.sleep(max(pause, min(failure.wait, _LONGEST_ASKED)))


def _prepare(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a file system's options with what kerasmem sets where the user does not."""
    if scheme in ("http", "https"):
        import aiohttp

        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_refuse_downgrade)
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


async def _refuse_downgrade(session: Any, context: Any, params: Any) -> None:
    target = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
    there = target.split(":", 1)[0].lower() if "://" in target else params.url.scheme
    if there not in ("http", "https") or (params.url.scheme == "https" and there == "http"):
        raise Final(f"it redirects from {params.url.scheme}:// to {shown(there)[1:-1]}://, which is not followed")
