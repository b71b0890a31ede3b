"""The table of `model.summary()` with the memory beside the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.report import LayerMemory, MemoryReport
from kerasmem.rendering.escape import printable
from kerasmem.rendering.estimate_table import format_shape
from kerasmem.units import format_size

DEFAULT_WIDTH = 108
_NUMBERS = ("Param #", "Activations", "Memory")


@dataclass(frozen=True)
class _Entry:
    """One row: a layer, or a nested model with the sums of its layers."""

    name: str
    class_name: str
    shape: tuple[int | None, ...] | None
    rows: tuple[LayerMemory, ...]
    depth: int = 0

    @property
    def trainable(self) -> str:
        if not any(row.parameters for row in self.rows):
            return "-"
        return "Y" if any(row.trainable_parameters for row in self.rows) else "N"

    def connections(self, shown_name: Callable[[str], str]) -> str:
        own = {row.name for row in self.rows}
        names = dict.fromkeys(shown_name(name) for row in self.rows for name in row.inputs if name not in own)
        return ", ".join(printable(name) for name in names) or "-"


def summary_table(
    report: MemoryReport,
    width: int,
    *,
    expand_nested: bool = False,
    show_trainable: bool = False,
) -> RenderableType:
    """Return the table and the totals, with the options of `model.summary()`.

    Args:
        report: an estimate.
        width: columns of a line.
        expand_nested, show_trainable: as for `kerasmem.summary`.
    """
    entries = _entries(report, expand_nested)
    chain = all(len(row.inputs) <= 1 and row.uses <= 1 for row in report.layers)
    headers = ["Layer (type)", "Output Shape", "Param #", "Activations", "Memory"]
    headers += ([] if chain else ["Connected to"]) + (["Trainable"] if show_trainable else [])
    columns = [Column(header, justify="right" if header in _NUMBERS else "left", overflow="fold") for header in headers]
    table = Table(*columns, box=box.HEAVY_HEAD, show_lines=True, width=width)
    nested = {} if expand_nested else {each.name: each for each in report.nested}

    def shown_name(name: str) -> str:
        return (_outer_names(name, nested) or [name])[0]

    for entry in entries:
        cells = _cells(entry)
        cells += ([] if chain else [entry.connections(shown_name)]) + ([entry.trainable] if show_trainable else [])
        table.add_row(*(Text(cell) for cell in cells))
    title = Text(f'Model: "{printable(report.model.name)}"', style="bold")
    return Group(title, table, *(Text.assemble((f" {name}: ", "bold"), value) for name, value in _totals(report)))


def _cells(entry: _Entry) -> list[str]:
    prefix = "   " * entry.depth + "└ " if entry.depth else ""
    elements = [row.activation_elements for row in entry.rows]
    view = len(entry.rows) == 1 and entry.rows[0].kind == "view"
    return [
        f"{prefix}{printable(entry.name.rpartition('/')[2])} ({printable(entry.class_name)})",
        "?" if entry.shape is None else format_shape(entry.shape),
        f"{sum(row.parameters for row in entry.rows):,}",
        "view" if view else "?" if None in elements else f"{sum(each or 0 for each in elements):,}",
        format_size(sum(row.bytes or 0 for row in entry.rows)),
    ]


def _entries(report: MemoryReport, expand_nested: bool) -> list[_Entry]:
    nested = {each.name: each for each in report.nested}
    entries: list[_Entry] = []
    done: set[str] = set()
    for row in report.layers:
        for outer in _outer_names(row.name, nested):
            if outer not in done:
                done.add(outer)
                entries.append(_nested_entry(nested[outer], report.layers))
            if not expand_nested:
                break
        else:
            depth = len(_outer_names(row.name, nested))
            entries.append(_Entry(row.name, row.class_name, row.output_shape, (row,), depth))
    return entries


def _nested_entry(model: LayerMemory, layers: Sequence[LayerMemory]) -> _Entry:
    inside = tuple(row for row in layers if row.name == model.name or row.name.startswith(model.name + "/"))
    return _Entry(model.name, model.class_name, model.output_shape, inside, model.name.count("/"))


def _outer_names(name: str, nested: dict[str, LayerMemory]) -> list[str]:
    pieces = name.split("/")
    return [path for path in ("/".join(pieces[: n + 1]) for n in range(len(pieces))) if path in nested]


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
