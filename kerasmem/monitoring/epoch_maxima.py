"""Keeps the largest of each size over an epoch, device by device."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from kerasmem.monitoring.timeline import COLUMNS, SIZES, Sample, largest_known
from kerasmem.units import MIB, format_size

LOG_SIZES = (
    "peak_bytes", "in_use_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes", "tree_bytes", "swap_bytes",
)  # fmt: skip
_FIRST_SIZE = COLUMNS.index(SIZES[0])


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
        """Add samples, one for each device in turn."""
        for number, row in enumerate(self._rows):
            own = [row, *samples[number :: len(self._rows)]]
            sizes = zip(*(sample[_FIRST_SIZE:] for sample in own), strict=True)
            self._rows[number] = Sample._make((*row[:_FIRST_SIZE], *map(largest_known, sizes)))

    def finish(self, run: int, moment: float, rss: int | None, tree: int | None, swap: int | None) -> list[Sample]:
        """Add the largest background readings, and return one row for each device."""
        last = [row._replace(peak_bytes=row.between_peak_bytes, rss_bytes=rss, swap_bytes=swap) for row in self._rows]
        self.add(last)
        self._rows = [row._replace(run=run, time=moment, steps=self.steps) for row in self._rows]
        self._tree = largest_known((tree, self.largest("rss_bytes")))
        return self._rows

    def largest(self, size: str) -> int | None:
        """Return the largest of a size over all devices. Call `finish` first."""
        return self._tree if size == "tree_bytes" else largest_known(getattr(row, size) for row in self._rows)

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
