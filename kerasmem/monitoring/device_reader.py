"""Reads devices, driver and host in one call, with true peaks between readings.

An allocator has one peak, that since its last reset. To get the peak of each stretch, a reader resets it at every
reading, so `tf.config.experimental.get_memory_info` afterwards returns the peak since then only. All readers of a
process share a ledger for each allocator, so that no reset loses the peak of another reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.devices.host import limit_note
from kerasmem.devices.machine import match_card, others_on_card
from kerasmem.devices.nvml import Nvml, NvmlDevice
from kerasmem.devices.training_devices import Allocator, tracked_devices
from kerasmem.monitoring.sampler import BackgroundReading
from kerasmem.monitoring.timeline import largest_known


class LedgerAccount:
    """The largest peak since a reader's last reading, in bytes."""

    __slots__ = ("peak",)

    def __init__(self) -> None:
        self.peak = 0


class PeakLedger:
    """Shares the readings of one allocator between its readers. Use `ledger_of` to get this process's ledger.

    Attributes:
        refusal: exception of a reset that failed. Peaks are unknown from then on.
    """

    __slots__ = ("_accounts", "_lock", "refusal")

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self._lock = threading.RLock()
        self._accounts: list[LedgerAccount] = []

    def join(self, account: LedgerAccount) -> None:
        """Record peaks in an account from now on."""
        with self._lock:
            account.peak = 0
            self._accounts.append(account)

    def leave(self, account: LedgerAccount) -> None:
        """Stop recording peaks in an account."""
        with self._lock:
            self._accounts = [other for other in self._accounts if other is not account]

    def take(self, allocator: Allocator, account: LedgerAccount) -> tuple[int, int | None, int | None]:
        """Read the allocator and reset its peak.

        This runs twice a batch, each time with cold processor caches, so it calls few functions.

        Args:
            allocator: allocator to read, equal to the ledger's.
            account: the reader's account.

        Returns:
            Bytes in use, peak since the account's last reading (None if it cannot be reset), and bytes reserved.
        """
        with self._lock:
            in_use, peak, reserved = allocator.read()
            if self.refusal is not None:
                return in_use, None, reserved
            for other in self._accounts:
                if peak > other.peak:
                    other.peak = peak
            try:
                allocator.reset()
            except Exception as error:  # not every allocator can; the reading is still valid
                self.refusal = error
                return in_use, None, reserved
            own, account.peak = account.peak, 0
            return in_use, own, reserved


_ledgers: dict[Allocator, PeakLedger] = {}


def ledger_of(allocator: Allocator) -> PeakLedger:
    """Return the ledger of an allocator in this process. Equal allocators share one."""
    return _ledgers.setdefault(allocator, PeakLedger())


def running_allocators() -> list[Allocator]:
    """Return the allocators of this process, without loading TensorFlow or starting its devices."""
    if not devices_are_started():
        return []
    tracked, _ = tracked_devices()
    return [device.allocator for device in tracked if device.allocator is not None]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ledgers.clear)  # a lock may have been held


class DeviceReading(NamedTuple):
    """Sizes of a device and of the host at the same moment, in bytes. `peak_bytes` is since the previous reading."""

    device: str | None
    in_use_bytes: int | None
    peak_bytes: int | None
    reserved_bytes: int | None
    driver_used_bytes: int | None
    driver_total_bytes: int | None
    rss_bytes: int | None
    swap_bytes: int | None


_Driver = tuple["int | None", "int | None"]
_Sizes = tuple["int | None", "int | None", "int | None"]
RawReading = list[tuple[_Sizes, _Driver]]  # for each device: in use, peak and reserved; the driver's used and total


