"""What the rows of the estimates' bench say together: errors by method, intervals, capped runs; table and plot."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kerasmem.estimation.truth.rows import StoredRow, measured, percentile

MIB = 2**20
METHODS = ("graph", "xla", "probe")
RIVALS = ("formula", "model-profiler", "grappler")
WORST = 8


def least_need(row: StoredRow) -> float | None:
    """Return what the step cannot do without, in bytes: what its tensors ask for, without the waste in chunks.

    Under a limit the allocator takes smaller regions and wastes less, so a step may train below its free peak in use.
    """
    need = measured(row)
    runs = [run for run in row.get("truth", {}).get("runs", []) if "requested_increase_bytes" in run]
    if need is None or not runs:
        return need
    return min(need, statistics.median(run["persistent_bytes"] + run["requested_increase_bytes"] for run in runs))


def planned(row: StoredRow) -> tuple[int, int, int] | None:
    """Return what the XLA estimate says that tensors ask for, what they did ask for, and scalars that may be in it.

    TensorFlow copies a few scalars beside XLA's program (outputs that are constants, counters): four or eight bytes
    each, no part of the plan.
    """
    runs = row.get("truth", {}).get("runs") or [{}]
    said = row.get("estimates", {}).get("xla", {}).get("requested")
    asked = runs[0].get("requested_increase_bytes")
    if said is None or asked is None:
        return None
    return said, runs[0]["persistent_bytes"] + asked, runs[0]["scalar_requests_bytes"]


def summarise(rows: Iterable[StoredRow]) -> dict[str, Any]:
    """Return the figures of all rows, of those that may be tuned to and of those held out."""
    rows = list(rows)
    known = [row for row in rows if measured(row)]
    return {
        "rows": len(rows),
        "measured": len(known),
        "models": len({row["model"] for row in known}),
        "not_measured": {row["key"]: row["truth"]["error"] for row in rows if row.get("truth", {}).get("error")},
        "loss_not_finite": [row["key"] for row in known if not _is_finite(row)],
        "noise_percent": _noise(known),
        "methods": {method: _method(known, method) for method in METHODS},
        "open": {each: _errors(_answers([row for row in known if not row["held_out"]], each)) for each in METHODS},
        "held_out": {each: _errors(_answers([row for row in known if row["held_out"]], each)) for each in METHODS},
        "capped": {mode: _capped([row for row in known if row["mode"] == mode]) for mode in ("graph", "xla")},
        "rivals": {name: _rival(known, name) for name in RIVALS},
    }


def by_kernels(rows: Iterable[StoredRow]) -> dict[str, Any]:
    """Return the figures of graph rows for each kind of a CPU's kernels, all rows and those held out."""
    kinds: dict[str, list[StoredRow]] = {}
    for row in rows:
        if row["mode"] == "graph" and measured(row):
            kinds.setdefault(row.get("kernels", "onednn"), []).append(row)
    return {
        kind: {
            "models": len({row["model"] for row in ours}),
            "graph": _method(ours, "graph"),
            "held_out": _errors(_answers([row for row in ours if row["held_out"]], "graph")),
            "capped": _capped(ours),
            "noise_percent": _noise(ours)["graph"],
        }
        for kind, ours in sorted(kinds.items())
    }


def _noise(rows: list[StoredRow]) -> dict[str, Any]:
    """Return by how much peaks of identical steps differ: (most − least) / median, in percent; and the load then."""
    found: dict[str, Any] = {}
    for mode in ("graph", "xla"):
        ours = [row["truth"]["runs"] for row in rows if row["mode"] == mode]
        spreads = []
        for runs in ours:
            peaks = [peak for run in runs for peak in run["peak_bytes"]]
            spreads.append(100 * (max(peaks) - min(peaks)) / statistics.median(peaks))
        loads = [run["load_average"] for runs in ours for run in runs if "load_average" in run]
        if spreads:
            found[mode] = {
                "median": _round(statistics.median(spreads)),
                "p95": _round(percentile(spreads, 95)),
                "median_load_average": round(statistics.median(loads), 1) if loads else None,
            }
    return found


def _is_finite(row: StoredRow) -> bool:
    return all(run.get("loss_is_finite", True) for run in row["truth"]["runs"])


def _answers(rows: list[StoredRow], method: str) -> list[tuple[StoredRow, dict[str, Any]]]:
    found = [(row, row.get("estimates", {}).get(method, {})) for row in rows]
    return [(row, answer) for row, answer in found if answer.get("total") is not None]


def _errors(answers: list[tuple[StoredRow, dict[str, Any]]]) -> dict[str, Any]:
    errors = [100 * (answer["total"] / (measured(row) or 1) - 1) for row, answer in answers]
    if not errors:
        return {"rows": 0}
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "median_absolute_error_percent": _round(statistics.median(sizes)),
        "p95_absolute_error_percent": _round(percentile(sizes, 95)),
        "median_error_percent": _round(statistics.median(errors)),
    }


