"""Recorded or simulated requests put through the allocator, and the smallest limit that they live in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kerasmem.estimation.allocator import GRAIN, BFCAllocator, OutOfMemory

# A step for `replay`: (key, bytes) allocates, (key, FREE) frees what the key holds.
Step = tuple[int, int]
FREE = -1


def replay(allocator: BFCAllocator, steps: Iterable[Step], handles: dict[int, int] | None = None) -> dict[int, int]:
    """Put allocations and frees through an allocator, and return the handles of what stays in use, by key.

    Args:
        allocator: changed by it.
        steps: (key, bytes) to allocate and (key, FREE) to free, in order.
        handles: of earlier replays, whose keys these steps may free; changed by it.

    Raises:
        OutOfMemory: a step has no room.

    Example:
        >>> pool = BFCAllocator()
        >>> live = replay(pool, [(1, 1000), (2, 5000), (1, FREE)])
        >>> pool.peak, pool.in_use, list(live)
        (6144, 5120, [2])
    """
    live = {} if handles is None else handles
    allocate, free = allocator.allocate, allocator.free
    for key, size in steps:
        if size == FREE:
            free(live.pop(key))
        else:
            live[key] = allocate(size)
    return live


def smallest_limit(
    steps: Sequence[Step],
    *,
    growth: bool = True,
    resolution: int = 1 << 20,
    descending: bool = False,
) -> int:
    """Return the smallest memory limit under which the steps run without running out of memory.

    Found by halving: the limit returned was replayed and sufficed, one smaller by at most `resolution` did not. (A
    still smaller one may suffice by accident, since fragmentation is not monotonous.)

    Args:
        steps: (key, bytes) and (key, FREE), from an empty allocator on.
        growth: regions as needed, or one region of the whole limit.
        resolution: in bytes.
        descending: the allocator is a CPU's: its regions lie as for `BFCAllocator`, and it never hands one back.

    Example:
        >>> smallest_limit([(1, 3 << 20), (1, FREE), (2, 5 << 20)])  # the first region can be handed back
        5242880
    """

    def suffices(limit: int) -> bool:
        try:
            replay(BFCAllocator(limit, growth, collect=not descending, descending=descending), steps)
        except OutOfMemory:
            return False
        return True

    least = _least_bytes(steps)
    if suffices(least):
        return least
    enough = max(2 * least, resolution)
    while not suffices(enough):
        enough *= 2
    while enough - least > resolution:
        middle = (least + enough) // 2 // GRAIN * GRAIN
        if suffices(middle):
            enough = middle
        else:
            least = middle
    return enough


def _least_bytes(steps: Iterable[Step]) -> int:
    """Return the most that is in use at once if every request gets what it asks for, rounded up."""
    sizes: dict[int, int] = {}
    now = most = 0
    for key, size in steps:
        if size == FREE:
            now -= sizes.pop(key)
        else:
            sizes[key] = -(-size // GRAIN) * GRAIN
            now += sizes[key]
            most = max(most, now)
    return max(most, GRAIN)
