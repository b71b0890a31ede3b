"""Reads devices, driver and host in one call, with true peaks between readings.

An allocator has one peak, that since its last reset. To get the peak of each stretch, a reader resets it at every
reading, so `tf.config.experimental.get_memory_info` afterwards returns the peak since then only. Before that, it
passes the peak on to all other readers of the allocator in this process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.devices.host import limit_note
from kerasmem.devices.machine import match_card, others_on_card
from kerasmem.devices.nvml import Nvml, NvmlDevice
from kerasmem.devices.training_devices import Allocator, TrackedDevice, tracked_devices
from kerasmem.monitoring.sampler import BackgroundReading
from kerasmem.monitoring.timeline import Sample, largest_known

_lock = threading.RLock()  # reentrant, because garbage collection in `read` may close a logger
_readers: dict[Allocator, list[PeakReader]] = {}


def _after_fork() -> None:
    """Replace the lock, since another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class PeakReader:
    """Reads an allocator with its true peak since this reader's previous reading.

    Args:
        allocator: allocator to read. Readers of equal allocators share the peaks that each of them resets.

    Attributes:
        peak: largest peak that other readers have seen since this one's previous reading, in bytes.
        refusal: exception of a reset that failed. Peaks are unknown from then on.
    """

    __slots__ = ("_allocator", "_sharing", "peak", "refusal")

    def __init__(self, allocator: Allocator) -> None:
        self.refusal: Exception | None = None
        self._allocator, self.peak = allocator, 0
        with _lock:
            self._sharing = _readers.setdefault(allocator, [])
            self._sharing.append(self)

    def close(self) -> None:
        """Stop keeping peaks for this reader."""
        with _lock:
            self._sharing.remove(self)

    def read(self) -> tuple[int, int | None, int | None]:
        """Read the allocator and reset its peak.

        This runs twice a batch, each time with cold processor caches, so it calls few functions.

        Returns:
            Bytes in use, peak since the previous reading (None if it cannot be reset), and bytes reserved.
        """
        with _lock:
            in_use, peak, reserved = self._allocator.read()
            if self.refusal is not None:
                return in_use, None, reserved
            for reader in [*self._sharing]:  # garbage collection may close one
                if peak > reader.peak:
                    reader.peak = peak
            try:
                self._allocator.reset()
            except Exception as error:  # not every allocator can; the reading is still valid
                self.refusal = error
                return in_use, None, reserved
            own, self.peak = self.peak, 0
            return in_use, own, reserved


def running_allocators() -> list[Allocator]:
    """Return the allocators of this process, without loading TensorFlow or starting its devices."""
    if not devices_are_started():
        return []
    tracked, _ = tracked_devices()
    return [device.allocator for device in tracked if device.allocator is not None]


_NO_BATCH = (0, 0.0, "epoch", None, None, 0)  # first fields of a row outside batches
_Driver = tuple[int | None, int | None]
_Sizes = tuple[int | None, int | None, int | None]
RawReading = list[tuple[_Sizes, _Driver]]  # for each device: in use, peak and reserved; the driver's used and total


@dataclass(slots=True)
class _Device:
    """A device, the driver's latest reading (used and total bytes), and the largest peak of the run."""

    name: str | None
    reader: PeakReader | None
    card: NvmlDevice | None
    driver: _Driver = (None, None)
    run_peak: int | None = None


