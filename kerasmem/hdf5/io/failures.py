"""Retry requests to stores, and explain why they fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kerasmem.hdf5.format.layout import one_line
from kerasmem.hdf5.format.urls import redact

_TRIES = 7
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 8.0  # seconds
_Result = TypeVar("_Result")
_NO_CREDENTIALS = "no credentials were found; put them into storage_options, for a public bucket {'anon': True}"
_FORBIDDEN = (
    "no permission to read it (HTTP status {}); credentials go into storage_options, and a signed link may have run out"
)
_MISSING = "there is no such object (HTTP status {})"
_STATUSES = {401: _FORBIDDEN, 403: _FORBIDDEN, 404: _MISSING, 410: _MISSING}
_PERMANENT = {
    "FileNotFoundError": "there is no such object",
    "PermissionError": "no permission to read it; credentials go into storage_options",
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
}
"""Messages for errors that a retry cannot fix, by the name of their class."""
_WRONG = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError)  # wrong settings, not the network


class PermanentError(Exception):
    """A failure that a retry cannot fix. The text names the fix."""


class ChangedError(PermanentError):
    """The object is not the version that is known.

    Args:
        difference: the difference.
    """

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"the file was replaced or rewritten while in use ({difference}); make the sequence again, and its index "
            "where it has one"
        )


async def retry(ask: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return the answer of a store, retrying transient failures after ever longer pauses.

    Raises:
        PermanentError: If it fails for good, or too often.
        ChangedError: If the object is another version.
    """
    reason = ""
    for attempt in range(_TRIES):
        if attempt:
            pause = min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        try:
            return await ask()
        except Exception as error:
            reason = _explain(error)
    raise PermanentError(f"the store failed {_TRIES} times in a row, the last time so: {reason}")


def _explain(error: Exception) -> str:
    """Describe a failure of a store that a retry may fix.

    Raises:
        PermanentError: If a retry cannot fix it.
    """
    if isinstance(error, PermanentError):
        raise error
    status = _status(error)
    if status == 412:
        raise ChangedError("its ETag is another") from None
    if status in (408, 425, 429) or status >= 500:
        return f"HTTP status {status}"
    if status:
        raise PermanentError(_STATUSES.get(status, "it cannot be read (HTTP status {})").format(status)) from None
    known = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _PERMANENT), None)
    if known is not None:
        raise PermanentError(_PERMANENT[known]) from None
    text = f"{type(error).__name__}: {redact(one_line(str(error), 300))}".removesuffix(": ")
    if isinstance(error, _WRONG) or "Redirect" in text.partition(":")[0]:
        raise PermanentError(f"it cannot be read: {text}") from None
    return text


def _status(error: Any) -> int:
    """Return the HTTP status of a store's refusal, or 0. s3fs keeps botocore's error as the cause of its own."""
    for cause in (error, error.__cause__):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    for name in ("status", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status if status >= 300 else 0
    return 0
