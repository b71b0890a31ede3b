"""Does an interval fit a device? Pure arithmetic."""

from __future__ import annotations

from kerasmem.devices.cards import all_cards
from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.estimation.report import Bytes, DeviceVerdict, Outcome

FITS, TOO_CLOSE, DOES_NOT_FIT = "fits", "too close to call", "does not fit"


def verdict(need: Bytes, available_bytes: int) -> str:
    """Return "fits", "does not fit", or "too close to call" if the interval straddles the available bytes.

    A method that knows no upper end never says "fits"; one that claims no interval is taken by its total.

    Examples:
        >>> verdict(Bytes(10, 8, 12, *[None] * 7), 11)
        'too close to call'
    """
    return judge(*bounds(need), available_bytes)


def bounds(need: Bytes) -> tuple[int, int | None]:
    """Return both ends of the bytes that a step must have; its total if the method claims no interval."""
    return (need.total, need.total) if need.low is None else (need.low, need.most_needed)


def at_least(need: Bytes | Outcome) -> int:
    """Return the lower end of an interval, or the total if none is claimed."""
    return need.total if need.low is None else need.low


def at_most(need: Bytes | Outcome) -> int:
    """Return the most that a step must have, or the total if no upper end is known."""
    return need.total if need.most_needed is None else need.most_needed


def judge(low: int, high: int | None, limit: int) -> str:
    """Return the verdict on an interval."""
    if low > limit:
        return DOES_NOT_FIT
    return FITS if high is not None and high <= limit else TOO_CLOSE


def fitting_cards(need: Bytes) -> list[str]:
    """List the cards of the catalogue that a step fits, by memory."""
    fitting = (card for card in all_cards() if verdict(need, card.available_bytes) == FITS)
    return [card.name for card in sorted(fitting, key=lambda card: card.memory_bytes)]


def device_verdict(device: DeviceTarget | DeviceVerdict, need: Bytes) -> DeviceVerdict:
    """Return whether a step fits a device, with the device's figures."""
    found = verdict(need, device.available_bytes)
    return DeviceVerdict(device.name, device.memory_bytes, device.available_bytes, found, device.note)