@dataclass(slots=True)
class _Device:
    """A device, the driver's latest reading (used and total bytes), and the largest peak of the run."""

    name: str | None
    allocator: Allocator | None
    card: NvmlDevice | None
    ledger: PeakLedger | None
    account: LedgerAccount
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
            card = self._card(device.ordinal, device.card) if device.ordinal is not None else None
            ledger = None if device.allocator is None else ledger_of(device.allocator)
            self._devices.append(_Device(device.name, device.allocator, card, ledger, LedgerAccount()))

    @property
    def names(self) -> list[str | None]:
        """The devices read, in order."""
        return [device.name for device in self._devices]

    def start_run(self, host: BackgroundReading) -> list[DeviceReading]:
        """Return a first reading. The run's peaks start from the memory in use."""
        for device in self._devices:
            if device.ledger is not None:
                device.ledger.join(device.account)
        self._note_circumstances()
        readings = self.read(host)
        for device, reading in zip(self._devices, readings, strict=True):
            device.run_peak = reading.in_use_bytes if reading.peak_bytes is not None else None
        return readings

    def end_run(self) -> dict[str, int]:
        """Release the devices and the driver, and return each device's largest peak of the run, in bytes."""
        self.peaks()
        for device in self._devices:
            if device.ledger is not None:
                device.ledger.leave(device.account)
        if self._nvml is not None:
            self._nvml.close()
        peaks = ((device.name, device.run_peak) for device in self._devices)
        return {name: size for name, size in peaks if name and size is not None}

    def peaks(self) -> list[int | None]:
        """Return each device's peak since the previous reading."""
        return [self._take(device)[1] for device in self._devices]

    def read(self, host: BackgroundReading) -> list[DeviceReading]:
        """Return a reading of each device, at least one. The driver's sizes are from the latest `read_driver`.

        Args:
            host: the latest background reading.
        """
        return self.unpack(self.read_raw(), host)

    def read_raw(self) -> RawReading:
        """Take a reading quickly, for `unpack` to convert later."""
        sizes = []
        for device in self._devices:  # before Python 3.12 a comprehension is a call
            sizes.append((self._take(device), device.driver))
        return sizes

    def unpack(self, raw: RawReading, host: BackgroundReading) -> list[DeviceReading]:
        """Convert a raw reading."""
        pairs = zip(self._devices, raw, strict=True)
        own = (host.rss_bytes, host.swap_bytes)
        return [DeviceReading(device.name, *allocator, *driver, *own) for device, (allocator, driver) in pairs]

    def read_driver(self) -> int | None:
        """Read the driver, and return the bytes in use on the fullest card. Too slow for a batch's hook."""
        for device in self._devices:
            device.driver = self._driver(device)
        return largest_known(device.driver[0] for device in self._devices)

    def _take(self, device: _Device) -> _Sizes:
        """Return bytes in use, peak since the last time and bytes reserved, and update the run's peak."""
        allocator, ledger = device.allocator, device.ledger
        if allocator is None or ledger is None:
            return None, None, None
        try:
            in_use, peak, reserved = ledger.take(allocator, device.account)
        except Exception as error:  # a device that went away must not stop training
            device.allocator = None
            self._note(f"allocator: {device.name} could no longer be read: {error}")
            return None, None, None
        if ledger.refusal is not None:
            self._note(f"peaks: {device.name} cannot reset its own ({ledger.refusal}), so they are not known")
        if peak is not None and (device.run_peak is None or peak > device.run_peak):
            device.run_peak = peak
        return in_use, peak, reserved

    def _driver(self, device: _Device) -> tuple[int | None, int | None]:
        if device.card is None or self._nvml is None:
            return None, None
        memory, why_not = self._nvml.memory(device.card)
        if memory is None:
            device.card = None  # it does not come back within a run, and reading costs time
            self._note(f"driver: {device.name}: {why_not}")
            return None, None
        return memory.used_bytes, memory.total_bytes

    def _note_circumstances(self) -> None:
        """Note a memory limit, scarce memory, and other processes on the cards."""
        if (text := limit_note()) is not None:
            self._note(text)
        for device in self._devices:
            if device.card is None or self._nvml is None:
                continue
            for other in others_on_card(self._nvml, device.card, device.driver[1]):
                self._note(f"card: {device.name}: {other}")

    def _card(self, ordinal: int, name: str | None) -> NvmlDevice | None:
        if self._nvml is None:
            return None
        card = match_card(self._nvml.devices, os.environ, ordinal, name)
        if card is None:
            self._note(f"driver: GPU:{ordinal}: the driver does not list this card, or several of its name")
        return card
