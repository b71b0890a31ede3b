"""Which ranges to ask a store for, so that what is needed comes in few requests. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from kerasmem.units import KIB, MIB, format_size

GAP = 64 * KIB
"""Bytes that nobody needs are fetched along up to here: with 16 requests at a time, 20 ms each and 50 MB/s, a request
more costs as much. That goes for short gaps between long stretches; where the gaps would add up to more than one byte
in `GAP_SHARE`, requests are the lesser evil, for every byte would come several times an epoch."""
GAP_SHARE = 32
MOST = 8 * MIB
"""Bytes of a range: larger ones are cut, so that several parts come at a time."""
_SMALL = 64 * KIB  # of a block
_FEW = 256  # blocks for which their size does not matter

Extent = tuple[int, int]
"""Where in a file bytes begin, and how many they are."""


def join_extents(needs: Sequence[Sequence[Extent]], *, gap: int = GAP, most: int = MOST) -> list[tuple[int, int, int]]:
    """Return the ranges to fetch, (first byte, byte after the last, who needs it first), in the order of need.

    Args:
        needs: for each who needs some, the extents, in the order in which they will be read.
        gap: ranges so close together become one.
        most: bytes of the longest range; what is longer is cut.

    Example:
        >>> join_extents([[(0, 100), (102, 8)], [(500, 5)], [(110, 5)]], gap=4, most=1000)
        [(0, 115, 0), (500, 505, 1)]
    """
    extents = sorted((start, start + size, who) for who, need in enumerate(needs) for start, size in need if size)
    joined: list[tuple[int, int, int]] = []
    needed = 0  # bytes of the last range that somebody needs
    for start, stop, who in extents:
        if joined:
            low, high, first = joined[-1]
            between, longer = start - high, max(stop, high)
            if between <= min(gap, needed // GAP_SHARE) and longer - low <= most:
                joined[-1] = (low, longer, min(first, who))
                needed += longer - max(start, high)
                continue
            if between < 0:  # they overlap, and together they would be too long
                joined[-1] = (low, high, min(first, who))
                start = high
        for low in range(start, stop, most):
            joined.append((low, min(low + most, stop), who))
            needed = joined[-1][1] - low
    return sorted(joined, key=lambda each: (each[2], each[0]))


def advise_blocks(rows: int, row_bytes: float, blocks: int) -> str:
    """Return what to do about blocks so small that asking for them takes longer than they do; "" where it does not."""
    size = round(rows * row_bytes)
    if size >= _SMALL or blocks <= _FEW:
        return ""
    return (
        f"a block is {rows:,} rows ({format_size(size)}), fetched by a request of its own, {blocks:,} an epoch; a "
        "larger memory_budget makes blocks larger and requests fewer, up to the chunks of the file and beyond"
    )
