"""The largest of each size over an epoch, device by device."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from kerasmem.devices.host import ProcessReading
from kerasmem.monitoring.device_reader import DeviceReading
from kerasmem.monitoring.phases import largest_known
from kerasmem.monitoring.timeline import Sample
from kerasmem.units import format_size

LOG_SIZES = (
    "peak_bytes", "in_use_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes", "tree_bytes", "swap_bytes",
)  # fmt: skip


class EpochMaxima:
    """Takes in an epoch's readings and keeps the largest of each size.

    Args:
        epoch: Keras's number of the epoch.
        devices: names of the devices, in the order of the readings.

    Attributes:
        steps: batches trained.
    """

    def __init__(self, epoch: int, devices: Sequence[str | None]) -> None:
        self.epoch = epoch
        self.steps = 0
        self._highest = -1  # of the peaks of batches
        self._where = ""
        self._devices = [DeviceReading(name, None, None, None, None, None) for name in devices]
        self._between: list[int | None] = [None] * len(devices)
        self._host: tuple[int | None, int | None] = (None, None)
        self._tree: int | None = None

    def add(
        self,
        readings: Sequence[DeviceReading],
        between: Sequence[int | None],
        host: ProcessReading | None,
        where: str = "",
    ) -> None:
        """Take in one moment; `between` are the peaks before it, `where` names the batch, for people."""
        for place, reading in enumerate(readings):
            held = self._devices[place]
            if reading != held:
                self._devices[place] = DeviceReading(held.device, *map(_larger, held[1:], reading[1:]))
            self._between[place] = _larger(self._between[place], between[place])
            peak = reading.peak_bytes
            if peak is not None and peak > self._highest:
                self._highest, self._where = peak, where
        if host is not None:
            self._host = (_larger(self._host[0], host[0]), _larger(self._host[1], host[1]))

    def add_background(self, rss: int | None, tree: int | None, swap: int | None) -> None:
        """Take in the largest sizes that background readings found in the epoch so far."""
        self._host = (_larger(self._host[0], rss), _larger(self._host[1], swap))
        self._tree = _larger(self._tree, tree)

    def largest(self, size: str) -> int | None:
        """Return the largest of a size over all devices; the peak counts the time between batches."""
        if size in ("rss_bytes", "swap_bytes"):
            return self._host[size == "swap_bytes"]
        if size == "tree_bytes":
            return _larger(self._tree, self._host[0])
        values = [getattr(device, size) for device in self._devices]
        if size == "peak_bytes":
            values += self._between
        return largest_known(values)

    def rows(self, run: int, moment: float) -> list[Sample]:
        """Return the epoch's rows, one a device."""
        rows = []
        for (name, in_use, peak, reserved, used, total), between in zip(self._devices, self._between, strict=True):
            sizes = (in_use, _larger(peak, between), between, reserved, used, total, *self._host)
            rows.append(Sample(run, moment, "epoch", self.epoch, None, self.steps, name, *sizes))
        return rows

    def logs(self, known: Collection[str]) -> dict[str, float]:
        """Return what goes into Keras's `logs`: the sizes `known` at the start, NaN if one failed since."""
        values = {size: self.largest(size) for size in LOG_SIZES if size in known}
        return {f"memory_{size}": math.nan if value is None else float(value) for size, value in values.items()}

    def line(self) -> str:
        """Return a line for people."""
        parts = []
        if (peak := self.largest("peak_bytes")) is not None:
            where = self._where if self._highest == peak else "between logged batches"
            parts.append(f"peak {format_size(peak)} {where}")
        if (in_use := self.largest("in_use_bytes")) is not None:
            parts.append(f"in use up to {format_size(in_use)}")
        if (used := self.largest("driver_used_bytes")) is not None:
            parts.append(f"driver {format_size(used)} of {format_size(self.largest('driver_total_bytes'))}")
        if (rss := self.largest("rss_bytes")) is not None:
            tree = self.largest("tree_bytes") or rss
            parts.append(f"host {format_size(rss)}" + (f" ({format_size(tree)} with workers)" if tree > rss else ""))
        if swap := self.largest("swap_bytes"):
            parts.append(f"swapped out {format_size(swap)}")
        devices = ", ".join(device.device for device in self._devices if device.device) or "host"
        return f"memory, epoch {self.epoch + 1} ({devices}): {', '.join(parts) or 'nothing can be read'}"


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return one if one >= other else other
