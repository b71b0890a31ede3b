"""What this process really holds of host memory: less what its C library keeps back for later."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path

_FIELD = re.compile(rb"^(?:RssAnon|VmSwap):\s+(\d+) kB$", re.MULTILINE)


def held_bytes() -> int:
    """Return the bytes of this process's own pages, in RAM or swap, after free heap went back to the system.

    Pages of files (libraries loaded bit by bit) do not count. Where the system does not tell them apart, what is
    resident is returned. Takes milliseconds.

    Example:
        >>> before = held_bytes()
        >>> block = b"x" * 2**24
        >>> held_bytes() - before >= 2**24
        True
    """
    trim = _trim()
    if trim is not None:
        trim(0)
    try:
        found = _FIELD.findall(Path("/proc/self/status").read_bytes())
    except OSError:
        found = []
    if found:
        return sum(map(int, found)) * 1024
    import psutil

    return int(psutil.Process().memory_info().rss)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim(3); None where there is another C library."""
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return function
