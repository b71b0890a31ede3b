"""Why a store did not give bytes: for a moment, for good, or because the object is another one now."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from kerasmem.hdf5.format.layout import one_line
from kerasmem.hdf5.format.urls import redact

_TRIES = 7
_FIRST_WAIT, _LONGEST_WAIT, _LONGEST_ASKED = 0.2, 8.0, 60.0  # seconds
_Result = TypeVar("_Result")
_TRANSIENT_ERRNO = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED,
    errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_TRANSIENT_NAMES = {
    "EndpointConnectionError", "ConnectionClosedError", "ReadTimeoutError", "ConnectTimeoutError", "HTTPClientError",
    "ResponseStreamingError", "IncompleteReadError", "ClientConnectionError", "ClientPayloadError", "FSTimeoutError",
    "ServerDisconnectedError", "TimeoutError",
}  # fmt: skip
_REFUSED = "the connection is refused: {said}"
_NO_CREDENTIALS = "no credentials were found; put them into storage_options, for a public bucket {{'anon': True}}"
_PERMANENT = {
    "FileNotFoundError": "there is no such object",
    "PermissionError": "no permission to read it; credentials go into storage_options",
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
    "NonHttpUrlRedirectClientError": "it redirects to something other than HTTP, which is not followed",
    **dict.fromkeys(
        ("ClientConnectorCertificateError", "ClientSSLError", "SSLError", "InvalidURL", "RedirectClientError"), _REFUSED
    ),
}
"""What to say of errors of Python, aiohttp and botocore, by the name of their class or of one above it."""


class TransientError(Exception):
    """It may work when asked again.

    Args:
        reason: goes on from "the store did not answer: ".
        wait: seconds after which the store wants to be asked again, where it says so.
    """

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class PermanentError(Exception):
    """A failure that a retry cannot fix. The text names the fix."""


class ChangedError(PermanentError):
    """The object is not the version that is known.

    Args:
        difference: what differs.
    """

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"the file was replaced or rewritten while in use ({difference}); make the sequence again, and its index "
            "where it has one"
        )


async def retry(
    ask: Callable[[], Awaitable[_Result]], failed: Callable[[], bool] = lambda: False, tries: int = _TRIES
) -> _Result:
    """Return the answer of a store, retrying transient failures after ever longer pauses.

    Args:
        ask: asks once.
        failed: told of each failure after which it is asked again; returns whether some bytes came all the same.
        tries: how often to ask in a row without any progress.

    Raises:
        PermanentError: If it fails for good, or too often.
        ChangedError: If the object is another version.
    """
    number = 0
    while True:
        try:
            return await ask()
        except Exception as error:
            failure = classify(error)
        if not isinstance(failure, TransientError):
            raise failure
        number = 1 if failed() else number + 1
        if number == tries:
            raise PermanentError(f"the store failed {tries} times in a row, the last time so: {failure}")
        pause = min(_FIRST_WAIT * 2 ** (number - 1), _LONGEST_WAIT) * random.uniform(0.5, 1.0)
        await asyncio.sleep(max(pause, min(failure.wait, _LONGEST_ASKED)))


def of_status(status: int, wait: str = "") -> Exception:
    """Return the failure that an HTTP status means."""
    if status in (408, 425, 429) or status >= 500:
        return TransientError(f"HTTP status {status}", float(wait) if wait.isdecimal() else 0.0)
    if status == 412:
        return ChangedError("its ETag is another")
    texts = {
        401: "no permission to read it (HTTP status {}); credentials go into storage_options, and a signed link may "
        "have run out",
        404: "there is no such object (HTTP status {})",
        416: "the store refuses the range that was asked for (HTTP status {})",
    }
    text = texts.get({403: 401, 410: 404}.get(status, status), "the store answered with HTTP status {}")
    return PermanentError(text.format(status))


def classify(error: Exception) -> Exception:
    """Classify an exception of fsspec or of a library under it."""
    if isinstance(error, (TransientError, PermanentError)):
        return error
    status = next(filter(None, map(_status, _causes(error))), 0)
    if status:
        return of_status(status)
    said = redact(one_line(str(error), 300))
    said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    names = [kind.__name__ for kind in type(error).__mro__]
    text = next((_PERMANENT[name] for name in names if name in _PERMANENT), None)
    if text is not None:
        return PermanentError(text.format(said=said))
    inner = getattr(error, "os_error", error)
    if isinstance(inner, socket.gaierror) and inner.errno == socket.EAI_NONAME:
        return PermanentError("there is no host of this name")
    if isinstance(error, (ConnectionError, EOFError)) or _TRANSIENT_NAMES & set(names):
        return TransientError(said)
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return TransientError(said)
    return PermanentError(f"the store cannot be read: {said}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those it was raised from: s3fs and others keep the store's own answer there."""
    cause: BaseException | None = error
    for _ in range(4):
        if cause is not None:
            yield cause
            cause = cause.__cause__


def _status(error: Any) -> int:
    response = getattr(error, "response", None)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    if isinstance(status, int) and status >= 400:
        return status
    for name in ("status", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status if 400 <= status < 600 else 0
    return 0
