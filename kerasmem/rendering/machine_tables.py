"""Shows devices: the catalogue of cards, this machine, and the findings of `kerasmem doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.devices.catalogue import Card
from kerasmem.devices.examination import Examination
from kerasmem.devices.machine import LiveMachine
from kerasmem.rendering.formatting import VERDICT_STYLES, fact_list, figures, table
from kerasmem.units import format_size, printable

_REMARK = (
    "Memory is the total that the driver reports, or the nominal size (~) if unknown. "
    "For TensorFlow: without the CUDA context (measured or predicted) and TensorFlow's reserve for the system."
)


def devices_table(cards: Sequence[Card], machine: LiveMachine, terminal: int | None = None) -> RenderableType:
    """Show this machine and the catalogue."""
    return Group(
        Text("In this machine", style="bold"),
        _machine(machine, terminal),
        *(Text(printable(line)) for line in _remarks(machine)),
        "",
        Text("Catalogue (the names that --device takes)", style="bold"),
        _catalogue(cards, terminal),
        Text(_REMARK, style="dim"),
    )


def _remarks(machine: LiveMachine) -> Iterable[str]:
    """Yield the reason for a missing GPU and notes on the devices."""
    if machine.reason:
        yield f"No GPU: {machine.reason}"
    yield from machine.notes
    for device in machine.devices:
        yield from device.notes


def _machine(machine: LiveMachine, terminal: int | None) -> Table:
    rows = table(terminal, "Device", *map(figures, ("Memory", "In use", "Free")))
    for device in machine.devices:
        number = "hidden" if device.cuda_index is None else f"GPU:{device.cuda_index}"
        name = f"{number}  {printable(device.name or '?', 60)}"
        rows.add(name, device.total_bytes, device.used_bytes, device.free_bytes)
    host = machine.host
    rows.add("Host", host.total_bytes, host.total_bytes - host.available_bytes, host.available_bytes)
    return rows


def _catalogue(cards: Sequence[Card], terminal: int | None) -> Table:
    names = (Column(name, no_wrap=True) for name in ("Name", "Card"))
    rows = table(terminal, *names, *map(figures, ("Memory", "For TensorFlow", "Compute")))
    for card in cards:
        memory = ("" if card.memory_basis == "driver" else "~") + format_size(card.memory_bytes)
        capability = "{}.{}".format(*card.compute_capability)
        rows.add(card.key, card.name, memory, card.available_bytes, capability)
    return rows


_MARKS = {"problem": ("PROBLEM", "bold red"), "note": ("note", "yellow"), "fine": ("fine", "green")}


def doctor_table(examination: Examination, terminal: int | None = None) -> RenderableType:
    """Show the verdict, the findings and the facts."""
    styled = terminal is not None
    parts: list[RenderableType] = [_verdict(examination), ""]
    for finding in examination.findings:
        mark, style = _MARKS[finding.kind]
        line = Text(f"{mark}: ", style=style if styled else "")
        line.append(printable(finding.what), style="none")
        if finding.fix:
            line.append(f"\n  fix: {printable(finding.fix)}", style="none")
        parts.append(line)
    parts += ["", fact_list(((name, printable(value)) for name, value in _facts(examination)), style="")]
    if examination.tensorflow.failure is not None or any(finding.kind == "problem" for finding in examination.findings):
        parts += ["", Text("The last lines of TensorFlow's log", style="bold" if styled else "")]
        parts += [Text("  " + printable(line, 200)) for line in examination.tensorflow.log]
    return Group(*parts)


def _verdict(examination: Examination) -> Text:
    """Return the state of TensorFlow and its devices in one line."""
    problems = [finding for finding in examination.findings if finding.kind == "problem"]
    if not problems:
        cards = ", ".join(printable(str(gpu["card"]), 60) for gpu in examination.tensorflow.gpus)
        state = f"sees {cards}" if cards else "runs, on the CPU: it sees no GPU"
        return Text(f"✔ TensorFlow {state}", style=VERDICT_STYLES["fits"])
    more = f" ({len(problems) - 1} more below)" if len(problems) > 1 else ""
    return Text(f"✘ {printable(problems[0].what)}{more}", style=VERDICT_STYLES["does not fit"])


def _facts(examination: Examination) -> list[tuple[str, str]]:
    tensorflow, host = examination.tensorflow, examination.machine.host
    built = (
        ""
        if tensorflow.built_with_cuda is None
        else ", without CUDA"
        if not tensorflow.built_with_cuda
        else ", with CUDA"
    )
    if tensorflow.built_with_cuda and tensorflow.cuda:
        built += f" {tensorflow.cuda}, cuDNN {tensorflow.cudnn or '?'}"
    rows = [
        ("Python", examination.python),
        (
            "TensorFlow",
            f"{tensorflow.tensorflow or 'not known'}{built}"
            + (f", in {tensorflow.folder}" if tensorflow.folder else ""),
        ),
        ("Keras", "not known" if tensorflow.keras is None else f"{tensorflow.keras} on {tensorflow.backend}"),
    ]
    for gpu in tensorflow.gpus:
        growth = "on" if gpu["growth"] else "off"
        rows.append((gpu["name"].removeprefix("/physical_device:"), f"{gpu['card']}; memory growth {growth}"))
    for device in examination.machine.devices:
        used, total = format_size(device.used_bytes), format_size(device.total_bytes)
        rows.append(("Driver", f"{device.driver_version}: {device.name}, {used} of {total} in use"))
    if tensorflow.missing_libraries:
        rows.append(("Not found", ", ".join(tensorflow.missing_libraries)))
    rows.append(("Host", f"{format_size(host.available_bytes)} of {format_size(host.total_bytes)} available"))
    rows += [("Environment", f"{name}={value}") for name, value in examination.environment.items()]
    return rows
