"""Summarise the rows of the estimates' bench: errors by method, intervals, runs under a limit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

METHODS = ("graph", "xla", "probe")
WORST = 8
StoredRow = dict[str, Any]


def measured(row: StoredRow) -> float | None:
    """Return the row's need in bytes: the median over its processes of the median over the steps."""
    runs = row.get("truth", {}).get("runs")
    return statistics.median(statistics.median(run["peak_bytes"]) for run in runs) if runs else None


def least_need(row: StoredRow) -> float | None:
    """Return the bytes requested by the step's tensors, without waste in the allocator's chunks."""
    need = measured(row)
    runs = [run for run in row.get("truth", {}).get("runs", []) if "requested_increase_bytes" in run]
    if need is None or not runs:
        return need
    return min(need, statistics.median(run["persistent_bytes"] + run["requested_increase_bytes"] for run in runs))


def summarise(rows: Iterable[StoredRow]) -> dict[str, Any]:
    """Return the figures of all rows and of the held-out ones."""
    rows = list(rows)
    known = [row for row in rows if measured(row)]
    held_out = [row for row in known if row["held_out"]]
    return {
        "rows": len(rows),
        "measured": len(known),
        "models": len({row["model"] for row in known}),
        "methods": {method: _method(known, method) for method in METHODS},
        "held_out": {method: _errors(_totals(held_out, method)) for method in METHODS},
        "formula": _errors(_formulas(known)),
        "capped": {mode: _capped([row for row in known if row["mode"] == mode]) for mode in ("graph", "xla")},
    }


def by_kernels(rows: Iterable[StoredRow]) -> dict[str, Any]:
    """Return the figures of graph rows for each kind of CPU kernels."""
    kinds: dict[str, list[StoredRow]] = {}
    for row in rows:
        if row["mode"] == "graph" and measured(row):
            kinds.setdefault(row.get("kernels", "onednn"), []).append(row)
    return {
        kind: {"graph": _method(of_kind, "graph"), "capped": _capped(of_kind), "load_average": _load(of_kind)}
        for kind, of_kind in sorted(kinds.items())
    }


def _load(rows: list[StoredRow]) -> float | None:
    loads = [run["load_average"] for row in rows for run in row["truth"]["runs"] if "load_average" in run]
    return round(statistics.median(loads), 1) if loads else None


def _answers(rows: list[StoredRow], method: str) -> list[tuple[StoredRow, dict[str, Any]]]:
    answers = [(row, row.get("estimates", {}).get(method, {})) for row in rows]
    return [(row, answer) for row, answer in answers if answer.get("total") is not None]


def _totals(rows: list[StoredRow], method: str) -> list[tuple[StoredRow, int]]:
    return [(row, answer["total"]) for row, answer in _answers(rows, method)]


def _formulas(rows: list[StoredRow]) -> list[tuple[StoredRow, int]]:
    return [(row, answer["formula"]) for row in rows for _, answer in _answers([row], row["mode"])]


def _error(row: StoredRow, total: int) -> float:
    return 100 * (total / (measured(row) or 1) - 1)


def _errors(totals: list[tuple[StoredRow, int]]) -> dict[str, Any]:
    errors = [_error(row, total) for row, total in totals]
    if not errors:
        return {"rows": 0}
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "median_absolute_error_percent": round(statistics.median(sizes), 2),
        "p95_absolute_error_percent": round(float(np.percentile(sizes, 95)), 2),
        "median_error_percent": round(statistics.median(errors), 2),
    }


def _method(rows: list[StoredRow], method: str) -> dict[str, Any]:
    """Return the errors of a method, how its intervals cover the measured steps, and its worst rows."""
    totals, answers = _totals(rows, method), _answers(rows, method)
    figures = _errors(totals)
    ratios, above = [], []
    for row, answer in answers:
        if answer.get("high") is None:
            continue
        ratios.append(answer["high"] / (measured(row) or 1))
        peak = max(peak for run in row["truth"]["runs"] for peak in run["peak_bytes"])
        if peak > answer["high"]:
            above.append([row["key"], round(100 * (peak / answer["high"] - 1), 2)])
    if ratios:
        figures["maximum_above_high"] = above
        figures["maximum_within_high_percent"] = round(100 * (1 - len(above) / len(ratios)), 2)
        figures["median_high_to_measured"] = round(statistics.median(ratios), 3)
    by_error = sorted(totals, key=lambda pair: -abs(_error(*pair)))[:WORST]
    figures["worst"] = {row["key"]: round(_error(row, total), 2) for row, total in by_error}
    return figures


def _capped(rows: list[StoredRow]) -> dict[str, Any]:
    at_high = [(row["key"], row["capped"]["high"]) for row in rows if row.get("capped", {}).get("high")]
    below = [(row["key"], row["capped"]["below"]) for row in rows if row.get("capped", {}).get("below")]
    return {
        "at_high": len(at_high),
        "ran_out_at_high": [key for key, run in at_high if run["outcome"] == "out of memory"],
        "below_need": len(below),
        "trained_below_need": [key for key, run in below if run["outcome"] == "trained"],
        "failed_otherwise": [key for key, run in at_high + below if run["outcome"] == "failed"],
    }