class DeviceReader:
    """Reads all devices in one call. A reading that fails gives None and a note, not an exception.

    Args:
        note: called with a sentence about each reading that fails.
        nvml: whether to read the driver: True, False, or "auto" if there is a GPU. Defaults to "auto".
    """

    def __init__(self, note: Callable[[str], None], nvml: bool | str = "auto") -> None:
        self._note = note
        self._nvml: Nvml | None = None
        tracked, notes = tracked_devices()
        for text in notes:
            note(text)
        has_gpu = any(device.ordinal is not None for device in tracked)
        if nvml is True or (nvml and has_gpu):
            self._nvml, reason = Nvml.open()
            if reason is not None:
                note(f"driver: {reason}")
        elif nvml and any(device.name for device in tracked):
            note("driver: not read, because training uses no GPU")
        self._devices = []
        for device in tracked:
            reader = None if device.allocator is None else PeakReader(device.allocator)
            self._devices.append(_Device(device.name, reader, self._find_card(device)))

    @property
    def names(self) -> list[str | None]:
        """The devices read, in order."""
        return [device.name for device in self._devices]

    def start_run(self, host: BackgroundReading) -> list[Sample]:
        """Return the rows of a first reading. The run's peaks start from the memory in use."""
        self._note_circumstances()
        rows = self.read_rows(host)
        for device, row in zip(self._devices, rows, strict=True):
            device.run_peak = None if row.peak_bytes is None else row.in_use_bytes
        return rows

    def end_run(self) -> dict[str, int]:
        """Release the devices and the driver, and return each device's largest peak of the run, in bytes."""
        self.peaks()
        for device in self._devices:
            if device.reader is not None:
                device.reader.close()
        if self._nvml is not None:
            self._nvml.close()
        peaks = ((device.name, device.run_peak) for device in self._devices)
        return {name: size for name, size in peaks if name and size is not None}

    def peaks(self) -> list[int | None]:
        """Return each device's peak since the previous reading."""
        return [self._take(device)[1] for device in self._devices]

    def read(self) -> RawReading:
        """Take a reading quickly, for `make_rows` to convert later. The driver's sizes are from `read_driver`."""
        sizes = []
        for device in self._devices:  # before Python 3.12 a comprehension is a call
            sizes.append((self._take(device), device.driver))
        return sizes

    def make_rows(
        self, head: Sequence[Any], reading: RawReading, host: BackgroundReading, between: Sequence[int | None]
    ) -> list[Sample]:
        """Convert a reading into one row for each device, at least one.

        Args:
            head: first fields of the rows, from `run` to `steps`.
            reading: the reading.
            host: background reading at the same time.
            between: each device's peak before the batch.
        """
        own = (host.rss_bytes, host.swap_bytes)
        parts = zip(self._devices, reading, between, strict=True)
        return [
            Sample._make((*head, device.name, in_use, peak, before, reserved, *driver, *own))
            for device, ((in_use, peak, reserved), driver), before in parts
        ]

    def read_rows(self, host: BackgroundReading) -> list[Sample]:
        """Return rows of a reading outside batches. Their peaks, since the previous reading, are between batches."""
        reading = self.read()
        return self.make_rows(_NO_BATCH, reading, host, [peak for (_, peak, _), _ in reading])

    def read_driver(self) -> int | None:
        """Read the driver, and return the bytes in use on the fullest card. Too slow for a batch's hook."""
        for device in self._devices:
            if device.card is None or self._nvml is None:
                continue
            memory, why_not = self._nvml.memory(device.card)
            if memory is None:
                device.card = None  # it does not come back within a run, and reading costs time
                device.driver = (None, None)
                self._note(f"driver: {device.name}: {why_not}")
            else:
                device.driver = (memory.used_bytes, memory.total_bytes)
        return largest_known(device.driver[0] for device in self._devices)

    def _take(self, device: _Device) -> _Sizes:
        """Return bytes in use, peak since the last time and bytes reserved, and update the run's peak."""
        reader = device.reader
        if reader is None:
            return None, None, None
        try:
            in_use, peak, reserved = reader.read()
        except Exception as error:  # a device that went away must not stop training
            device.reader = None
            reader.close()
            self._note(f"allocator: {device.name} could no longer be read: {error}")
            return None, None, None
        if reader.refusal is not None:
            self._note(f"peaks: {device.name} cannot reset its own ({reader.refusal}), so they are not known")
        if peak is not None and (device.run_peak is None or peak > device.run_peak):
            device.run_peak = peak
        return in_use, peak, reserved

    def _note_circumstances(self) -> None:
        """Note a memory limit, scarce memory, and other processes on the cards."""
        if (text := limit_note()) is not None:
            self._note(text)
        for device in self._devices:
            if device.card is None or self._nvml is None:
                continue
            for other in others_on_card(self._nvml, device.card, device.driver[1]):
                self._note(f"card: {device.name}: {other}")

    def _find_card(self, device: TrackedDevice) -> NvmlDevice | None:
        if self._nvml is None or device.ordinal is None:
            return None
        card = match_card(self._nvml.devices, os.environ, device.ordinal, device.card)
        if card is None:
            self._note(f"driver: GPU:{device.ordinal}: the driver does not list this card, or several of its name")
        return card
