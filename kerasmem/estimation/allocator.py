"""TensorFlow's BFC allocator ("best fit with coalescing"), simulated. Pure arithmetic.

What a step asks for is not what it occupies: a request may be given a chunk nearly twice its size, and memory that
is free in pieces does not serve a large request. The rules, from `xla/tsl/framework/bfc_allocator.cc`:

- A request is rounded up to 256 bytes and served by the smallest free chunk that holds it, the lowest address first.
  (The 21 bins of the original are a way to find that chunk, and do not change which one it is.)
- The chunk is split when it has at least twice the request, or 128 MiB more; else the request gets all of it.
- A freed chunk merges with free neighbours, within its region.
- Without a chunk that fits, the pool grows by a region: 2 MiB first, then double each time, and double again until the
  request fits; no more than the limit leaves. (Without memory growth TensorFlow takes the whole limit at once; that is
  not simulated.)
- On a card the allocator hands regions back that are wholly free before it gives up, if that helps, and tries again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from kerasmem.errors import KerasmemError

GRAIN = 256  # every size and address is a multiple
FIRST_REGION = 2 << 20
LARGEST_WASTE = 128 << 20  # a chunk that exceeds the request by as much is split
RESOLUTION = 1 << 20  # bytes to which the smallest limit is found

_SHIFT = 48  # a free chunk is one integer, size << 48 | address: sorted, they are in the allocator's order
_ADDRESS = (1 << _SHIFT) - 1

# A step for `replay`: (key, bytes) allocates, (key, FREE) frees what the key holds.
Step = tuple[int, int]
FREE = -1


class OutOfMemory(KerasmemError):
    """The simulated allocator has no room for a request."""


class BFCAllocator:
    """The allocator's state: chunks in use, free chunks and regions.

    Args:
        limit: the bytes that all regions together may have (`memory_limit`); None for no limit.
        descending: this is a CPU's allocator: each new region lies below the others, not above, which decides between
            free chunks of equal size; and no region is handed back.

    Examples:
        >>> pool = BFCAllocator()
        >>> first = pool.allocate(1_000_000)
        >>> pool.in_use, pool.reserved
        (1000192, 2097152)
        >>> second = pool.allocate(600_000)  # the rest of the region is less than twice that, so it is all handed out
        >>> pool.chunk_size(second)
        1096960
    """

    __slots__ = (
        "_ends", "_free", "_high", "_low", "_next_bytes", "_regions", "_starts", "_used", "descending",
        "in_use", "limit", "next_address", "peak", "requested_at_peak", "requested_in_use", "reserved",
    )  # fmt: skip

    def __init__(self, limit: int | None = None, *, descending: bool = False) -> None:
        self.limit, self.descending = limit, descending
        self.in_use = self.peak = self.reserved = self.requested_in_use = self.requested_at_peak = 0
        self.next_address: int | None = None  # where the next region lies, for replays of recorded addresses
        self._next_bytes = max(_round(min(limit or FIRST_REGION, FIRST_REGION)), GRAIN)
        self._free: list[int] = []  # size << 48 | address, sorted
        self._starts: dict[int, int] = {}  # free chunks: address -> size
        self._ends: dict[int, int] = {}  # free chunks: end -> address
        self._used: dict[int, tuple[int, int]] = {}  # address -> (size, requested)
        self._regions: dict[int, int] = {}  # address -> size
        self._low = self._high = 1 << (_SHIFT - 2)

    def allocate(self, size: int) -> int:
        """Return the handle (the address) of a chunk for `size` bytes; 0 for 0 bytes, which may be freed.

        Raises:
            OutOfMemory: there is no room, and no way to make some.
        """
        if size <= 0:
            if size < 0:
                raise ValueError(f"cannot allocate {size} bytes")
            return 0
        rounded = (size + 255) & -256
        free = self._free
        index = bisect_left(free, rounded << _SHIFT)
        if index == len(free):
            if not self._extend(rounded) and not (self._collect_regions(rounded) and self._extend(rounded)):
                raise OutOfMemory(
                    f"no room for {size:,} B: {self.in_use:,} B of {self.reserved:,} B are in use and the largest free "
                    f"chunk has {self.largest_free:,} B; a smaller batch or a larger limit is needed"
                )
            index = bisect_left(free, rounded << _SHIFT)
        key = free.pop(index)
        chunk, address = key >> _SHIFT, key & _ADDRESS
        end = address + chunk
        del self._starts[address]
        if chunk >= rounded + rounded or chunk - rounded >= LARGEST_WASTE:
            rest = address + rounded
            insort(free, chunk - rounded << _SHIFT | rest)
            self._starts[rest] = chunk - rounded
            self._ends[end] = rest
            chunk = rounded
        else:
            del self._ends[end]
        self._used[address] = chunk, size
        self.requested_in_use += size
        self.in_use += chunk
        if self.in_use > self.peak:
            self.peak = self.in_use
            self.requested_at_peak = self.requested_in_use
        return address

    def free(self, handle: int) -> None:
        """Free a chunk.

        Raises:
            KeyError: no chunk in use has this handle.
        """
        if not handle:
            return
        chunk, requested = self._used.pop(handle)
        self.in_use -= chunk
        self.requested_in_use -= requested
        starts, ends, free = self._starts, self._ends, self._free
        address, end = handle, handle + chunk
        following = starts.pop(end, 0)
        if following:
            del free[bisect_left(free, following << _SHIFT | end)]
            end += following
        before = ends.pop(address, 0)
        if before:
            del free[bisect_left(free, starts[before] << _SHIFT | before)]
            address = before
        starts[address] = end - address
        ends[end] = address
        insort(free, end - address << _SHIFT | address)

    def chunk_size(self, handle: int) -> int:
        """Return the bytes of a chunk in use, which may exceed the request."""
        return self._used[handle][0] if handle else 0

    @property
    def largest_free(self) -> int:
        """The largest free chunk in bytes."""
        return self._free[-1] >> _SHIFT if self._free else 0

    @property
    def regions(self) -> tuple[tuple[int, int], ...]:
        """The address and bytes of each region, by address."""
        return tuple(sorted(self._regions.items()))

    def chunks(self) -> tuple[tuple[int, int, bool], ...]:
        """Return all chunks by address: address, bytes, whether it is in use."""
        used = [(address, chunk, True) for address, (chunk, _) in self._used.items()]
        return tuple(sorted(used + [(address, size, False) for address, size in self._starts.items()]))

    def reset_peak(self) -> None:
        """Reset the peak to the bytes in use, as `reset_memory_stats` does."""
        self.peak, self.requested_at_peak = self.in_use, self.requested_in_use

    def _extend(self, rounded: int) -> bool:
        addresses = (self._low if self.descending else _ADDRESS - self._high) - 2 * GRAIN  # never address 0
        available = (addresses if self.limit is None else min(addresses, self.limit - self.reserved)) // GRAIN * GRAIN
        if rounded > available:
            return False
        is_increased = rounded > self._next_bytes
        while rounded > self._next_bytes:
            self._next_bytes *= 2
        size = min(self._next_bytes, available)
        if not is_increased:
            self._next_bytes *= 2
        self._add_region(size)
        return True

    def _add_region(self, size: int) -> None:
        address = self.next_address
        if address is None:  # with a gap, so that chunks of different regions never touch
            address = self._low - GRAIN - size if self.descending else self._high + GRAIN
        self.next_address = None
        self._low, self._high = min(self._low, address), max(self._high, address + size)
        self.reserved += size
        self._regions[address] = size
        # As if a chunk of the region were freed.
        self._used[address] = size, 0
        self.in_use += size
        self.free(address)

    def _collect_regions(self, rounded: int) -> bool:
        """Release the regions that are wholly free, if the request then fits."""
        if self.descending:
            return False
        unused = [each for each, size in self._regions.items() if self._starts.get(each) == size]
        total = sum(self._regions[each] for each in unused)
        if not unused or (self.limit is not None and rounded > self.limit - self.reserved + total):
            return False
        for address in unused:
            size = self._regions.pop(address)
            self._starts.pop(address)
            self._ends.pop(address + size)
            self._free.remove(size << _SHIFT | address)
            self.reserved -= size
        return True


def _round(size: int) -> int:
    return (size + GRAIN - 1) // GRAIN * GRAIN


def replay(allocator: BFCAllocator, steps: Iterable[Step], handles: dict[int, int] | None = None) -> dict[int, int]:
    """Replay allocations and frees, and return the handles of the chunks in use, by key.

    Args:
        allocator: changed by it.
        steps: (key, bytes) to allocate and (key, FREE) to free, in order.
        handles: of earlier replays, whose keys these steps may free; changed by it.

    Raises:
        OutOfMemory: a step has no room.

    Examples:
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
    descending: bool = False,
    enough: int | None = None,
) -> int:
    """Return the smallest memory limit that is enough for the steps.

    Found by halving: the limit returned was replayed and sufficed, one smaller by at most `RESOLUTION` did not. (A
    still smaller one may suffice by accident, since fragmentation is not monotonous.)

    Args:
        steps: (key, bytes) and (key, FREE), from an empty allocator on.
        descending: as for `BFCAllocator`.
        enough: the bytes of all regions after these steps without a limit, where known: a limit that none of them
            meets changes nothing, and is not replayed.

    Examples:
        >>> smallest_limit([(1, 3 << 20), (1, FREE), (2, 5 << 20)])  # the first region can be handed back
        5242880
    """

    def suffices(limit: int) -> bool:
        if enough is not None and limit >= max(enough, FIRST_REGION):
            return True
        try:
            replay(BFCAllocator(limit, descending=descending), steps)
        except OutOfMemory:
            return False
        return True

    least = _least_bytes(steps)
    if suffices(least):
        return least
    most = max(2 * least, RESOLUTION)
    while not suffices(most):
        most *= 2
    while most - least > RESOLUTION:
        middle = (least + most) // 2 // GRAIN * GRAIN
        if suffices(middle):
            most = middle
        else:
            least = middle
    return most


def _least_bytes(steps: Iterable[Step]) -> int:
    """Return the peak of the requests, each rounded up."""
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
