"""Does an interval fit a device? Pure arithmetic."""

from __future__ import annotations

from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.estimation.report import Bytes, DeviceVerdict

FITS, TOO_CLOSE, DOES_NOT_FIT = "fits", "too close to call", "does not fit"


def verdict(need: Bytes, available_bytes: int) -> str:
    """Return "fits", "does not fit", or "too close to call" where the interval straddles what is available.

    A method that knows no upper end never says "fits"; one that claims no interval is taken by its total.

    Example:
        >>> verdict(Bytes(10, 8, 12, *[None] * 7), 11)
        'too close to call'
    """
    low = need.total if need.low is None else need.low
    if low > available_bytes:
        return DOES_NOT_FIT
    high = need.high if need.low is not None else need.total
    return FITS if high is not None and high <= available_bytes else TOO_CLOSE


def device_verdict(device: DeviceTarget | DeviceVerdict, need: Bytes) -> DeviceVerdict:
    """Return whether a step fits a device, with the device's figures."""
    found = verdict(need, device.available_bytes)
    return DeviceVerdict(device.name, device.memory_bytes, device.available_bytes, found, device.note)
