"""From CUDA ordinals, and so TensorFlow's GPU:0, to NVML devices.

NVML lists every GPU by its place on the bus. CUDA lists those that CUDA_VISIBLE_DEVICES lets through, in that
variable's order; if it holds numbers they count GPUs in the order that CUDA_DEVICE_ORDER asks for:
PCI_BUS_ID, or (by default) the fastest first, which only CUDA knows where the cards differ. Sources: the
"CUDA Environment Variables" chapter of NVIDIA's CUDA C++ Programming Guide, and the MIG User Guide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kerasmem.devices.nvml import NvmlDevice


@dataclass(frozen=True)
class Match:
    """The NVML device behind a CUDA ordinal.

    Attributes:
        device: the device, or None if none was found.
        doubt: why the match is only the likeliest one, or why there is none; None when it is certain.
    """

    device: NvmlDevice | None
    doubt: str | None = None


def visible_devices(devices: Sequence[NvmlDevice], environ: Mapping[str, str]) -> list[Match]:
    """Return the devices that CUDA sees, in CUDA's order.

    Args:
        devices: everything that NVML lists, MIG instances included.
        environ: environment variables; CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are read.

    Returns:
        One match for each CUDA ordinal.
    """
    whole = sorted((device for device in devices if device.parent_uuid is None), key=_bus)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_bus or len({device.name for device in whole}) < 2:
        doubt = None
    else:
        doubt = (
            "the GPUs here differ and CUDA numbers the fastest first, which the driver does not tell; "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID makes the numbers certain"
        )
    if wanted is None:
        return _enumerated([Match(device, doubt) for device in whole], devices)
    found: list[Match] = []
    for entry in (part.strip() for part in wanted.split(",")):
        match = _one(entry, whole, devices, doubt)
        if match is None:  # CUDA stops at the first entry that is not a device
            break
        found.append(match)
    return _enumerated(found, devices)


def match_card(
    devices: Sequence[NvmlDevice], environ: Mapping[str, str], ordinal: int, card: str | None = None
) -> Match:
    """Return the NVML device behind a CUDA ordinal.

    Args:
        devices: everything that NVML lists.
        environ: environment variables, as in `visible_devices`.
        ordinal: the ordinal of the GPU in the list that CUDA gives to this process.
        card: the name that CUDA gives the GPU, which settles the matter where the cards differ.
    """
    visible = visible_devices(devices, environ)
    chosen = visible[ordinal] if ordinal < len(visible) else Match(None)
    if card is None or (chosen.device is not None and _same_name(chosen.device, card)):
        if chosen.device is None:
            return Match(None, f"the driver lists {len(visible)} visible GPUs, and this is number {ordinal}")
        if chosen.doubt and sum(_same_name(device, card or "") for device in devices) == 1:
            return Match(chosen.device)
        return chosen
    named = [device for device in devices if _same_name(device, card)]
    if len(named) == 1:
        return Match(named[0])
    if not named:
        return Match(None, f"the driver lists no {card}")
    return Match(None, f"the driver lists {len(named)} devices called {card}, and which one this is is not known")


def _one(entry: str, whole: Sequence[NvmlDevice], devices: Sequence[NvmlDevice], doubt: str | None) -> Match | None:
    """Return the device of one entry of CUDA_VISIBLE_DEVICES."""
    if entry.isdecimal():
        return Match(whole[int(entry)], doubt) if int(entry) < len(whole) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    named = [device for device in devices if (device.uuid or "").startswith(entry)]
    return Match(named[0]) if len(named) == 1 else None  # a beginning is enough if it fits one device only


def _enumerated(found: list[Match], devices: Sequence[NvmlDevice]) -> list[Match]:
    """Replace divided GPUs by instances. CUDA gives a process one instance of each."""
    result = []
    for match in found:
        device = match.device
        if device is not None and device.mig:
            inside = [other for other in devices if other.parent_uuid == device.uuid]
            doubt = None
            if len(inside) != 1:
                doubt = f"{device.name} is divided into {len(inside)} MIG instances; CUDA takes the first"
            match = replace(match, device=inside[0] if inside else None, doubt=doubt or match.doubt)
        result.append(match)
    return result


def _bus(device: NvmlDevice) -> tuple[bool, str, int]:
    return device.pci_bus_id is None, device.pci_bus_id or "", device.index


def _same_name(device: NvmlDevice, card: str) -> bool:
    return (device.name or "").removeprefix("NVIDIA ") == card.removeprefix("NVIDIA ")
