"""Keeps the largest of each size over an epoch, device by device."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from kerasmem.monitoring.device_reader import DeviceReading
from kerasmem.monitoring.timeline import Sample, largest_known
from kerasmem.units import MIB, format_size

LOG_SIZES = (
    "peak_bytes", "in_use_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes", "tree_bytes", "swap_bytes",
)  # fmt: skip


class EpochMaxima:
    """Keeps the largest of each size in an epoch's readings.

    Args:
        epoch: Keras's number of the epoch.
        devices: names of the devices, in the order of the readings; at least one.

    Attributes:
        steps: number of batches trained.
    """

    def __init__(self, epoch: int, devices: Sequence[str | None]) -> None:
        self.epoch = epoch
        self.steps = 0
        self._rows = [Sample(0, 0.0, "epoch", epoch, None, 0, device, *[None] * 8) for device in devices]
        self._tree: int | None = None

    def add(self, samples: Sequence[Sample]) -> None:
        """Add one sample per device."""
        for number, (row, sample) in enumerate(zip(self._rows, samples, strict=True)):
            if sample[7:] != row[7:]:
                self._rows[number] = Sample(*row[:7], *map(_larger, row[7:], sample[7:]))

    def add_after(self, readings: Sequence[DeviceReading]) -> None:
        """Add the readings after the last batch. Their peaks count as between batches."""
        head = self._rows[0][:6]
        self.add([Sample(*head, device, in_use, None, peak, *rest) for device, in_use, peak, *rest in readings])

    def add_background(self, rss: int | None, tree: int | None, swap: int | None) -> None:
        """Add the largest background readings of the epoch so far."""
        self._rows = [
            row._replace(rss_bytes=_larger(row.rss_bytes, rss), swap_bytes=_larger(row.swap_bytes, swap))
            for row in self._rows
        ]
        self._tree = _larger(self._tree, tree)

    def largest(self, size: str) -> int | None:
        """Return the largest of a size over all devices. The peak includes the time between batches."""
        if size == "tree_bytes":
            return _larger(self._tree, self.largest("rss_bytes"))
        largest = largest_known(getattr(row, size) for row in self._rows)
        return _larger(largest, self.largest("between_peak_bytes")) if size == "peak_bytes" else largest

    def rows(self, run: int, moment: float) -> list[Sample]:
        """Return one row for each device."""
        return [
            row._replace(
                run=run, time=moment, steps=self.steps, peak_bytes=_larger(row.peak_bytes, row.between_peak_bytes)
            )
            for row in self._rows
        ]

    def logs(self, known: Collection[str], *, in_bytes: bool) -> dict[str, float]:
        """Return the values for Keras's `logs`, NaN if a reading has failed since the start.

        Args:
            known: sizes that could be read at the start.
            in_bytes: whether to return all sizes, rather than one figure in MiB: the device peak, or else the
                memory of this process.
        """
        values = {size: self.largest(size) for size in LOG_SIZES if size in known}
        if not in_bytes:
            first = next((values[size] for size in ("peak_bytes", "rss_bytes") if size in values), None)
            return {"memory_mib": math.nan if first is None else round(first / MIB, 1)} if values else {}
        return {f"memory_{size}": math.nan if value is None else float(value) for size, value in values.items()}

    def line(self) -> str:
        """Return one line to print."""
        parts = []
        if (peak := self.largest("peak_bytes")) is not None:
            parts.append(f"peak {format_size(peak)}")
        if (in_use := self.largest("in_use_bytes")) is not None:
            parts.append(f"in use up to {format_size(in_use)}")
        if (used := self.largest("driver_used_bytes")) is not None:
            parts.append(f"driver {format_size(used)} of {format_size(self.largest('driver_total_bytes'))}")
        if (rss := self.largest("rss_bytes")) is not None:
            tree = self.largest("tree_bytes") or rss
            parts.append(f"host {format_size(rss)}" + (f" ({format_size(tree)} with workers)" if tree > rss else ""))
        if swap := self.largest("swap_bytes"):
            parts.append(f"swapped out {format_size(swap)}")
        devices = ", ".join(row.device for row in self._rows if row.device) or "host"
        return f"memory, epoch {self.epoch + 1} ({devices}): {', '.join(parts) or 'nothing can be read'}"


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return one if one >= other else other
