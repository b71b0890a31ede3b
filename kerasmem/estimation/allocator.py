"""Simulation of TensorFlow's BFC allocator ("best fit with coalescing").

A request may get a chunk nearly twice its size, and free memory in pieces does not serve a large request. The rules,
from `xla/tsl/framework/bfc_allocator.cc`:

- A request is rounded up to 256 bytes and served by the smallest free chunk that holds it, the lowest address first.
  (TensorFlow's 21 bins find the same chunk.)
- The chunk is split if it has at least twice the request, or 128 MiB more. Otherwise the request gets all of it.
- A freed chunk merges with free neighbours in its region.
- If no chunk fits, the pool grows by a region: 2 MiB first, then double each time, and double again until the request
  fits, within the limit. (Without memory growth TensorFlow takes the whole limit at once, which is not simulated.)
- If the limit is reached on a card, the allocator releases wholly free regions and tries again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from kerasmem.errors import KerasmemError

GRAIN = 256  # every size and address is a multiple
FIRST_REGION = 2 << 20
LARGEST_WASTE = 128 << 20  # a chunk that exceeds the request by as much is split
RESOLUTION = 1 << 20  # bytes, of the smallest limit

_SHIFT = 60  # a free chunk is one integer, size << 60 | address: sorted, they are in the allocator's order
_ADDRESS = (1 << _SHIFT) - 1

Request = tuple[int, int]  # (key, bytes) allocates, (key, FREE) frees the chunk of that key
FREE = -1


class OutOfMemory(KerasmemError):
    """A request does not fit into the simulated allocator."""


class BFCAllocator:
    """The allocator's state: chunks in use, free chunks and regions.

    Args:
        limit: maximum bytes of all regions (`memory_limit`). Defaults to no limit.
        descending: whether it is a CPU's allocator. Each new region is then below the others, which decides between
            free chunks of equal size, and no region is released. Defaults to False.

    Attributes:
        in_use: bytes of the chunks in use.
        requested_in_use: bytes requested for them.
        reserved: bytes of all regions.
        used: address → (bytes, requested bytes) of each chunk in use.
        free_chunks: address → bytes of each free chunk.
        regions: address → bytes of each region.
        next_address: address of the next region, for replays of recorded addresses.

    Examples:
        >>> pool = BFCAllocator()
        >>> first = pool.allocate(1_000_000)
        >>> pool.in_use, pool.reserved
        (1000192, 2097152)
        >>> second = pool.allocate(600_000)  # the rest of the region is less than twice that, so it is not split
        >>> pool.used[second]
        (1096960, 600000)
    """

    def __init__(self, limit: int | None = None, *, descending: bool = False) -> None:
        self.limit, self.descending = limit, descending
        self.in_use = self.reserved = self.requested_in_use = 0
        self.next_address: int | None = None
        self.used: dict[int, tuple[int, int]] = {}
        self.free_chunks: dict[int, int] = {}
        self.regions: dict[int, int] = {}
        self._next_bytes = FIRST_REGION if limit is None else max(min(_round_up(limit), FIRST_REGION), GRAIN)
        self._free: list[int] = []  # the free chunks, size << 60 | address, sorted
        self._ends: dict[int, int] = {}  # of free chunks: end → address
        self._low = self._high = 1 << (_SHIFT - 2)

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes and return the address (0 for 0 bytes).

        Raises:
            OutOfMemory: If no chunk fits and the pool cannot grow.
        """
        if size <= 0:
            if size < 0:
                raise ValueError(f"size must not be negative; got {size}")
            return 0
        rounded = _round_up(size)
        free = self._free
        index = bisect_left(free, rounded << _SHIFT)
        if index == len(free):
            if not self._extend(rounded) and not (self._collect_regions(rounded) and self._extend(rounded)):
                raise OutOfMemory(
                    f"{size:,} B do not fit the simulated allocator, with {self.in_use:,} B of {self.reserved:,} B in "
                    f"use and a largest free chunk of {max(self.free_chunks.values(), default=0):,} B"
                )
            index = bisect_left(free, rounded << _SHIFT)
        key = free.pop(index)
        chunk, address = key >> _SHIFT, key & _ADDRESS
        end = address + chunk
        del self.free_chunks[address]
        if chunk >= 2 * rounded or chunk - rounded >= LARGEST_WASTE:
            rest = address + rounded
            insort(free, chunk - rounded << _SHIFT | rest)
            self.free_chunks[rest] = chunk - rounded
            self._ends[end] = rest
            chunk = rounded
        else:
            del self._ends[end]
        self.used[address] = chunk, size
        self.requested_in_use += size
        self.in_use += chunk
        return address

    def free(self, address: int) -> None:
        """Free a chunk.

        Raises:
            KeyError: If no chunk in use has this address.
        """
        if not address:
            return
        chunk, requested = self.used.pop(address)
        self.in_use -= chunk
        self.requested_in_use -= requested
        self._add_free(address, chunk)

    def _add_free(self, address: int, size: int) -> None:
        """Add a free chunk, merged with free neighbours."""
        sizes, ends, free = self.free_chunks, self._ends, self._free
        end = address + size
        following = sizes.pop(end, 0)
        if following:
            del free[bisect_left(free, following << _SHIFT | end)]
            end += following
        before = ends.pop(address, 0)
        if before:
            del free[bisect_left(free, sizes[before] << _SHIFT | before)]
            address = before
        sizes[address] = end - address
        ends[end] = address
        insort(free, end - address << _SHIFT | address)

    def _extend(self, rounded: int) -> bool:
        """Add a region if the request fits within the limit."""
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
        address = self.next_address
        if address is None:  # with a gap, so that chunks of different regions never touch
            address = self._low - GRAIN - size if self.descending else self._high + GRAIN
        self.next_address = None
        self._low, self._high = min(self._low, address), max(self._high, address + size)
        self.reserved += size
        self.regions[address] = size
        self._add_free(address, size)
        return True

    def _collect_regions(self, rounded: int) -> bool:
        """Release wholly free regions if the request then fits."""
        unused = [address for address, size in self.regions.items() if self.free_chunks.get(address) == size]
        total = sum(self.regions[address] for address in unused)
        is_enough = self.limit is None or rounded <= self.limit - self.reserved + total
        if self.descending or not unused or not is_enough:
            return False
        for address in unused:
            size = self.regions.pop(address)
            del self.free_chunks[address], self._ends[address + size]
            self._free.remove(size << _SHIFT | address)
            self.reserved -= size
        return True


