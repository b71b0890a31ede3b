"""Why a store did not give bytes: for a moment, for good, or because the object is another now."""

from __future__ import annotations

import errno
import socket
from typing import Any

from kerasmem.hdf5.layout import one_line
from kerasmem.hdf5.remote.urls import redact

_PASSING = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED,
    errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_PASSING_NAMES = {
    "EndpointConnectionError", "ConnectionClosedError", "ReadTimeoutError", "ConnectTimeoutError", "HTTPClientError",
    "ResponseStreamingError", "IncompleteReadError", "ClientConnectionError", "ClientPayloadError", "FSTimeoutError",
    "ServerDisconnectedError",
}  # fmt: skip
_FINAL_NAMES = {"ClientConnectorCertificateError", "ClientSSLError", "SSLError", "InvalidURL", "RedirectClientError"}


class Passing(Exception):
    """It may work when asked again.

    Args:
        reason: goes on from "the store did not answer: ".
        wait: seconds after which the store wants to be asked again, where it says so.
    """

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class Final(Exception):
    """Asking again is of no use; the text is what is wrong and the way out."""


class Changed(Exception):
    """The object is not the one that was looked at; the text says what differs."""


def of_status(status: int, wait: str = "") -> Exception:
    """Return the failure that an HTTP status means."""
    if status in (408, 425, 429) or status >= 500:
        return Passing(f"HTTP status {status}", float(wait) if wait.isdigit() else 0.0)
    if status == 412:
        return Changed("its ETag is another")
    if status in (404, 410):
        return Final(f"there is no such object (HTTP status {status})")
    if status in (401, 403):
        return Final(
            f"no permission to read it (HTTP status {status}); credentials go into storage_options, and a signed link "
            "may have run out"
        )
    if status == 416:
        return Final("the store refuses the range that was asked for (HTTP status 416)")
    return Final(f"the store answered with HTTP status {status}")


def classify(error: BaseException) -> Exception:
    """Return what an exception of fsspec, or of a library under it, means."""
    if isinstance(error, (Passing, Final, Changed)):
        return error
    cause: Any = error
    for _ in range(4):  # s3fs and others keep the store's own answer as the cause
        status = _status(cause)
        if status:
            return of_status(status)
        if getattr(cause, "__cause__", None) is None:
            break
        cause = cause.__cause__
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, FileNotFoundError):
        return Final("there is no such object")
    if isinstance(error, PermissionError):
        return Final("no permission to read it; credentials go into storage_options")
    if "NoCredentialsError" in names or "PartialCredentialsError" in names:
        return Final("no credentials were found; pass storage_options, for a public bucket {'anon': True}")
    said = said_by(error)
    if "NonHttpUrlRedirectClientError" in names:
        return Final("it redirects to something other than HTTP, which is not followed")
    if names & _FINAL_NAMES:
        return Final(f"the connection is refused: {said}")
    inner = getattr(error, "os_error", error)
    if isinstance(inner, socket.gaierror) and inner.errno == socket.EAI_NONAME:
        return Final("there is no host of this name")
    passing = isinstance(error, (TimeoutError, ConnectionError, EOFError)) or names & _PASSING_NAMES
    if passing or "TimeoutError" in names or (isinstance(error, OSError) and error.errno in _PASSING):
        return Passing(said)
    return Final(f"the store cannot be read: {said}")


def said_by(error: BaseException) -> str:
    """Return an exception's text so that it can be shown."""
    text = redact(one_line(str(error), 300))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _status(error: Any) -> int:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int) and status >= 400:
            return status
    for name in ("status", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status if 400 <= status < 600 else 0
    return 0
