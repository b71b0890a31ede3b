"""Text from files on its way into HTML, into JSON inside HTML, and into a chart's labels."""

from __future__ import annotations

import html
import json
from typing import Any

from kerasmem.rendering.escape import middle, printable

_ISOLATED = "\u2068{}\u2069"  # a name written from right to left leaves what stands beside it in place


def text(value: object, limit: int | None = 300) -> str:
    """Return text for HTML, in an element that keeps its direction of writing to itself."""
    return f"<bdi>{html.escape(printable(str(value), limit))}</bdi>"


def attribute(value: object, limit: int | None = 300) -> str:
    """Return text for the inside of a quoted attribute."""
    return html.escape(printable(str(value), limit))


def label(value: object, limit: int = 60) -> str:
    """Return text for a chart, where plotly.js would take tags and entities for markup."""
    return _ISOLATED.format(html.escape(middle(printable(str(value)), limit), quote=False))


def embedded_json(data: Any) -> str:
    """Return JSON for the inside of a script element: nothing in it can end the element."""
    dumped = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