def _round_up(size: int) -> int:
    return (size + GRAIN - 1) & -GRAIN


def replay(allocator: BFCAllocator, requests: Sequence[Request]) -> None:
    """Replay allocations and frees in order.

    Raises:
        OutOfMemory: If a request does not fit.

    Examples:
        >>> pool = BFCAllocator()
        >>> replay(pool, [(1, 1000), (2, 5000), (1, FREE)])
        >>> pool.in_use
        5120
    """
    addresses: dict[int, int] = {}
    allocate, free = allocator.allocate, allocator.free
    for key, size in requests:
        if size == FREE:
            free(addresses.pop(key))
        else:
            addresses[key] = allocate(size)


def smallest_limit(requests: Sequence[Request], *, descending: bool = False) -> int:
    """Return the smallest memory limit that serves requests, to within 1 MiB.

    The allocator is empty at the begin.     A much smaller limit may suffice by accident, since fragmentation does not
    grow steadily with the limit.

    Args:
        requests: the requests, in order.
        descending: as for `BFCAllocator`. Defaults to False.

    Examples:
        >>> smallest_limit([(1, 3 << 20), (1, FREE), (2, 5 << 20)])  # the first region can be released
        5242880
    """

    def suffices(limit: int) -> bool:
        try:
            replay(BFCAllocator(limit, descending=descending), requests)
        except OutOfMemory:
            return False
        return True

    unlimited = BFCAllocator(descending=descending)
    replay(unlimited, requests)
    limits = range(RESOLUTION, max(unlimited.reserved, FIRST_REGION), RESOLUTION)
    index = bisect_left(limits, True, key=suffices)
    return limits[index] if index < len(limits) else max(unlimited.reserved, FIRST_REGION)


class Buffer:
    """Memory of one or more tensors or variables.

    Attributes:
        bytes: requested bytes.
        chunk: address of its chunk.
        node: number of the operation that allocated it, or of the batch's placeholder; -1 for other buffers.
        is_scratch: whether it is an operation's scratch.
        holders: number of holders.
    """

    __slots__ = ("bytes", "chunk", "holders", "is_scratch", "node")

    def __init__(self, size: int, chunk: int, node: int, is_scratch: bool) -> None:
        self.bytes, self.chunk, self.node, self.is_scratch = size, chunk, node, is_scratch
        self.holders = 1


class Peak(NamedTuple):
    """The peak of a step.

    Attributes:
        in_use: bytes in chunks.
        requested: requested bytes.
        node: number of the running operation, or -1.
        end: length of the heap's log at the peak.
    """

    in_use: int
    requested: int
    node: int
    end: int


FREED, NO_VARIABLE = -2, -1  # in a heap's log


class Heap:
    """Buffers in a simulated allocator, with their log and peak.

    Args:
        allocator: provides the chunks. Defaults to a CPU's.

    Attributes:
        log: (buffer, number) for each change of a buffer. The number is the variable that has the buffer from then on,
            `NO_VARIABLE` or `FREED`.
        peak: the peak since the last `reset_peak`.
    """

    def __init__(self, allocator: BFCAllocator | None = None) -> None:
        self.allocator = allocator or BFCAllocator(descending=True)
        self.log: list[tuple[Buffer, int]] = []
        self.reset_peak()

    def reset_peak(self) -> None:
        """Reset the peak to the bytes in use."""
        self.peak = self._now(-1)

    def _now(self, node: int) -> Peak:
        return Peak(self.allocator.in_use, self.allocator.requested_in_use, node, len(self.log))

    def allocate(self, size: int, node: int = -1, variable: int = NO_VARIABLE, is_scratch: bool = False) -> Buffer:
        """Allocate a buffer with one holder."""
        buffer = Buffer(size, self.allocator.allocate(max(size, 1)), node, is_scratch)
        self.log.append((buffer, variable))
        if self.allocator.in_use > self.peak.in_use:
            self.peak = self._now(node)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Remove one holder, and free the buffer after the last one."""
        buffer.holders -= 1
        if not buffer.holders:
            self.allocator.free(buffer.chunk)
            self.log.append((buffer, FREED))

    def live_at(self, end: int) -> dict[Buffer, int]:
        """Return the buffers in use at a log position, with their variables."""
        live: dict[Buffer, int] = {}
        for buffer, variable in self.log[:end]:
            if variable == FREED:
                del live[buffer]
            else:
                live[buffer] = variable
        return live

    def requests(self) -> list[Request]:
        """Return all requests to the allocator, for a replay under a limit."""
        requests: list[Request] = []
        keys: dict[Buffer, int] = {}
        for buffer, variable in self.log:
            if variable == FREED:
                requests.append((keys[buffer], FREE))
            elif buffer not in keys:
                keys[buffer] = len(keys)
                requests.append((keys[buffer], max(buffer.bytes, 1)))
        return requests
