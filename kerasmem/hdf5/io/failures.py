"""Retry requests to stores, and explain why they fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kerasmem.hdf5.format.layout import one_line
from kerasmem.hdf5.format.urls import redact

_TRIES = 7
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 8.0  # seconds
_Result = TypeVar("_Result")
_NO_CREDENTIALS = "no credentials were found; put them into storage_options, for a public bucket {'anon': True}"
_FORBIDDEN = "no permission to read it; credentials go into storage_options, and a signed link may have run out"
_MISSING = "there is no such object"
_PERMANENT = {
    401: _FORBIDDEN, 403: _FORBIDDEN, "PermissionError": _FORBIDDEN,
    404: _MISSING, 410: _MISSING, "FileNotFoundError": _MISSING,
    "NoCredentialsError": _NO_CREDENTIALS, "PartialCredentialsError": _NO_CREDENTIALS,
}  # fmt: skip
"""Messages for failures that a retry cannot fix, by HTTP status or the error's class."""
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
    status = getattr(error, "status" if hasattr(error, "status") else "code", 0)  # aiohttp's, or gcsfs's
    kind = type(error).__name__
    if status == 412:
        raise ChangedError("its ETag is another") from None
    if status in _PERMANENT or kind in _PERMANENT:
        raise PermanentError(_PERMANENT[status if status in _PERMANENT else kind]) from None
    text = f"{kind}: {redact(one_line(str(error), 300))}".removesuffix(": ")
    if isinstance(status, int) and status >= 400:
        text = f"HTTP status {status}"
        is_permanent = status < 500 and status not in (408, 425, 429)
    else:
        is_permanent = isinstance(error, _WRONG) or "Redirect" in kind
    if is_permanent:
        raise PermanentError(f"it cannot be read: {text}") from None
    return text
