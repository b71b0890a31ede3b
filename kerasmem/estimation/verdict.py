"""Does an interval fit a device? Pure arithmetic."""

from __future__ import annotations

from kerasmem.estimation.report import Bytes

FITS, TOO_CLOSE, DOES_NOT_FIT = "fits", "too close to call", "does not fit"


def verdict(need: Bytes, available_bytes: int) -> str:
    """Return "fits", "does not fit", or "too close to call" where the interval straddles what is available.

    Example:
        >>> verdict(Bytes(10, 8, 12, *[None] * 7), 11)
        'too close to call'
    """
    low = need.total if need.low is None else need.low
    high = need.total if need.high is None else need.high
    if high <= available_bytes:
        return FITS
    return DOES_NOT_FIT if low > available_bytes else TOO_CLOSE
