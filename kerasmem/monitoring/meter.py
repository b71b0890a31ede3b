"""One reading of every device, the driver and the host; true peaks between one reading and the next.

The allocator's peak is that since the last reset. The meter resets it at every reading, so that each peak is
that of the stretch since the reading before, and keeps the largest of them: nothing is lost to the resets but
what `tf.config.experimental.get_memory_info` says afterwards, and `process_peaks` has that. Several meters share
what each of them reads (`peaks.py`), so that the resets of one do not spoil the peaks of another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kerasmem.devices.allocator import Allocator
from kerasmem.devices.health import AllocatorHealth, read_health
from kerasmem.devices.host import HostReader, ProcessReading
from kerasmem.devices.limits import read_limits
from kerasmem.devices.nvml import Nvml, NvmlDevice
from kerasmem.devices.other_allocators import JaxAllocator, TorchAllocator
from kerasmem.devices.sharing import card_processes
from kerasmem.devices.tracked_devices import tracked_devices
from kerasmem.devices.visible import match_card
from kerasmem.monitoring.peaks import LedgerAccount, ledger_of
from kerasmem.units import format_size


class DeviceReading(NamedTuple):
    """A device's sizes in bytes; `peak_bytes` is that since the reading before."""

    device: str | None
    in_use_bytes: int | None
    peak_bytes: int | None
    reserved_bytes: int | None
    driver_used_bytes: int | None
    driver_total_bytes: int | None


_Driver = tuple["int | None", "int | None"]
_Sizes = tuple["int | None", "int | None", "int | None"]
# For each device in use, peak and reserved, the driver's used and total; and the host.
Caught = tuple["list[tuple[_Sizes, _Driver]]", "bytes | int | None"]


class _Gauge:
    """One device: what to read it with, and the largest peak of the run."""

    __slots__ = ("account", "allocator", "card", "driver", "ledger", "name", "resets", "run_peak")

    def __init__(self, name: str | None, allocator: Allocator | None, card: NvmlDevice | None, resets: bool) -> None:
        self.name = name
        self.allocator = allocator
        self.card = card
        self.driver: _Driver = (None, None)  # used and total, when last asked
        self.resets = resets
        self.ledger = None if allocator is None else ledger_of(allocator)
        self.account = LedgerAccount()
        self.run_peak: int | None = None

    @property
    def process_peak(self) -> int | None:
        return None if self.ledger is None else self.ledger.process_peak


