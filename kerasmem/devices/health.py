"""How whole an allocator's free memory is: reserved, largest free block, fragmentation.

TensorFlow tells Python what is in use and no more. Its profiler tells, with every allocation, the share of free
memory that lies outside the largest free block, F = 1 - L / f. Two allocations of a known size A, between which the
free bytes f fall by A and the largest block L either stays or falls by A, give both f and L: `solve` has the algebra.
What is allocated for it is small beside what is free, and given back at once. The profiler's fields are those of
`BFCAllocator::AddTraceMe` and `GetFragmentation` in xla/tsl/framework/bfc_allocator.cc.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerasmem.devices.recording import ALLOCATE, DEALLOCATE, AllocatorEvent, read_allocator_events
from kerasmem.records import Record
from kerasmem.units import MIB, format_size

_SMALL = 52  # bytes of the blocks around the one that counts: a number that nothing else asks for
_FIRST, _LAST, _TIMES = 4092, 256 * MIB, 2  # sizes of the allocations to try, in bytes
_STEP = 1e-3  # how far F has to move for an answer that is good enough: it comes with six digits
_TRIES = 3


@dataclass(frozen=True)
class AllocatorHealth(Record, what="allocator health"):
    """Memory of one allocator in bytes, and the fragmentation of its free part.

    Attributes:
        device: such as "GPU:0".
        in_use_bytes: handed out.
        reserved_bytes: taken from the device, handed out or not; to one part in a thousand.
        largest_free_bytes: the largest request that it can serve from reserved memory.
        fragmentation: the share of free reserved memory outside that block, from 0 to 1.
        limit_bytes: how far it may grow.
    """

    device: str
    in_use_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    fragmentation: float
    limit_bytes: int

    @property
    def free_bytes(self) -> int:
        """Reserved and not handed out."""
        return self.reserved_bytes - self.in_use_bytes

    def explain(self, driver_used_bytes: int | None = None) -> tuple[str, ...]:
        """Return sentences for people on the gaps between the sizes.

        Args:
            driver_used_bytes: in use on the card, by all processes, as the driver says.
        """
        said = [
            f"{self.device}: {format_size(self.in_use_bytes)} in use of {format_size(self.reserved_bytes)} reserved; "
            f"TensorFlow keeps the {format_size(self.free_bytes)} between them, for its own later use, until the "
            "process ends"
        ]
        if self.free_bytes and self.fragmentation >= 0.25:
            share = f"{self.fragmentation:.0%}".replace("%", " %")
            room = self.limit_bytes - self.reserved_bytes
            more = f"a larger one needs new memory, and {format_size(room)} may still be taken"
            said.append(
                f"{self.device}: free memory is in pieces: {share} of it lies outside the largest block of "
                f"{format_size(self.largest_free_bytes)}; {more if room > 0 else 'a larger one fails'}"
            )
        if driver_used_bytes is not None and driver_used_bytes > self.reserved_bytes:
            rest = driver_used_bytes - self.reserved_bytes
            said.append(
                f"{self.device}: the driver counts {format_size(driver_used_bytes)}; the {format_size(rest)} beyond "
                "what TensorFlow has reserved are the CUDA context, libraries and other processes"
            )
        return tuple(said)


def solve(before: AllocatorEvent, after: AllocatorEvent) -> float | None:
    """Solve for the free bytes after `before`, given that `after` is the next allocation.

    With f free and the largest block L after the first, and A allocated by the second: where A came out of a smaller
    block, 1 - L / (f - A) = F', so f = A (1 - F') / (F - F'); if it came out of the largest,
    1 - (L - A) / (f - A) = F', so f = A F' / (F' - F). F falls in the first case and rises in the second.

    Examples:
        >>> half = AllocatorEvent(0, "allocate", "a", 0, 1, 256, 0, 0, fragmentation=0.5)  # 1000 free, 500 in one block
        >>> solve(half, AllocatorEvent(1, "allocate", "a", 256, 100, 100, 100, 0, fragmentation=4 / 9))
        1000.0
    """
    one, two, size = before.fragmentation, after.fragmentation, after.allocated
    if one == two:
        return None
    found = size * (1 - two) / (one - two) if two < one else size * two / (two - one)
    return round(found, 3)


def read_health(device: str = "GPU:0") -> tuple[AllocatorHealth | None, str | None]:
    """Measure the health of a device's allocator, or return None and why. Takes milliseconds.

    Args:
        device: a logical device; TensorFlow starts its devices. Only allocators of the BFC kind tell: a GPU's, and
            the CPU's where `TF_CPU_ALLOCATOR_USE_BFC=true` was set.
    """
    import tensorflow as tf

    if os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async" and device.startswith("GPU"):
        return None, f"health: {device}: TF_GPU_ALLOCATOR=cuda_malloc_async does not tell; unset it to see"
    found = None
    in_use = 0
    for _ in range(_TRIES):
        try:
            in_use = int(tf.config.experimental.get_memory_info(device)["current"])
            found = _measure(tf, device)
        except Exception as error:  # a profile under way, out of memory, a device that is not there
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return None, f"health: {device}: the allocator could not be asked: {reason}"
        if found is not None:
            break
    if found is None:
        return None, f"health: {device}: its allocator does not tell, or other threads were allocating meanwhile"
    state, free = found
    reserved = _rounded(state.in_use + free)
    largest = int((1 - state.fragmentation) * (reserved - state.in_use)) // 256 * 256
    limit = state.in_use + state.available
    health = AllocatorHealth(device, in_use, reserved, largest, float(state.fragmentation), limit)
    return health, None


def _measure(tf: Any, device: str) -> tuple[AllocatorEvent, float] | None:
    """Return a state and the free bytes in it, once two sizes of blocks agree on them.

    One alone may mislead: if the block came out of the largest and the second largest is now the largest, neither
    case of `solve` holds.
    """
    before: _Clue | None = None
    best: _Clue | None = None
    size = _FIRST
    while size <= _LAST:
        shapes = [tf.constant([count // 4]) for count in (_SMALL, size)]  # made before, for they take memory too
        with _recorded(tf) as events, tf.device(device):
            small, large = (functools.partial(_empty, tf, shape) for shape in shapes)
            held = small()
            block = large()
            last = small()
            del block
            del held, last
        if not any(event.requested == size for event in events):
            return None
        clue = _clue(events, size)
        if clue is None:
            break
        if before is not None and clue.agrees(before):
            best = clue
            if clue.moved >= _STEP:
                break
        before = clue
        size *= _TIMES
        if size > clue.safe:  # it might not fit, and the allocator would grow for it
            break
    return None if best is None else (best.state, best.free)


class _Clue(NamedTuple):
    """Evidence from one block: the free bytes in a state, the change of F, and a size that certainly fits."""

    state: AllocatorEvent
    free: float
    moved: float
    safe: float

    def agrees(self, other: _Clue) -> bool:
        """Whether both give the same total, within six digits."""
        error = sum(4e-6 / max(clue.moved, 4e-6) for clue in (self, other)) + 1e-3
        return 0 < self.free < float("inf") and abs(self._total - other._total) <= error * self.free

    @property
    def _total(self) -> float:
        return self.state.in_use + self.free


def _empty(tf: Any, shape: Any) -> Any:
    return tf.raw_ops.Empty(shape=shape, dtype=tf.float32, init=False)


def _clue(events: Sequence[AllocatorEvent], size: int) -> _Clue | None:
    """Find the four events around the block in order, and compute the free bytes."""
    allocator = next(event.allocator for event in events if event.requested == size)
    events = [event for event in events if event.allocator == allocator]
    place = next(place for place, event in enumerate(events) if event.requested == size)
    wanted = [(ALLOCATE, _SMALL), (ALLOCATE, size), (ALLOCATE, _SMALL), (DEALLOCATE, size)]
    around = events[place - 1 : place + 3] if place else []
    if [(event.kind, event.requested) for event in around] != wanted:
        return None  # somebody else allocated in between
    first, block, _, freed = around
    if first.fragmentation == 0 == block.fragmentation:
        # All that is free is one block. With the large one freed again behind the last, there are two: F = A / f.
        free = block.allocated / freed.fragmentation if freed.fragmentation else float("inf")
        return _Clue(freed, free, 1.0, free / 4)
    moved = abs(block.fragmentation - first.fragmentation)
    found = solve(first, block)
    # From `solve`, f > A (1 - F) / moved, and L = (1 - F) f; half of it, for the digits that are missing.
    safe = block.allocated * (1 - max(first.fragmentation, block.fragmentation)) ** 2 / (moved + 2e-6) / 2
    return _Clue(first, float("inf") if found is None or found < block.allocated else found, moved, safe)


def _rounded(size: float) -> int:
    """Return bytes as regions have them: whole MiB, if that is as near as six digits tell."""
    whole = round(size / MIB) * MIB
    return whole if abs(whole - size) <= 2e-3 * size else round(size / 256) * 256


@contextlib.contextmanager
def _recorded(tf: Any) -> Iterator[list[AllocatorEvent]]:
    """Yield a list that gets the allocations while a `with` lasts, as TensorFlow's profiler sees them."""
    profiler, is_whole = tf.profiler.experimental, False
    events: list[AllocatorEvent] = []
    options = profiler.ProfilerOptions(host_tracer_level=2, python_tracer_level=0, device_tracer_level=0)
    with tempfile.TemporaryDirectory() as folder:
        profiler.start(folder, options=options)
        try:
            yield events
            is_whole = True
        finally:
            profiler.stop(save=is_whole)
        events += read_allocator_events(folder)
