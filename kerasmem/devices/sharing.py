"""Who else is on the cards."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kerasmem.devices.nvml import Nvml, NvmlApi, NvmlDevice
from kerasmem.records import Record


@dataclass(frozen=True)
class CardProcess(Record, what="process on a card"):
    """A process with memory on a card.

    Attributes:
        device: the card's name.
        uuid: the card.
        pid: of the process, as the driver counts them (another number inside some containers).
        name: of the program; None where it cannot be seen from here.
        user: who runs it; None where it cannot be seen from here.
        used_bytes: what it has there; None where the driver does not tell.
        share: that, as a part of the card's memory from 0 to 1; None where either is not known.
        own: whether it is this process.
    """

    device: str | None
    uuid: str | None
    pid: int
    name: str | None
    user: str | None
    used_bytes: int | None
    share: float | None
    own: bool


def card_processes(nvml: Nvml, device: NvmlDevice, total_bytes: int | None) -> tuple[list[CardProcess], str | None]:
    """Return who has memory on a card, the largest first, and why that is not known. Takes milliseconds.

    Args:
        nvml: the open connection that the device came from.
        device: the card.
        total_bytes: the card's memory, where it is known.
    """
    found, why_not = nvml.processes(device)
    rows = []
    for pid, used in found or ():
        share = used / total_bytes if used is not None and total_bytes else None
        name, user = _program(pid)
        rows.append(CardProcess(device.name, device.uuid, pid, name, user, used, share, pid == os.getpid()))
    return sorted(rows, key=lambda row: row.used_bytes or 0, reverse=True), why_not


def _program(pid: int) -> tuple[str | None, str | None]:
    """Return the name and the user of a process, where they can be seen."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.name(), process.username()
    except (psutil.Error, KeyError, OSError):  # gone, another's, or of a user without a name
        return None, None


def all_card_processes(api: NvmlApi | None = None) -> list[CardProcess]:
    """Return who has memory on the cards of this machine; empty where there is no driver.

    Args:
        api: what to ask in place of nvidia-ml-py, such as a recording.

    Examples:
        >>> all(process.pid > 0 for process in all_card_processes())
        True
    """
    nvml, _ = Nvml.open(api)
    if nvml is None:
        return []
    try:
        found = []
        for device in nvml.devices:
            memory, _ = nvml.memory(device)
            found += card_processes(nvml, device, None if memory is None else memory.total_bytes)[0]
        return found
    finally:
        nvml.close()
