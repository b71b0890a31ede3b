"""Shows the memory of one step: estimates, profiles of real steps, and model summaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.formula import networks_beside
from kerasmem.estimation.report import DeviceVerdict, LayerMemory, MemoryReport, substitute
from kerasmem.profiling.results import StepProfile
from kerasmem.rendering.formatting import fact_list, figures, note_lines, percent, rows_to_csv, table, words
from kerasmem.rendering.peak_text import composition, interval, model_line, verdict_line
from kerasmem.units import format_count, format_size, printable

_LAYERS = 8


def estimate_table(
    report: MemoryReport,
    terminal: int | None = None,
    *,
    cards: Sequence[str] = (),
    top: int | None = None,
    is_brief: bool = True,
) -> RenderableType:
    """Show the answer, the composition of the peak, the layers, and, if not brief, all details.

    Args:
        report: an estimate or a measurement.
        terminal: columns of a terminal, or None for plain text.
        cards: known cards that the step fits, the smallest first, for a report without a device.
        top: number of layers to list, the largest first; one line has the sum of the others. 0 lists all in the order
            of their calls. Defaults to 8, or to all if not brief.
        is_brief: whether to leave out the interval, the allocator's figures, the formula and the notes.
    """
    apart: list[RenderableType] = [""] if terminal is None else []  # a table on a terminal has empty lines around it
    parts: list[RenderableType] = [_answer(report, cards), Text(model_line(report), style="dim"), ""]
    parts += [*composition(report, terminal), *apart, _layers(report, terminal, top, is_brief), *apart]
    if not is_brief:
        parts += [fact_list(_facts(report)), "", *note_lines(report.notes)]
    if report.unmodelled:
        parts.append(Text(_missing_line(report)))
    if is_brief:
        notes = f", {format_count(len(report.notes), 'note')}" if report.notes else ""
        parts.append(Text(f"-v shows all layers, the interval, the formula{notes}", style="dim"))
    return Group(*parts)


def _answer(report: MemoryReport, cards: Sequence[str]) -> Text:
    needs = f"{report.needs}{printable(report.remarks, 600)}"
    if report.device is None:
        verdict = f"fits {len(cards)} of the known cards, from {cards[0]} up" if cards else "fits no known card"
        return Text(f"{needs}: {verdict}{report.if_free}", style="bold")
    return verdict_line(report.device, needs).append(report.if_free, style="not bold default")


def _layers(report: MemoryReport, terminal: int | None, top: int | None, is_brief: bool) -> Table:
    """Return a row for each layer, or for the `top` largest, and the total."""
    total, is_formula = report.bytes.total, report.settings.method == "formula"
    is_divided = any(row.bytes is not None for row in report.layers)
    if top is None and is_brief:
        top = _LAYERS
    layers = list(report.layers)
    if top and top < len(layers):
        layers.sort(key=lambda row: -(row.bytes or 0))
    largest, rest = layers[: top or None], layers[top or len(layers) :]
    rows = table(
        terminal,
        Column("Layer (class)", "Total", overflow="fold", no_wrap=terminal is None),
        Column("Output shape", overflow="fold", no_wrap=terminal is None),
        figures("Parameters", format_count(report.model.parameters)),
        None if is_brief and is_divided else figures("Activations", _elements(report)),
        figures("Memory" if is_formula else "At peak", format_size(total)) if is_divided else None,
        figures("Share", "100 %") if is_divided else None,
        show_footer=True,
        footer_style="bold",
        collapse_padding=True,
    )

    def add(name: str, shape: str, parameters: int, activations: str, size: int | None) -> None:
        share = percent(size, total) if size else "–"
        style = "dim" if terminal is not None and not size else None
        rows.add(name, shape, format_count(parameters), activations, format_size(size), share, style=style)

    for row in largest:
        name = f"{printable(row.name, 80)} ({printable(row.class_name, 40)})"
        if row.uses != 1:
            name += " – not called" if row.uses == 0 else f" × {row.uses}"
        shape = "?" if row.output_shape is None else format_shape(row.output_shape)
        activations = "view" if row.kind == "view" else format_count(row.activation_elements)
        add(name, shape, row.parameters, activations, row.bytes)
    if rest:
        parameters, elements, size = (
            sum(getattr(row, name) or 0 for row in rest) for name in ("parameters", "activation_elements", "bytes")
        )
        add(format_count(len(rest), "smaller layer"), "", parameters, format_count(elements), size)
    unattributed = total - sum(row.bytes or 0 for row in layers)
    if unattributed and is_divided and not is_formula:
        add("no single layer", "", 0, "0", unattributed)
    return rows


def _elements(report: MemoryReport) -> str:
    return format_count(report.formula.activation_elements_per_sample)


def format_shape(shape: Iterable[int | None]) -> str:
    """Return a shape as Keras prints it: "(None, 28, 28, 1)"."""
    return str(tuple(shape))


def _facts(report: MemoryReport) -> Iterator[tuple[str, str]]:
    pool, formula = report.pool, report.formula
    yield "Peak", f"{format_size(report.bytes.total)} in use ({report.bytes.total:,} B)"
    yield "Interval", interval(report.bytes, report.settings.stands_in)
    if report.instant is not None:
        yield "Reached", printable(report.instant.text, 200)
    if pool is not None and pool.requested is not None:
        yield "Requested", f"{format_size(pool.requested)} of it; the rest is rounding"
    if pool is not None and pool.reserved is not None:
        yield "Reserved", f"{format_size(pool.reserved)} taken from the device, under memory growth"
    if pool is not None and pool.smallest_limit is not None:
        yield "Limit", f"{format_size(pool.smallest_limit)} is the smallest memory limit that trains"
    if report.settings.profile:
        yield "Kernels", printable(report.settings.profile)
    if formula.activation_bytes is not None:
        yield "Outputs", f"{format_size(formula.activation_bytes)} of all layers together, held or not"
    factor = f"× {formula.copies} × 4 B"
    activations = f"{report.settings.batch_size:,} × {_elements(report)} activations {factor}"
    total = f"{formula.total_bytes:,} B ({format_size(formula.total_bytes)})"
    yield "Formula", f"{report.model.parameters:,} parameters {factor} + {activations} = {total}"
    yield "Networks", _networks(report)


def _networks(report: MemoryReport) -> str:
    """Return the known networks just below and above the model's size."""
    names = [network and f"{network[1]} ({format_size(network[0])})" for network in networks_beside(report)]
    words = [f"{word} {name}" for word, name in zip(("at least", "less than"), names, strict=True) if name]
    return f"{', '.join(words)}, by the formula at this batch and 224 × 224"


