"""Rows of the data set as text: what is wrong with them, what they say, and what a machine measured."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.estimation.truth.results import CheckedRows, ContributedRow, Contribution, Errors
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import VERDICT_STYLES, fact_list, figures, known_size, note_lines, table, words


def check_table(found: CheckedRows, terminal: int | None = None) -> RenderableType:
    """Return whether all lines are rows, the problems, and the errors of the estimates."""
    mark, style = ("✔", "fits") if found.is_valid else ("✘", "does not fit")
    parts: list[RenderableType] = [Text(f"{mark} {printable(found.answer)}", style=VERDICT_STYLES[style])]
    for each in found.problems:
        field = f"{printable(each.field)}: " if each.field else ""
        parts.append(Text(f"line {each.line:,}: {field}{printable(each.what)}; {printable(each.way_out)}"))
    if found.more_problems:
        parts.append(Text(f"… and {found.more_problems:,} more"))
    if found.errors:
        parts += ["", _errors(found.errors, terminal)]
    return Group(*parts)


def contribution_table(found: Contribution, terminal: int | None = None) -> RenderableType:
    """Return what was measured, what the rows hold beside it, and what to do with them."""
    every = all(row.measured is not None for row in found.rows)
    mark, style = ("✔", "fits") if every else ("✘", "does not fit")
    rows = table(terminal, words("Row"), figures("Measured"), figures("Predicted"), figures("Error"), "")
    for row in found.rows:
        name = printable(row.key)
        rows.add_row(name, known_size(row.measured), known_size(row.predicted), _error(row), _remark(row))
    held = {**{f"{name} version": each for name, each in found.versions.items()}, **found.machine}
    facts = [(printable(name), printable(str(each))) for name, each in held.items()]
    notes = [f"{row.key}: {row.failed}" for row in found.rows if row.failed]
    notes.append("a row also holds the bytes and seconds of its steps; no name of a user, a host or a folder")
    check = f"kerasmem bench check {found.output}"
    notes.append(
        f"nothing was sent; to contribute, look at the file, run {check}, and attach it to an issue of the project"
    )
    heading = Text(f"{mark} {printable(found.answer)}", style=VERDICT_STYLES[style])
    return Group(heading, "", rows, "", Text("Every row holds"), fact_list(facts, style=""), "", *note_lines(notes))


def _error(row: ContributedRow) -> str:
    if row.measured is None or row.predicted is None:
        return "–"
    return f"{100 * (row.predicted / row.measured - 1):+.1f} %"


def _remark(row: ContributedRow) -> str:
    return "was in the file" if not row.is_new else "" if row.method is None else f"by {row.method}"


def _errors(errors: Iterable[Errors], terminal: int | None) -> Table:
    """Return predictions against measurements: 5th, 25th, 50th, 75th and 95th percentile of the signed errors."""
    names = ("5 %", "25 %", "median", "75 %", "95 %")
    found = table(terminal, "Method", "Kernels", figures("Rows"), *map(figures, names), figures("Within high"))
    for each in errors:
        cells = [f"{error:+.1f} %" for error in each.percentiles]
        found.add_row(each.method, each.kernels, f"{each.rows:,}", *cells, f"{each.covered} of {each.with_high}")
    return found
