"""Text from model and data files is untrusted: nothing of it may steer a terminal, a spreadsheet, HTML or a chart."""

from __future__ import annotations

import html

from kerasmem.units import printable as printable


def printable_lines(text: str) -> str:
    """Return text of several lines, each printable."""
    return "\n".join(printable(line) for line in text.splitlines())


def spreadsheet_cell(text: str) -> str:
    """Return text for a CSV cell, printable and no formula."""
    shown = printable(text)
    return "'" + shown if shown[:1] in ("=", "+", "-", "@") else shown


def middle(value: str, limit: int) -> str:
    """Shorten text in its middle, as the ends tell layers apart.

    Examples:
        >>> middle("encoder/block_07/attention/query", 17)
        'encoder/…on/query'
    """
    if len(value) <= limit:
        return value
    head = (limit - 1) // 2
    return f"{value[:head]}…{value[-(limit - 1 - head) :]}"


def short_name(text: str, limit: int = 60) -> str:
    """Return a name from a file, printable and shortened in its middle."""
    return middle(printable(text), limit)


def html_text(value: object, limit: int | None = 300) -> str:
    """Return text for HTML in an element that isolates its writing direction."""
    return f"<bdi>{html.escape(printable(str(value), limit))}</bdi>"


def html_attribute(value: object, limit: int | None = 300) -> str:
    """Return text for the inside of a quoted attribute."""
    return html.escape(printable(str(value), limit))


def svg_text(value: str, limit: int = 60) -> str:
    """Return text for an element of SVG, shortened in its middle."""
    return html.escape(short_name(value, limit))