def _missing_line(report: MemoryReport) -> str:
    """List the parts that are not in the total."""
    missing = (
        printable(item.what) + (f" ({format_size(item.bytes)})" if item.bytes is not None else "")
        for item in report.unmodelled
    )
    return f"Not in the total: {'; '.join(missing)}."


_PROFILE_LAYERS = 25
_PROFILE_SHARES = {"optimizer": "optimizer, and what it works in"}


def profile_table(
    profile: StepProfile,
    terminal: int | None = None,
    *,
    device: DeviceVerdict | None = None,
    top: int | None = None,
) -> RenderableType:
    """Show the memory at the peak of a real step.

    Args:
        profile: profile of the step.
        terminal: columns of a terminal, or None for plain text.
        device: verdict on a device, or None.
        top: number of layers to list, the largest first. 0 lists all layers with memory. Defaults to 25.
    """
    took = f"took {format_size(profile.bytes.total)}{substitute(profile.settings)}"
    first = Text(took, style="bold") if device is None else verdict_line(device, took)
    parts: list[RenderableType] = [first, Text(model_line(profile), style="dim"), ""]
    parts += [*composition(profile, terminal), "", fact_list(_profile_facts(profile)), ""]
    parts += [_profile_layers(profile, _PROFILE_LAYERS if top is None else top, terminal)]
    for item in profile.unmodelled:
        parts.append(Text(f"Not seen: {printable(str(item['what']))}: {printable(str(item['why']))}."))
    return Group(*parts, *note_lines(profile.notes))


def _profile_facts(profile: StepProfile) -> Iterator[tuple[str, str]]:
    need = profile.bytes
    yield "Peak", f"{format_size(need.total)} in use ({need.total:,} B), measured"
    yield "Steps", f"{format_size(need.low)} to {format_size(need.high)} from step to step"
    if profile.instant is not None:
        yield "Reached", printable(profile.instant.text, 200)
    yield "Before", f"{format_size(profile.before)} in use when the step began"
    share = f"{profile.named_share:.2%}".replace("%", " %")
    yield "Named", f"{share} of the peak, in {profile.live_chunks:,} chunks"


