"""The table of `model.summary()` with the memory beside the parameters."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.report import LayerMemory, MemoryReport
from kerasmem.rendering.estimate_table import format_shape
from kerasmem.units import format_size, printable

DEFAULT_WIDTH = 108
_NUMBERS = ("Param #", "Activations", "Memory")


def summary_table(report: MemoryReport, width: int, *, show_trainable: bool = False) -> RenderableType:
    """Return the table of layers and the totals; a layer of a nested model has the model's name before its own.

    Args:
        report: an estimate.
        width: columns of a line.
        show_trainable: as for `kerasmem.summary`.
    """
    is_chain = all(len(row.inputs) <= 1 and row.uses <= 1 for row in report.layers)
    headers = ["Layer (type)", "Output Shape", *_NUMBERS]
    headers += ([] if is_chain else ["Connected to"]) + (["Trainable"] if show_trainable else [])
    columns = [Column(header, justify="right" if header in _NUMBERS else "left", overflow="fold") for header in headers]
    table = Table(*columns, box=box.HEAVY_HEAD, show_lines=True, width=width)
    for row in report.layers:
        cells = _cells(row)
        cells += [] if is_chain else [", ".join(map(printable, row.inputs)) or "-"]
        cells += [_trainable(row)] if show_trainable else []
        table.add_row(*map(Text, cells))
    title = Text(f'Model: "{printable(report.model.name)}"', style="bold")
    return Group(title, table, *(Text.assemble((f" {name}: ", "bold"), value) for name, value in _totals(report)))


def _cells(row: LayerMemory) -> list[str]:
    elements = "?" if row.activation_elements is None else f"{row.activation_elements:,}"
    return [
        f"{printable(row.name)} ({printable(row.class_name)})",
        "?" if row.output_shape is None else format_shape(row.output_shape),
        f"{row.parameters:,}",
        "view" if row.kind == "view" else elements,
        format_size(row.bytes or 0),
    ]


def _trainable(row: LayerMemory) -> str:
    if not row.parameters:
        return "-"
    return "Y" if row.trainable_parameters else "N"


def _totals(report: MemoryReport) -> list[tuple[str, str]]:
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
