"""Formats and escapes results for a terminal, plain text, CSV and HTML.

Functions that return a table take `terminal`: its number of columns, at least `LEAST_WIDTH`, or None for plain text
without a limit on its width. Names from model and data files are untrusted, so each format has a function that escapes
its control characters.
"""

from __future__ import annotations

import csv
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import compress
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.units import format_size, printable

VERDICT_STYLES = {
    "fits": "bold green", "within the limit": "bold green",
    "does not fit": "bold red", "exceeds the limit": "bold red",
    "too close to call": "bold yellow",
}  # fmt: skip
VERDICT_MARKS = {"fits": "✔", "does not fit": "✘", "too close to call": "?"}
_PLAIN_WIDTH = 400
LEAST_WIDTH = 80  # of a table; a narrower terminal wraps the lines


def terminal_console(stream: Any = None) -> Console:
    """Return a console for a terminal, at least `LEAST_WIDTH` wide."""
    screen = Console(file=stream, emoji=False, markup=False, highlight=False)
    screen.width = max(LEAST_WIDTH, screen.width)
    return screen


def plain_text(contents: RenderableType, width: int | None = None) -> str:
    """Render a view as plain text.

    Args:
        contents: the view, for `terminal=None`.
        width: maximum number of columns. Defaults to 400.
    """
    buffer = StringIO()
    look = {"emoji": False, "markup": False, "highlight": False}
    Console(file=buffer, width=width or _PLAIN_WIDTH, color_system=None, **look).print(contents)  # type: ignore[arg-type]
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def words(header: str) -> Column:
    """Return a column of words that may wrap."""
    return Column(header, overflow="fold")


def figures(header: str, footer: str = "") -> Column:
    """Return a column of figures on one line."""
    return Column(header, footer, justify="right", no_wrap=True)


class Rows(Table):
    """A table that formats its cells and hides columns that are None."""

    visible: tuple[bool, ...] = ()

    def add(self, *cells: str | Text | int | None, style: str | None = None) -> None:
        """Add a row with a cell for each column, including hidden ones.

        Args:
            *cells: bytes (None if unknown), untrusted text, or styled text.
            style: style of the row.
        """
        self.add_row(*map(_cell, compress(cells, self.visible)), style=style)


def _cell(cell: str | Text | int | None) -> Text:
    if isinstance(cell, Text):
        return cell
    return Text(printable(cell) if isinstance(cell, str) else known_size(cell))


def table(terminal: int | None, *columns: str | Column | None, title: str | None = None, **more: Any) -> Rows:
    """Return an empty table, with rules and a title on a terminal only.

    Args:
        terminal: columns of a terminal, or None for plain text.
        *columns: headers. None is a hidden column.
        title: title of the table.
        **more: options of `rich.table.Table`.
    """
    styled = terminal is not None
    rows = Rows(
        *(column for column in columns if column is not None),
        title=Text(title, style="bold") if title and styled else None,
        box=box.SIMPLE_HEAD if styled else None,
        header_style="bold",
        padding=(0, 1) if styled else (0, 2, 0, 0),
        pad_edge=styled,
        **more,
    )
    rows.visible = tuple(column is not None for column in columns)
    return rows


def fact_list(facts: Iterable[tuple[str, str]], style: str = "bold") -> Table:
    """Return a table of one name and one text per line."""
    grid = Table.grid(Column(no_wrap=True, style=style), words(""), padding=(0, 2, 0, 0))
    for name, text in facts:
        grid.add_row(Text(name), Text(text))
    return grid


def verdict_text(verdict: str, otherwise: str = "") -> Text:
    """Return a verdict in its colour."""
    return Text(verdict, style=VERDICT_STYLES.get(verdict, otherwise))


def note_lines(notes: Iterable[str], limit: int | None = None) -> Iterator[Text]:
    """Yield a line for each note."""
    for note in notes:
        yield Text(f"Note: {printable(note, limit)}.")


def known_size(count: int | None) -> str:
    """Return bytes for a cell, or a dash if unknown."""
    return "–" if count is None else format_size(count)


def signed_size(count: int | None) -> str:
    """Return a change in bytes with its sign, or a dash if unknown: "+1.50 MiB"."""
    if not count:
        return known_size(count)
    return ("+" if count > 0 else "−") + format_size(abs(count))


def signed_share(change: int | None, whole: int | None) -> str:
    """Return a change as a share with its sign, such as " (+12.5 %)", or nothing."""
    if not change or not whole:
        return ""
    return f" ({'+' if change > 0 else '−'}{percent(abs(change), whole)})"


def percent(part: float, whole: float) -> str:
    """Return a share, such as "12.5 %", or a dash if the whole is 0."""
    return f"{part / whole:.1%}".replace("%", " %") if whole else "–"


def printable_lines(text: str) -> str:
    """Escape the control characters in each line of a text."""
    return "\n".join(printable(line) for line in text.splitlines())


def spreadsheet_cell(text: str) -> str:
    """Escape text for a CSV cell, so that a spreadsheet takes it for no formula."""
    cell = printable(text)
    return "'" + cell if cell[:1] in ("=", "+", "-", "@") else cell


def middle(value: str, limit: int) -> str:
    """Shorten text in its middle, because the ends distinguish layers.

    Examples:
        >>> middle("encoder/block_07/attention/query", 17)
        'encoder/…on/query'
    """
    if len(value) <= limit:
        return value
    head = (limit - 1) // 2
    return f"{value[:head]}…{value[-(limit - 1 - head) :]}"


def short_name(text: str, limit: int = 60) -> str:
    """Escape a name, and shorten it in its middle."""
    return middle(printable(text), limit)


def html_text(value: object, limit: int | None = 300) -> str:
    """Escape text for HTML, in an element that isolates its writing direction."""
    return f"<bdi>{html.escape(printable(str(value), limit))}</bdi>"


def html_attribute(value: object, limit: int | None = 300) -> str:
    """Escape text for a quoted attribute."""
    return html.escape(printable(str(value), limit))


def svg_text(value: str, limit: int = 60) -> str:
    """Escape text for SVG, and shorten it in its middle."""
    return html.escape(short_name(value, limit))


def rows_to_csv(rows: Sequence[Mapping[str, Any]], otherwise: Sequence[str] = ()) -> str:
    """Return rows as CSV with a header.

    Args:
        rows: plain values, with the same keys in each row.
        otherwise: header of a table without rows.
    """
    buffer = StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]) if rows else otherwise, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _csv_cell(value) for key, value in row.items()})
    return buffer.getvalue()


def _csv_cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, list):
        return "x".join("" if size is None else str(size) for size in value)
    return spreadsheet_cell(value) if isinstance(value, str) else value