def _profile_layers(profile: StepProfile, top: int, terminal: int | None) -> Table:
    rows = table(terminal, words("Layer (class)"), figures("Measured"), words("Mostly"))
    layers = sorted((row for row in profile.layers if row.bytes_at_peak), key=lambda row: -row.bytes_at_peak)
    largest, rest = layers[: top or None], layers[top or len(layers) :]
    for row in largest:
        parts = sorted(row.parts.items(), key=lambda part: -part[1])[:2]
        mostly = ", ".join(f"{name} {format_size(size)}" for name, size in parts)
        rows.add(f"{printable(row.name, 100)} ({printable(row.class_name, 40)})", row.bytes_at_peak, mostly)
    if rest:
        rows.add(f"{len(rest)} more layers", sum(row.bytes_at_peak for row in rest), "")
    rows.add_section()
    for share in profile.shares:
        if share.bytes * 10_000 >= profile.bytes.total:
            name = Text(printable(_PROFILE_SHARES.get(share.name, share.name), 80), style="italic")
            rows.add(name, share.bytes, "")
    rows.add("In no layer, together", sum(share.bytes for share in profile.shares), "", style="bold")
    return rows


DEFAULT_WIDTH = 108
_SUMMARY_NUMBERS = ("Param #", "Activations", "Memory")


def summary_table(report: MemoryReport, width: int, *, show_trainable: bool = False) -> RenderableType:
    """Show the layers and the totals. The name of a nested model precedes those of its layers.

    Args:
        report: an estimate.
        width: columns of a line.
        show_trainable: as in `kerasmem.summary`.
    """
    is_chain = all(len(row.inputs) <= 1 and row.uses <= 1 for row in report.layers)
    headers = ["Layer (type)", "Output Shape", *_SUMMARY_NUMBERS]
    headers += ([] if is_chain else ["Connected to"]) + (["Trainable"] if show_trainable else [])
    columns = [
        Column(header, justify="right" if header in _SUMMARY_NUMBERS else "left", overflow="fold") for header in headers
    ]
    rows = Table(*columns, box=box.HEAVY_HEAD, show_lines=True, width=width)
    for row in report.layers:
        cells = _summary_cells(row)
        cells += [] if is_chain else [", ".join(map(printable, row.inputs)) or "-"]
        cells += [_trainable_mark(row)] if show_trainable else []
        rows.add_row(*map(Text, cells))
    title = Text(f'Model: "{printable(report.model.name)}"', style="bold")
    return Group(
        title, rows, *(Text.assemble((f" {name}: ", "bold"), value) for name, value in _summary_totals(report))
    )


def _summary_cells(row: LayerMemory) -> list[str]:
    elements = "?" if row.activation_elements is None else f"{row.activation_elements:,}"
    return [
        f"{printable(row.name)} ({printable(row.class_name)})",
        "?" if row.output_shape is None else format_shape(row.output_shape),
        f"{row.parameters:,}",
        "view" if row.kind == "view" else elements,
        format_size(row.bytes or 0),
    ]


def _trainable_mark(row: LayerMemory) -> str:
    if not row.parameters:
        return "-"
    return "Y" if row.trainable_parameters else "N"


def _summary_totals(report: MemoryReport) -> list[tuple[str, str]]:
    model, formula = report.model, report.formula
    weights = format_size(sum(row.weight_bytes for row in report.layers))
    copies = "values and their gradients" if formula.copies == 2 else "values"
    return [
        ("Total params", f"{model.parameters:,} ({weights})"),
        ("Trainable params", f"{model.trainable_parameters:,}"),
        ("Non-trainable params", f"{model.parameters - model.trainable_parameters:,}"),
        ("Activations", f"{formula.activation_elements_per_sample:,} a sample"),
        (f"Memory at batch {report.settings.batch_size:,}", f"{format_size(report.bytes.total)} (formula: {copies})"),
    ]


def layers_to_csv(report: MemoryReport) -> str:
    """Return the report's layers as CSV, one row each. The `bytes` column adds up to the total.

    Memory of no single layer is in the last row, of the kind "rest".
    """
    rows = report.to_dict()["layers"]
    rest = report.bytes.total - sum(row["bytes"] or 0 for row in rows)
    if rest and any(row["bytes"] is not None for row in rows):
        at_peak = None if report.settings.method == "formula" else rest
        rows.append({**dict.fromkeys(rows[0]), "bytes": rest, "bytes_at_peak": at_peak, "kind": "rest"})
    return rows_to_csv(rows, ["name"])
