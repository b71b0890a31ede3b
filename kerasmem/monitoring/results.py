"""Health of the allocators' free memory, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.devices.health import AllocatorHealth
from kerasmem.units import format_size


@dataclass(frozen=True)
class EpochHealth:
    """An allocator's health at an epoch's end.

    Attributes:
        run: number of the run, as in `Sample`.
        epoch: Keras's number of the epoch.
        health: what was found.
    """

    run: int
    epoch: int | None
    health: AllocatorHealth

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, in bytes."""
        return {"run": self.run, "epoch": self.epoch, **self.health.to_dict()}


def health_notes(found: Sequence[EpochHealth], run: int, driver: Mapping[str, int]) -> list[str]:
    """Return sentences for people on the end of a run.

    Args:
        found: all readings.
        run: the run.
        driver: bytes in use on each device's card, by all processes, as the driver says.
    """
    said = []
    own = [entry.health for entry in found if entry.run == run]
    for device in dict.fromkeys(health.device for health in own):
        first, *_, last = [health for health in own if health.device == device] * 2
        said += [f"health: {text}" for text in last.explain(driver.get(device))]
        reserved, in_use = last.reserved_bytes - first.reserved_bytes, last.in_use_bytes - first.in_use_bytes
        if reserved > 0 and reserved > 2 * max(in_use, 0):
            said.append(
                f"health: {device}: reserved grew by {format_size(reserved)} from the first epoch's end to the "
                f"last's, in use by {format_size(in_use)}: new memory was taken because what was free did not fit; "
                "it does not go back before the process ends"
            )
    return said