def _method(rows: list[StoredRow], method: str) -> dict[str, Any]:
    answers = _answers(rows, method)
    asked = [row for row in rows if method in row.get("estimates", {})]
    found = _errors(answers) | {
        "failed": {row["key"]: row["estimates"][method].get("error") for row in asked if _failed(row, method)},
    }
    if not answers:
        return found
    above, below, ratios = [], [], []
    for row, answer in answers:
        peaks = [peak for run in row["truth"]["runs"] for peak in run["peak_bytes"]]
        if answer.get("high") is not None:
            ratios.append(answer["high"] / (measured(row) or 1))
            if max(peaks) > answer["high"]:
                above.append([row["key"], _round(100 * (max(peaks) / answer["high"] - 1))])
        if answer.get("low") is not None and (measured(row) or 0) < answer["low"]:
            below.append(row["key"])
    by_error = sorted(answers, key=lambda each: -abs(each[1]["total"] / (measured(each[0]) or 1) - 1))
    found |= {
        "with_interval": len(ratios),
        "maximum_above_high": above,
        "maximum_within_high_percent": _round(100 * (1 - len(above) / len(ratios))) if ratios else None,
        "median_below_low": below,
        "median_high_to_measured": _round(statistics.median(ratios), 3) if ratios else None,
        "worst": [
            {
                "key": row["key"],
                "measured_bytes": int(measured(row) or 0),
                "total_bytes": answer["total"],
                "error_percent": _round(100 * (answer["total"] / (measured(row) or 1) - 1)),
                "held_out": row["held_out"],
            }
            for row, answer in by_error[:WORST]
        ],
        "median_wall_seconds": _round(statistics.median(answer["wall_seconds"] for _, answer in answers)),
        "p95_wall_seconds": _round(percentile([answer["wall_seconds"] for _, answer in answers], 95)),
        "most_resident_bytes": max(answer["max_rss_bytes"] for _, answer in answers),
    }
    plans = [(row["key"], plan) for row in rows if method == "xla" and (plan := planned(row))]
    if plans:
        equal = sum(0 <= asked - said <= scalars for _, (said, asked, scalars) in plans)
        found["plan"] = {
            "rows": len(plans),
            "equal_but_for_scalars": equal,
            "equal_percent": _round(100 * equal / len(plans)),
            "equal_to_the_byte": sum(said == asked for _, (said, asked, _) in plans),
            "differ_bytes": {
                key: said - asked for key, (said, asked, scalars) in plans if not 0 <= asked - said <= scalars
            },
        }
    return found


def _failed(row: StoredRow, method: str) -> bool:
    return row["estimates"][method].get("total") is None


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


def rival_answer(row: StoredRow, name: str) -> dict[str, Any]:
    """Return what a rival said of a row; every estimate carries the formula's figure too."""
    answer: dict[str, Any] = row.get("rivals", {}).get(name, {})
    beside = row.get("estimates", {}).get(row["mode"], {}).get("formula")
    return answer or ({"total": beside} if name == "formula" and beside else {})


def _rival(rows: list[StoredRow], name: str) -> dict[str, Any]:
    asked = [(row, answer) for row in rows if (answer := rival_answer(row, name))]
    answers = [(row, answer) for row, answer in asked if answer.get("total") is not None]
    reasons = [str(answer.get("error"))[:120] for _, answer in asked if answer.get("total") is None]
    found = {
        mode: _errors([(row, answer) for row, answer in answers if row["mode"] == mode]) for mode in ("graph", "xla")
    }
    return {**_errors(answers), **found, "failed": len(reasons), "reasons": sorted(set(reasons))[:6]}


def _round(value: float, digits: int = 2) -> float:
    return round(value, digits)


