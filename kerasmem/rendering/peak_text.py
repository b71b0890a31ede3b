"""What a report says of the peak: how much, of what, when, what it means on the device, what others say."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.formula import networks_beside
from kerasmem.estimation.report import Bytes, DeviceVerdict, Formula, MemoryReport, Settings
from kerasmem.profiling.results import ProfileSettings, StepProfile
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import category_name, fact_list, figures, percent, verdict_text
from kerasmem.units import format_size

MODES = {"train": "training", "evaluate": "evaluation"}  # and inference
_TOTAL = "In use at the peak"

# how a figure was obtained, and what its interval is
_HOW = {
    "formula": "the hand formula",
    "graph": "TensorFlow's executor and allocator simulated on the traced step",
    "xla": "XLA's plan for this machine, through the allocator's rules",
    "gpu-target": "XLA's plan for the card, through the allocator's rules",
    "probe": "a line through the peaks of small batches",
    "measure": "measured",
}
_SPREAD = {
    "graph": "the simulated steps, what identical ones differ by, and what their chunks may waste",
    "xla": "the plan, and the smallest limit under which the first step runs",
    "gpu-target": "the variants of the plan, and what lies outside it",
    "probe": "the spread of the measured peaks, extended to this batch",
    "measure": "the least and the most that a step took",
}


def settings_line(settings: Settings | ProfileSettings, *, with_batch: bool = True) -> str:
    """Return batch, mode, dtype policy and optimizer of a report."""
    replicas = getattr(settings, "replicas", 1)
    words = [
        *([f"batch {settings.batch_size:,}"] if with_batch else []),
        MODES.get(settings.mode, "inference"),
        printable(settings.dtype_policy, 30),
        *([printable(settings.optimizer, 30)] if settings.optimizer else []),
        *([f"one of {replicas} devices (data parallel)"] if replicas > 1 else []),
    ]
    return " · ".join(words)


def asked_line(report: MemoryReport | StepProfile) -> str:
    """Return what was asked in one line: the model, the settings and the method."""
    settings = report.settings
    return f"{printable(report.model.name, 60)} · {settings_line(settings)} · method {printable(settings.method, 30)}"


def how(report: MemoryReport) -> str:
    """Return how the total was obtained, in words."""
    return _HOW.get(report.settings.method, printable(report.settings.method, 30))


def claim(report: MemoryReport) -> str | None:
    """Return the interval that the method claims, and on what ground; None where it claims none."""
    low, high = report.bytes.low, report.bytes.high
    if low is None:
        return None
    if low == high and report.settings.method != "formula":
        return "no spread: the plan is the same in every step"
    spread = f"at least {format_size(low)}, no upper end known"
    if high is not None and report.settings.stands_in:
        return f"at most {format_size(high)}; how much less the card's own plan takes is not known"
    if high is not None:
        spread = f"{format_size(low)} to {format_size(report.bytes.most_needed)}"
    training = "the spread of training steps measured in graph mode on a CPU"
    by_formula = training if report.settings.mode == "train" else "the weights; only training was measured"
    return f"{spread} ({_SPREAD.get(report.settings.method, by_formula)})"


def peak(report: MemoryReport) -> Iterator[RenderableType]:
    """Yield the paragraphs of a report by any method but the formula."""
    total = report.bytes.total
    facts = [("Peak", f"{format_size(total)} in use ({total:,} B): {how(report)}")]
    if spread := claim(report):
        facts.append(("Interval", spread))
    if report.bytes.optional_workspace:
        facts.append(("If free", f"cuDNN may use up to {format_size(report.bytes.high)}, without which the step runs"))
    if report.instant is not None:
        facts.append(("Reached", printable(report.instant.text, 200)))
    yield fact_list(facts)
    yield ""
    yield _categories(report.bytes)
    yield ""
    yield fact_list([*_pool_facts(report), *_sums(report.formula)])


def _sums(formula: Formula) -> Iterator[tuple[str, str]]:
    if formula.activation_bytes is not None:
        yield "Outputs", f"{format_size(formula.activation_bytes)} of all layers together, held or not"
    yield "Formula", format_size(formula.total_bytes)


def _categories(need: Bytes) -> Table:
    """A row for each category that is known and one for the rest: they add up to the total."""
    known = {name: size for name in Bytes.CATEGORIES if (size := getattr(need, name)) is not None}
    rows = {category_name(name): size for name, size in known.items() if size}
    if rest := need.total - sum(known.values()):
        rows["not divided further"] = rest
    grid = Table.grid(Column(no_wrap=True), *map(figures, ("", "", "")), padding=(0, 2, 0, 0))
    for name, size in [*rows.items(), (_TOTAL, need.total)]:
        label = name if name == _TOTAL else name.capitalize()
        share = percent(size, need.total) if name != _TOTAL else "100 %"
        grid.add_row(label, f"{size:,} B", format_size(size), share, style="bold" if name == _TOTAL else None)
    return grid


def _pool_facts(report: MemoryReport) -> Iterator[tuple[str, str]]:
    """In use, reserved, what the driver shows, and the smallest limit: four figures that are easily confused."""
    pool = report.pool
    if pool is None:
        return
    asked = "" if pool.requested is None else f" ({format_size(pool.requested)} asked for, the rest is rounding)"
    yield "In use", format_size(pool.in_use) + asked
    if pool.reserved is not None:
        yield "Reserved", f"{format_size(pool.reserved)} taken from the device, under memory growth"
    if pool.smallest_limit is not None:
        yield "Limit", f"{format_size(pool.smallest_limit)} is the smallest memory limit that trains"


def missing_line(report: MemoryReport) -> str:
    """List the parts that the total leaves out."""
    missing = (
        printable(each.what) + (f" ({format_size(each.bytes)})" if each.bytes is not None else "")
        for each in report.unmodelled
    )
    return f"Not in the total: {'; '.join(missing)}." if report.unmodelled else ""


def reference_line(report: MemoryReport) -> str:
    """Return the known networks beside the model, in one line."""
    below, above = networks_beside(report)
    at = f"at batch {report.settings.batch_size:,} by the formula (images of 224 × 224)"
    smaller, larger = (
        "" if network is None else f"{network[1]} ({format_size(network[0])})" for network in (below, above)
    )
    if below is not None and below[0] == report.formula.total_bytes:
        return f"as large as {smaller} {at}"
    if smaller and larger:
        return f"between {smaller} and {larger} {at}"
    return f"smaller than {larger} {at}" if larger else f"larger than {smaller} {at}"


def verdict_line(device: DeviceVerdict, need: Bytes, *, stands_in: bool = False) -> Text:
    """Return the verdict on a device with its margin: "fits, 3.2 GiB to spare"."""
    line = Text(
        f"{printable(device.name, 80)}: {format_size(device.memory_bytes)}, of which TensorFlow can use "
        f"{format_size(device.available_bytes)}: "
    )
    return line.append_text(verdict_text(printable(device.verdict, 40), "bold")).append(
        margin(device, need, stands_in=stands_in)
    )


def margin(device: DeviceVerdict, need: Bytes, *, stands_in: bool = False) -> str:
    """Return how much is left over or missing, counted from the end of the interval that decides."""
    low = need.total if need.low is None else need.low
    high = need.most_needed if need.low is not None else need.total
    spare = None if high is None else device.available_bytes - high
    if device.verdict == "fits" and spare is not None:
        return f", {format_size(spare)} to spare"
    if device.verdict == "does not fit":
        return f", at least {format_size(low - device.available_bytes)} too much"
    if spare is not None and stands_in:
        return f", at most {format_size(-spare)} too much"
    least = f"between {format_size(device.available_bytes - low)} to spare and "
    return f", {least}" + ("no upper end known" if spare is None else f"{format_size(-spare)} too much")


def formula_terms(report: MemoryReport) -> Table:
    """Return the formula with the model's numbers in it, one line a term."""
    formula, batch = report.formula, report.settings.batch_size
    factor = f"× {formula.copies} × 4 B"
    activations = batch * formula.activation_bytes_per_sample
    terms = [
        ("parameters", f"{report.model.parameters:,} {factor}", formula.parameter_bytes),
        ("activations", f"{batch:,} × {formula.activation_elements_per_sample:,} {factor}", activations),
        ("formula", "", formula.total_bytes),
    ]
    columns = (Column(no_wrap=True), figures(""), Column(no_wrap=True), figures(""), Column(no_wrap=True))
    grid = Table.grid(*columns, padding=(0, 2, 0, 0))
    for name, term, count in terms:
        grid.add_row(name, term, "=", f"{count:,} B", Text(format_size(count), style="" if term else "bold"))
    return grid
