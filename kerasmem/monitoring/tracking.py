"""`kerasmem.track` measures the memory of one action: allocator, card and host."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from kerasmem.devices.machine import visible_devices
from kerasmem.devices.nvml import Nvml
from kerasmem.devices.training_devices import Allocator
from kerasmem.errors import UsageError
from kerasmem.monitoring.device_reader import PeakReader, running_allocators
from kerasmem.monitoring.sampler import CurrentPhase, Sampler
from kerasmem.monitoring.timeline import largest_known
from kerasmem.records import Record
from kerasmem.units import format_size, printable

_HERTZ = 20.0

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Use:
    """A size before and after an action, and its peak, in bytes, or None if unknown.

    The allocator's peak is exact. The peaks of driver and host are the largest background readings. For the host, the
    kernel's high-water mark counts too, if it rose.
    """

    before_bytes: int | None
    after_bytes: int | None
    peak_bytes: int | None

    @property
    def kept_bytes(self) -> int | None:
        """Bytes that stay after the action, negative if it freed some, or None if unknown."""
        if self.before_bytes is None or self.after_bytes is None:
            return None
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class Span(Record, what="span"):
    """Memory that one action took.

    Attributes:
        label: name of the action.
        path: labels of the enclosing actions, the outermost first, and its own.
        thread: name of its thread. Sizes are of the whole process, including other threads.
        seconds: duration.
        allocator: in use on each device, such as "GPU:0"; empty if TensorFlow is not loaded or its allocator cannot be
            read.
        driver: in use on the fullest card that the process uses, by all processes.
        host: resident in this process.
        tree: resident in this process and its subprocesses; shared pages count for each.
        error: name of the exception that ended it, or None.
    """

    label: str
    path: tuple[str, ...]
    thread: str
    seconds: float
    allocator: dict[str, Use]
    driver: Use
    host: Use
    tree: Use
    error: str | None

    def __str__(self) -> str:
        """Return seconds, and each memory before, after and at its peak, in one line."""
        failed = "" if self.error is None else f", ended by {self.error}"
        parts = [f"{printable(self.label)}: {self.seconds:.3g} s{failed}"]
        for name, use in {**self.allocator, "card": self.driver, "host": self.host}.items():
            if use.before_bytes is not None and use.after_bytes is not None and use.peak_bytes is not None:
                before, after, peak = map(format_size, (use.before_bytes, use.after_bytes, use.peak_bytes))
                parts.append(f"{name} {before} → {after}, peak {peak}")
        return "; ".join(parts)


_path: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("kerasmem_track", default=())


def track(label: str) -> Tracker:
    """Measure an action: memory of TensorFlow's allocator, the card and the host before, after and at the peak.

    Use it around a block or as a decorator, nested and in any thread. The allocator's peak is exact: its statistics are
    reset, as by `MemoryLogger`. A thread reads card and host 20 times a second until the last action ends. TensorFlow
    is not loaded, and its devices are not started.

    Args:
        label: Name of the action, such as "load data".

    Returns:
        A context manager and decorator. Its `result` is the `Span` of the call that ended last; `print` shows it.

    Raises:
        UsageError: If the label is empty or not a string.

    Examples:
        >>> import kerasmem
        >>> with kerasmem.track("load data") as tracker:
        ...     data = bytearray(2**24)
        >>> tracker.result.host.peak_bytes >= 2**24
        True
    """
    return Tracker(label)


class Tracker(contextlib.ContextDecorator):
    """Context manager and decorator of `track`. May be nested, and used in several threads at once.

    Attributes:
        result: latest span, or None before the first has ended.
    """

    def __init__(self, label: str) -> None:
        if not isinstance(label, str) or not label.strip():
            raise UsageError(f"label must be a name such as 'load data'; got {label!r}.")
        self.label = label
        self.result: Span | None = None
        self._local = threading.local()

    def __enter__(self) -> Tracker:
        stack = self._local.__dict__.setdefault("open", [])
        stack.append(_OpenSpan(self.label))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.result = self._local.open.pop().end(None if kind is None else kind.__name__)

    def __call__(self, function: F) -> F:
        """Return a function that measures each of its calls."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise UsageError(
                f"track cannot decorate {function.__name__}, because it is a generator or a coroutine; "
                "use `with kerasmem.track(…):` inside it"
            )
        return super().__call__(function)


class _OpenSpan:
    """An action in progress."""

    def __init__(self, label: str) -> None:
        self._token = _path.set((*_path.get(), label))
        self._path = _path.get()
        self._readers: dict[Allocator, PeakReader] = {}
        self._in_use = {device: in_use for device, (in_use, _) in self._read_allocators().items()}
        self._nvml, _ = Nvml.open()
        self._cards = visible_devices(() if self._nvml is None else self._nvml.devices, os.environ)
        self._sampler = Sampler(CurrentPhase(), self._on_cards, lambda _: None, _HERTZ, math.inf, "kerasmem track")
        self._before = self._sampler.latest
        self._sampler.start()
        self._start = time.perf_counter()

    def end(self, error: str | None) -> Span:
        """Return the span from the start until now."""
        seconds = time.perf_counter() - self._start
        allocator: dict[str, Use] = {}
        for device, (in_use, peak) in self._read_allocators().items():
            earlier = self._in_use.get(device)  # None if the device was started during the action
            allocator[device] = Use(earlier or 0, in_use, None if earlier is None else peak)
        for reader in self._readers.values():
            reader.close()
        self._sampler.stop()
        self._sampler.read()
        if self._nvml is not None:
            self._nvml.close()
        before, after, largest = self._before, self._sampler.latest, self._sampler.largest
        _path.reset(self._token)
        return Span(
            label=self._path[-1],
            path=self._path,
            thread=threading.current_thread().name,
            seconds=seconds,
            allocator=allocator,
            driver=Use(before.driver_used_bytes, after.driver_used_bytes, largest("driver_used_bytes")),
            host=Use(before.rss_bytes, after.rss_bytes, largest("rss_bytes")),
            tree=Use(before.tree_bytes, after.tree_bytes, largest("tree_bytes")),
            error=error,
        )

    def _read_allocators(self) -> dict[str, tuple[int, int | None]]:
        """Return each device's bytes in use, and its peak since the last call."""
        readings = {}
        for allocator in running_allocators():
            if allocator not in self._readers:
                self._readers[allocator] = PeakReader(allocator)
            with contextlib.suppress(Exception):  # a device that went away must not stop the action
                readings[allocator.device] = self._readers[allocator].read()[:2]
        return readings

    def _on_cards(self) -> int | None:
        if self._nvml is None:
            return None
        readings = [self._nvml.memory(card)[0] for card in self._cards]
        return largest_known(memory.used_bytes for memory in readings if memory is not None)