class Meter:
    """Reads all devices in one call, and never raises because a reading failed.

    Args:
        note: called with each new sentence on what cannot be read and why.
        devices: logical devices to read; default: every GPU, or the CPU where there is none.
        nvml: a connection to the driver to use; True or "auto" opens one where there is a GPU; False none.
        reset_peaks: False leaves the allocator's peak alone; a stretch's peak is then known only where it
            rose above all before it.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        *,
        devices: Sequence[str] | None = None,
        nvml: Nvml | bool | str = "auto",
        reset_peaks: bool = True,
    ) -> None:
        self.pid = os.getpid()
        self._note = note
        self._host = HostReader()
        self._nvml: Nvml | None = None
        self._owns_nvml = False
        found, notes = tracked_devices(devices)
        for text in notes:
            note(text)
        has_gpu = any(device.ordinal is not None for device in found)
        if nvml is not False and (has_gpu or nvml is True or isinstance(nvml, Nvml)):
            self._connect(nvml)
        elif nvml is not False and any(device.name for device in found):
            note("driver: training uses no GPU, so there is no driver to ask")
        self._gauges = []
        for device in found:
            card = self._card(device.ordinal, device.card) if device.ordinal is not None else None
            self._gauges.append(_Gauge(device.name, device.allocator, card, reset_peaks))

    @property
    def names(self) -> list[str | None]:
        """The devices read, in order."""
        return [gauge.name for gauge in self._gauges]

    @property
    def run_peaks(self) -> dict[str, int]:
        """The largest allocator peak of each device since `start_run`, in bytes, where it is known."""
        return {gauge.name: gauge.run_peak for gauge in self._gauges if gauge.name and gauge.run_peak is not None}

    @property
    def process_peaks(self) -> dict[str, int]:
        """The largest allocator peak of each device since the process began, in bytes, where it is known."""
        return {
            gauge.name: gauge.process_peak for gauge in self._gauges if gauge.name and gauge.process_peak is not None
        }

    def start_run(self) -> tuple[list[DeviceReading], ProcessReading | None]:
        """Forget the run's peaks, not the process's, and return a first reading; ask the driver before."""
        for gauge in self._gauges:
            if gauge.ledger is not None:
                gauge.ledger.join(gauge.account)
        self._note_circumstances()
        readings, host = self.read()
        for gauge, reading in zip(self._gauges, readings, strict=True):
            gauge.run_peak = reading.in_use_bytes if gauge.resets else None
        return readings, host

    def end_run(self) -> None:
        """Take the run's last peaks; what other meters read from then on is no business of this one."""
        self.peaks()
        for gauge in self._gauges:
            if gauge.ledger is not None:
                gauge.ledger.leave(gauge.account)

    def peaks(self) -> list[int | None]:
        """Return each device's peak since the reading before; the cheap half of a reading."""
        return [self._take(gauge)[1] for gauge in self._gauges]

    def read(self) -> tuple[list[DeviceReading], ProcessReading | None]:
        """Return a reading of each device, and of the host; the driver's part is as `read_driver` last left it."""
        return self.unpack(self.catch())

    def catch(self) -> Caught:
        """Take the same reading in the fewest steps; `unpack` makes sizes of it later."""
        sizes = []
        for gauge in self._gauges:  # before Python 3.12 a comprehension is a call
            sizes.append((self._take(gauge), gauge.driver))
        try:
            return sizes, self._host.catch()
        except Exception as error:  # psutil has several kinds
            self._note(f"host: this process's memory cannot be read: {error}")
            return sizes, None

    def unpack(self, caught: Caught) -> tuple[list[DeviceReading], ProcessReading | None]:
        """Return what `catch` caught."""
        sizes, host = caught
        readings = [
            DeviceReading(gauge.name, in_use, peak, reserved, *driver)
            for gauge, ((in_use, peak, reserved), driver) in zip(self._gauges, sizes, strict=True)
        ]
        return readings, None if host is None else self._host.unpack(host)

    def read_driver(self) -> int | None:
        """Ask the driver, and return the bytes in use on the fullest card; too slow for a batch's hook."""
        for gauge in self._gauges:
            gauge.driver = self._driver(gauge)
        return max((gauge.driver[0] for gauge in self._gauges if gauge.driver[0] is not None), default=None)

    def driver_used(self) -> dict[str, int]:
        """Return the bytes in use on each device's card, as the driver last said."""
        return {gauge.name: gauge.driver[0] for gauge in self._gauges if gauge.name and gauge.driver[0] is not None}

    def health(self) -> list[AllocatorHealth]:
        """Return how whole each allocator's free memory is, where it tells; milliseconds each."""
        found = []
        for gauge in self._gauges:
            if gauge.name is None or gauge.allocator is None:
                continue
            if isinstance(gauge.allocator, (JaxAllocator, TorchAllocator)):
                self._note(f"health: {gauge.name}: only TensorFlow's allocator is asked; Keras runs on another backend")
                continue
            self._take(gauge)  # what is allocated for asking must not count as training's peak
            health, why_not = read_health(gauge.name)
            if gauge.resets:
                gauge.allocator.reset()
            if health is not None:
                found.append(health)
            elif why_not is not None:
                self._note(why_not)
        return found

    def close(self) -> None:
        """Let go of the driver and of open files; may be called more than once."""
        self._host.close()
        if self._nvml is not None and self._owns_nvml:
            self._nvml.close()

    def _take(self, gauge: _Gauge) -> _Sizes:
        """Return in use, peak since last time and reserved, and fold the peak into the largest."""
        allocator, ledger = gauge.allocator, gauge.ledger
        if allocator is None or ledger is None:
            return None, None, None
        try:
            in_use, peak, reserved = ledger.take(allocator, gauge.account, gauge.resets)
        except Exception as error:  # a device that went away must not stop training
            gauge.allocator = None
            self._note(f"allocator: {gauge.name} could no longer be read: {error}")
            return None, None, None
        if gauge.resets and ledger.refusal is not None:
            gauge.resets = False
            self._note(f"peaks: {gauge.name} cannot reset its own ({ledger.refusal}); known only where it rose")
        if peak is not None and (gauge.run_peak is None or peak > gauge.run_peak):
            gauge.run_peak = peak
        return in_use, peak, reserved

    def _driver(self, gauge: _Gauge) -> tuple[int | None, int | None]:
        if gauge.card is None or self._nvml is None:
            return None, None
        memory, why_not = self._nvml.memory(gauge.card)
        if memory is None:
            gauge.card = None  # it does not come back within a run, and asking costs
            self._note(f"driver: {gauge.name}: {why_not}")
            return None, None
        return memory.used_bytes, memory.total_bytes

    def _note_circumstances(self) -> None:
        """Note a limit below what the machine has, scarce memory, and who else is on the cards."""
        for text in read_limits().notes:
            self._note(text)
        for gauge in self._gauges:
            if gauge.card is None or self._nvml is None:
                continue
            for other in card_processes(self._nvml, gauge.card, gauge.driver[1])[0]:
                if not other.own and other.used_bytes is not None:
                    share = "" if other.share is None else f", {other.share:.0%} of the card".replace("%", " %")
                    who = f"process {other.pid}" + (f" ({other.name!r})" if other.name else "")
                    self._note(f"card: {gauge.name}: {who} has {format_size(other.used_bytes)} there{share}")

    def _connect(self, nvml: Nvml | bool | str) -> None:
        if isinstance(nvml, Nvml):
            self._nvml = nvml
            return
        self._nvml, reason = Nvml.open()
        self._owns_nvml = True
        if reason is not None:
            self._note(f"driver: {reason}")

    def _card(self, ordinal: int, name: str | None) -> NvmlDevice | None:
        if self._nvml is None:
            return None
        match = match_card(self._nvml.devices, os.environ, ordinal, name)
        if match.doubt is not None:
            self._note(f"driver: GPU:{ordinal}: {match.doubt}")
        return match.device
