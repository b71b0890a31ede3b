"""Results as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kerasmem.estimation.report import MemoryReport
from kerasmem.rendering.formatting import spreadsheet_cell


def to_json(data: Mapping[str, Any]) -> str:
    """Return JSON text; every control character of a name is escaped by the format itself."""
    return json.dumps(data, indent=2, allow_nan=False)


def layers_to_csv(report: MemoryReport) -> str:
    """Return the report's layers as CSV, a row a layer; the `bytes` column adds up to the total.

    What a method attributes to no layer has a row of its own at the end, of the kind "rest".
    """
    rows = report.to_dict()["layers"]
    rest = report.bytes.total - sum(row["bytes"] or 0 for row in rows)
    if rest and any(row["bytes"] is not None for row in rows):
        at_peak = None if report.settings.method == "formula" else rest
        rows.append({**dict.fromkeys(rows[0]), "bytes": rest, "bytes_at_peak": at_peak, "kind": "rest"})
    return rows_to_csv(rows, ["name"])


def rows_to_csv(rows: Sequence[Mapping[str, Any]], otherwise: Sequence[str] = ()) -> str:
    """Return rows with the same keys each as CSV, under a heading.

    Args:
        rows: of plain values.
        otherwise: the heading where there are no rows.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]) if rows else otherwise, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in row.items()})
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, list):
        return "x".join("" if size is None else str(size) for size in value)
    return spreadsheet_cell(value) if isinstance(value, str) else value