def table(summary: dict[str, Any]) -> str:
    """Return the summary as text for a terminal."""
    lines = [
        f"{summary['measured']} of {summary['rows']} rows measured, {summary['models']} models",
        "identical steps differ by " + ", ".join(
            f"{mode} {each['median']} % (95th {each['p95']} %)" for mode, each in summary["noise_percent"].items()
        ),
        "",
        f"{'':24}{'rows':>6}{'median |e|':>12}{'95th |e|':>10}{'median e':>10}{'max ≤ high':>12}{'high/need':>11}"
        f"{'wall s':>8}",
    ]  # fmt: skip
    for method in METHODS:
        every = summary["methods"][method]
        within, ratio = every.get("maximum_within_high_percent"), every.get("median_high_to_measured")
        wall = every.get("median_wall_seconds")
        lines.append(f"{_errors_line(method, every)}{_percent(within):>12}{_plain(ratio):>11}{_plain(wall):>8}")
        for part in ("open", "held_out"):
            lines.append(_errors_line(f"  {part.replace('_', ' ')}", summary[part][method]))
    for name in RIVALS:
        rival = summary["rivals"][name]
        failed = f"   no answer for {rival['failed']}: {rival['reasons'][0]}" if rival["failed"] else ""
        lines.append(_errors_line(name, rival) + failed)
        lines += [_errors_line(f"  {mode} rows", rival[mode]) for mode in ("graph", "xla")]
    plan = summary["methods"]["xla"].get("plan")
    lines.append("")
    if plan:
        lines.append(
            f"plan equal to what the allocator was asked for: {plan['equal_but_for_scalars']} of {plan['rows']} rows "
            f"but for scalars outside XLA's program, {plan['equal_to_the_byte']} to the byte"
        )
        lines += [f"    differs by {by:+,} B: {key}" for key, by in plan["differ_bytes"].items()]
    for mode, capped in summary["capped"].items():
        if capped["at_high"] or capped["below_need"]:
            lines.append(
                f"capped, {mode}: ran out at high {len(capped['ran_out_at_high'])} of {capped['at_high']}, "
                f"trained at 0.9 × need {len(capped['trained_below_need'])} of {capped['below_need']}, "
                f"failed otherwise {len(capped['failed_otherwise'])}"
            )
            lines += [f"    ran out at high: {key}" for key in capped["ran_out_at_high"]]
            lines += [f"    trained below the need: {key}" for key in capped["trained_below_need"][:WORST]]
    for method in METHODS:
        every = summary["methods"][method]
        for worst in every.get("worst", []):
            lines.append(
                f"{method:6} {worst['error_percent']:+8.1f} %  {worst['total_bytes'] / MIB:8.1f} for "
                f"{worst['measured_bytes'] / MIB:8.1f} MiB  {worst['key']}{' (held out)' if worst['held_out'] else ''}"
            )
        beyond = every.get("maximum_above_high", [])
        lines += [f"{method:6} maximum {over:.1f} % above high: {key}" for key, over in beyond]
        reasons = Counter(str(error) for error in every["failed"].values())
        lines += [f"{method:6} no estimate for {count} rows: {each}" for each, count in reasons.most_common(WORST)]
    lines += [f"the loss is not finite: {key}" for key in summary["loss_not_finite"]]
    lines += [f"not measured: {key}: {error}" for key, error in summary["not_measured"].items()]
    return "\n".join(lines)


def _errors_line(name: str, errors: dict[str, Any]) -> str:
    if not errors["rows"]:
        return f"{name:24}{0:>6}"
    return (
        f"{name:24}{errors['rows']:>6}{errors['median_absolute_error_percent']:>10.2f} %"
        f"{errors['p95_absolute_error_percent']:>8.1f} %{errors['median_error_percent']:>+8.1f} %"
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} %"


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def plot(rows: list[StoredRow], path: Path) -> None:
    """Draw each method's errors: a point a row, a box from the 5th to the 95th percentile, a line at the median."""
    import matplotlib
    from matplotlib.figure import Figure

    known = [row for row in rows if measured(row)]
    ways = {
        **{
            name: [(row, answer["total"]) for row, answer in _answers(known, name)]
            for name in ("xla", "probe", "graph")
        },
        **{name: [(row, rival_answer(row, name).get("total")) for row in known] for name in RIVALS},
    }
    found = {
        name: [100 * (said / (measured(row) or 1) - 1) for row, said in pairs if said] for name, pairs in ways.items()
    }
    drawn = [(name, errors) for name, errors in found.items() if errors]
    if not drawn:
        return
    matplotlib.rcParams["svg.hashsalt"] = "kerasmem"
    figure = Figure(figsize=(9, 0.75 + 0.62 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-10, 10, color="#333333", alpha=0.07, linewidth=0)
    axes.axvline(0, color="#333333", linewidth=0.8)
    random = np.random.default_rng(0)
    for place, (name, errors) in enumerate(drawn):
        colour = "#8a9099" if name in RIVALS else "#2364aa"
        spread = place + random.uniform(-0.28, 0.28, len(errors))
        axes.scatter(errors, spread, s=9, color=colour, alpha=0.45, linewidths=0, zorder=2)
        low, middle, high = np.percentile(errors, [5, 50, 95])
        axes.barh(place, high - low, left=low, height=0.68, facecolor="none", edgecolor=colour, linewidth=1.4, zorder=3)
        axes.plot([middle, middle], [place - 0.34, place + 0.34], color=colour, linewidth=2.4, zorder=4)
    axes.set_xscale("symlog", linthresh=10, linscale=1.4)
    shown = [-90, -50, -20, -10, -5, 0, 5, 10, 20, 50, 100, 1000]
    axes.set_xticks(shown, [f"{each:+d}" if each else "0" for each in shown], fontsize=8)
    axes.set_yticks(range(len(drawn)), [f"{name} ({len(errors)})" for name, errors in drawn])
    axes.set(
        ylim=(len(drawn) - 0.5, -0.5), xlim=(-110, max(1100, 1.2 * max(max(errors) for _, errors in drawn))),
        xlabel="prediction against the measured peak, % (box: 90 % of the rows, line: median, grey: within 10 %)",
        title=f"{len(known)} training steps of {len({row['model'] for row in known})} models",
    )  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.minorticks_off()
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6, zorder=0)
    figure.savefig(path, dpi=130, metadata={"Software": None})
