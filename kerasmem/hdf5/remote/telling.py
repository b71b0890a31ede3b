"""What a sequence says of its remote files."""

from __future__ import annotations

from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.remote.access import SMALL_REQUESTS, RemoteAccess
from kerasmem.hdf5.remote.link import Traffic
from kerasmem.units import KIB, format_count, format_size

_SMALL = 64 * KIB
_FEW = 256  # blocks for which it does not matter


def describe_remote(access: RemoteAccess, traffic: Traffic) -> str:
    """Return how files are fetched and what came so far, one fact a line."""
    lines = [f"  fetched       {SMALL_REQUESTS} requests and {format_size(access.ahead_bytes)} at a time at most"]
    if access.cache is not None:
        lines.append(f"  cache         {shown(access.cache)}, {format_size(access.cache_size)} at most")
    if traffic.requests or traffic.from_cache:
        line = f"  so far        {format_count(traffic.requests)} requests, {format_size(traffic.received)} received"
        if traffic.retries:
            line += f", {format_count(traffic.retries)} asked again"
        if traffic.from_cache:
            line += f", {format_size(traffic.from_cache)} from the cache"
        lines.append(line)
    return "\n".join(lines)


def advise_blocks(rows: int, row_bytes: float, blocks: int) -> str:
    """Return what to do about blocks so small that asking for them takes longer than they do; "" where it does not."""
    size = round(rows * row_bytes)
    if size >= _SMALL or blocks <= _FEW:
        return ""
    return (
        f"a block is {rows:,} rows ({format_size(size)}), fetched by a request of its own, {blocks:,} an epoch; a "
        "larger memory_budget makes blocks larger and requests fewer, up to the chunks of the file and beyond"
    )
