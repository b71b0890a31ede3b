"""Tables of measured figures in the README and the manual, written from the benches' results."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "bench" / "results"
_PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_KERNELS = {"onednn": "oneDNN's", "eigen": "TensorFlow's own"}

PARTS: dict[str, Callable[[], str]] = {}


def part(function: Callable[[], str]) -> Callable[[], str]:
    PARTS[function.__name__] = function
    return function


def rewritten(text: str) -> str:
    """Return a page with every table rewritten."""
    return _PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}", text)


def differing(one: str, other: str) -> list[str]:
    """Return the names of the tables that differ."""
    pairs = zip(_PART.finditer(one), _PART.finditer(other), strict=True)
    return [before[2] for before, after in pairs if before[0] != after[0]]


def results(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def table(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table. Columns named with ">" first are aligned right."""
    names = columns.split("|")
    lines = [
        "| " + " | ".join(name.lstrip(">") for name in names) + " |",
        "|" + "|".join("---:" if name.startswith(">") else "---" for name in names) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def errors(figures: dict[str, Any]) -> tuple[object, ...]:
    """Return the cells of rows, median error and 95th percentile."""
    percents = (figures[f"{name}_absolute_error_percent"] for name in ("median", "p95"))
    return figures["rows"], *(f"{percent} %" for percent in percents)


@part
def accuracy() -> str:
    summary = results("estimates")["summary"]
    methods = summary["methods"]
    rows = [
        ("compiled by XLA", *errors(methods["xla"])),
        ("in graph mode", *errors(methods["graph"])),
        ("the formula that is usually done by hand", *errors(summary["formula"])),
    ]
    return table("|>training steps|>median error|>95 % are within", rows)


@part
def estimates() -> str:
    summary = results("estimates")["summary"]
    goals = {"xla": "≤ 2 % / ≤ 8 %", "graph": "≤ 3 % / ≤ 12 %"}
    rows = [
        (
            method, *errors(summary["methods"][method]),
            f"{summary['held_out'][method]['median_absolute_error_percent']} %", goal,
        )
        for method, goal in goals.items()
    ]  # fmt: skip
    jax = results("jax_estimates")["cases"].values()
    wrong = [100 * abs(case["estimate"]["total"] / case["measured"]["total"] - 1) for case in jax]
    on_jax = (
        "xla, Keras on JAX (resident memory)", len(wrong), f"{statistics.median(wrong):.2f} %",
        f"{max(wrong):.2f} % (worst)", "", "≤ 2 %",
    )  # fmt: skip
    return table(
        "method|>rows|>median error|>95th percentile|>median, held-out models|goal",
        [*rows, on_jax, ("formula", *errors(summary["formula"]), "", "")],
    )


@part
def gpu() -> str:
    """Return plans made without a card, that card's own plans, and the peaks of steps on it, without exact rows."""
    cases, rows, errors, inside = results("gpu")["cases"], [], [], 0
    for name, case in cases.items():
        on_card = cases.get(f"card {name.removeprefix('plan ')}")
        if case["kind"] != "plan" or on_card is None:
            continue
        plan, steps = on_card["plan"], on_card.get("again", on_card)["after_steps"]["peak_bytes_in_use"]
        own, tuning = plan["argument"] + plan["output"] - plan["alias"] + plan["temp"], on_card["after_compiling"]
        errors.append(100 * (case["total"] / steps - 1))
        is_inside = case["low"] <= steps <= case["high"]
        inside += is_inside
        if is_inside and abs(errors[-1]) <= 1:
            continue
        rows.append((
            case["model"].removeprefix("keras.applications:"), case["batch"], case["policy"],
            *(f"{size / 1e6:.0f}" for size in (case["total"], own, steps)), f"{errors[-1]:+.1f} %",
            "yes" if is_inside else "no", f"{tuning['peak_bytes_in_use'] / 1e6:.0f}",
        ))  # fmt: skip
    columns = "network|>batch|dtype policy|>planned|>card's plan|>steps|>error|in the interval|>autotuning"
    others = f"{len(errors) - len(rows)} others", *[""] * 5, "≤ 1 %", "yes", ""
    worst = f"{statistics.median(map(abs, errors)):.1f} %, {max(map(abs, errors)):.1f} %"
    last = "all: median, worst", *[""] * 5, worst, f"{inside} of {len(errors)}", ""
    return table(columns, [*sorted(rows, key=lambda row: (row[2], row[0])), others, last])


@part
def gpu_facts() -> str:
    """Return the number of public readings by card and source that agree with the estimates."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in (rows := results("gpu_facts")["rows"]):
        source = row["source"].removeprefix("github:").split()[0].partition("@")[0]
        groups.setdefault((row["card"], row["framework"], source), []).append(row)
    groups["all", "", ""] = rows
    lines = []
    for group, members in groups.items():
        counts = Counter(row["agreement"] for row in members)
        shares = [row["sizes"]["total"] / row["limit"] for row in members]
        agreement = (counts[name] for name in ("yes", "too close", "no"))
        lines.append((*group, len(members), *agreement, f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"))
    return table("card|framework|source|>readings|>agree|>too close to call|>disagree|>estimate / limit", lines)


@part
def gpu_disagreements() -> str:
    rows = (
        (row["card"], row["model"].removeprefix("keras.applications:"), row["batch"], row["policy"], row["fact"],
         *(f"{size / 1e9:.2f}" for size in (row["sizes"]["low"], row["sizes"]["most_needed"], row["limit"])),
         row["reason"])
        for row in results("gpu_facts")["rows"]
        if row["agreement"] != "yes"
    )  # fmt: skip
    return table("card|network|>batch|dtype policy|reading|>at least, GB|>at most|>limit|why", rows)


@part
def intervals() -> str:
    summary = results("estimates")["summary"]
    rows = []
    for mode, runs in summary["capped"].items():
        method = summary["methods"][mode]
        failed = runs["below_need"] - len(runs["trained_below_need"])
        rows.append(
            (mode, f"{method['median_high_to_measured']:.2f}", f"{method['maximum_within_high_percent']:.0f} %",
             f"{len(runs['ran_out_at_high'])} of {runs['at_high']}", f"{failed} of {runs['below_need']}")
        )  # fmt: skip
    columns = "mode|>`high` / measured|>largest step ≤ `high`|>ran out under `high`|>ran out under 0.9 × the need"
    return table(columns, rows)


@part
def kernels() -> str:
    by_kernels = results("estimates_kernels")["kernels"]
    rows = [
        (name, *errors(by_kernels[kind]["graph"]), f"{by_kernels[kind]['graph']['maximum_within_high_percent']:.0f} %",
         by_kernels[kind]["graph"]["median_high_to_measured"], by_kernels[kind]["load_average"])
        for kind, name in _KERNELS.items()
    ]  # fmt: skip
    columns = "CPU kernels|>rows|>median error|>95th percentile|>largest step ≤ `high`|>`high` / measured|>load average"
    return table(columns, rows)


@part
def keras_io() -> str:
    rows = []
    for kind, name in _KERNELS.items():
        summary = results("keras_io")["summary"][kind]
        if summary["answered"]:
            of_examples = f"{summary['answered']} of {summary['estimated']}"
            _, median, p95 = errors(summary | {"rows": None})
            rows.append((name, of_examples, median, p95, f"{summary['covered_percent']:.0f} %"))
    columns = "CPU kernels|>answered|>median error|>95th percentile|>all steps in the interval"
    return table(columns, rows)


@part
def estimate_cost() -> str:
    rows = []
    for row in results("estimate_cost")["rows"]:
        if "seconds" not in row:
            continue
        goal = f"≤ {row['goal']:g}" if row.get("goal") else ""
        if "estimates" in row:
            goal = f"{row['estimates']:.1f} of one estimate, ≤ {row['estimates_goal']:g}"
        rows.append(
            (row["model"].split(",")[0], row["asked"], f"{row['imports']:.1f}", goal, f"{row['seconds']:.0f}",
             f"{row['host_bytes'] / 1e9:.2f} GB")
        )  # fmt: skip
    return table("model|method|>× import keras|goal|>seconds|>host memory", rows)


@part
def startup() -> str:
    rows = ((f"`{row['command']}`", f"{row['median_seconds']:.3f}") for row in results("startup")["rows"])
    return table("command|>seconds", rows)


@part
def logger() -> str:
    logger = results("logger")
    summary = logger["summary"]
    row = (
        f"{summary['step_milliseconds']:.1f} ms", f"{summary['hooks_in_fit_microseconds']:.0f} µs",
        f"{100 * summary['median_own_share']:.2f} %", f"{100 * summary['difference_share']:.2f} %",
        len(logger["rows"]),
    )  # fmt: skip
    return table(">step|>hooks of a batch (goal 50 µs)|>own count|>`fit` with and without it (goal 1 %)|>pairs", [row])


def streaming_lines(*parts: str) -> list[dict[str, Any]]:
    return [line for row in results("streaming")["rows"] if row["part"] in parts for line in row["summary"]]


@part
def reading() -> str:
    ratios: dict[str, dict[str, str]] = {}
    for line in streaming_lines("contiguous", "chunked"):
        match = re.fullmatch(r"(.*), (warm|cold): ours, (.*) / raw preadv", line["what"])
        if match:
            cell = f"{line['value']:.2f} ({line['goal']})"
            ratios.setdefault(match[1], {})[f"{match[3]}, {match[2]}"] = cell if line["met"] else f"**{cell}**"
    ways = ("shuffled, warm", "in order, warm", "shuffled, cold", "in order, cold")
    rows = ((name, *(cells.get(way, "") for way in ways)) for name, cells in ratios.items())
    return table("file|" + "|".join(f">{way}" for way in ways), rows)


@part
def streaming() -> str:
    rows = [
        (line["what"], f"{line['value']:.2f}" if line["met"] else f"**{line['value']:.2f}**", line["goal"])
        for line in streaming_lines("packed", "fancy", "peers", "mixing", "fit")
        if "bytes read" not in line["what"]
    ]
    read = [
        line["value"] for line in streaming_lines("contiguous", "chunked", "packed") if "bytes read" in line["what"]
    ]
    return table(
        "what|>ratio|goal", [*rows, ("bytes read in an epoch / stored, at most", f"{max(read):.3f}", "≤ 1.05")]
    )


@part
def freeing() -> str:
    names = {"keras": "`keras.utils.clear_session()`", "kerasmem": "`kerasmem.clear_session()`"}
    rows = []
    for way in sorted(results("freeing")["ways"], key=lambda way: (way["execution"] != "graph", way["way"])):
        left, growth = way["device_bytes"], f"{way['host_growth_bytes_per_model'] / 1e6:.2g} MB"
        device = f"{left['last'] / 1e6:.1f} MB" if left["largest"] else "0 bytes after each"
        execution = {"xla": "XLA"}.get(way["execution"], way["execution"])
        rows.append((names[way["way"]], execution, way["models"], device, growth))
    return table("cleared with|execution|>models|>left on the device|>host, a model more", rows)


@part
def overhead() -> str:
    rows = (
        (name, f"{row['step_milliseconds']:.0f} ms", f"{100 * row['overhead_share']:+.1f} %")
        for name, row in results("recovery")["overhead"].items()
    )
    return table("model|>step|>`kerasmem.fit` against `model.fit`", rows)


@part
def kills() -> str:
    ours = results("recovery")["kills"]
    theirs = ours["backup_and_restore"]
    unreadable = sum("error" in row.get("backup_and_restore", {}) for row in ours["rows"])
    rows = [
        ("`kerasmem.fit(checkpoint=…)`", ours["kills"], ours["bit_equal"], 0, ours["most_batches_lost"]),
        ("Keras's `BackupAndRestore`", theirs["kills"], theirs["bit_equal"], unreadable, "not measured"),
    ]
    return table("|>killed runs|>same weights, bit for bit|>unreadable checkpoint|>batches lost, at most", rows)


@part
def cases() -> str:
    recovery = results("recovery")
    ours, onednn = (recovery[name]["outcomes"] for name in ("cases", "cases_onednn"))
    return table(
        "outcome|>runs|>with oneDNN's kernels",
        ((name, count, onednn.get(name, 0)) for name, count in ours.items()),
    )


@part
def recompute() -> str:
    summary = results("recompute")["summary"]
    names = {
        "dense": "48 × Dense(1024), batch 4096", "resnet50": "ResNet50, 128², batch 16",
        "transformer": "12-layer Transformer",
    }  # fmt: skip
    rows = []
    for model, name in names.items():
        for mode in ("graph", "xla"):
            plain, ours = (summary[f"{model}/{mode}/float32/{way}"] for way in ("plain", "kerasmem/auto"))
            rows.append(
                (name, mode, f"{plain['peak_mb']:,.0f}", f"{ours['peak_mb']:,.0f}", f"{ours['above_start']:.2f}",
                 f"{ours['activations']:.2f}", f"{ours['step_time']:.2f} ×")
            )  # fmt: skip
    return table("model|mode|>plain, MB|>recomputed, MB|>above start|>activations|>step time", rows)


@part
def segments() -> str:
    summary = results("recompute")["summary"]
    rows = []
    for way in ("plain", "kerasmem/auto", *(f"kerasmem/{count}" for count in (2, 4, 8, 16, 24, 49))):
        cells: list[str] = []
        for policy in ("float32", "mixed_bfloat16"):
            row = summary.get(f"dense/graph/{policy}/{way}")
            if row is None:
                cells += [""] * 3
                continue
            predicted = "" if row["predicted_mb"] is None else f"{row['predicted_mb']:,.0f}"
            cells += [f"{row['above_start_mb']:,.0f}", predicted, f"{row['seconds']:.2f}"]
        rows.append((way.rpartition("/")[2], *cells))
    of_policy = ">{0}: MB|>predicted|>seconds a step"
    return table(f"segments|{of_policy.format('float32')}|{of_policy.format('mixed_bfloat16')}", rows)


@part
def curve() -> str:
    curves = results("recompute")["curve"]
    rows = []
    for name in sorted({name for of_kind in curves.values() for name in of_kind}):
        onednn, eigen = (curves[kind][name] for kind in _KERNELS)
        rows.append(
            (f"`{name}`", onednn["layers"], *(f"{value:.2f}" for value in (
                onednn["curve"], onednn["planned"], onednn["activations"], eigen["activations"], onednn["step_time"],
            )))
        )  # fmt: skip
    return table("model|>layers|>2 / √layers|>planned|>left, oneDNN's|>left, TensorFlow's own|>step time, ×", rows)


@part
def cluster_plan() -> str:
    data = results("cluster_plan")
    plan = data["plans"][0]
    requests, files = (f"{low:,} to {high:,}" for low, high in (plan["requests_of_a_rank"], plan["files_of_a_rank"]))
    row = (
        f"{data['open_index_seconds']:.1f} s", f"{plan['plan_seconds']:.1f} s",
        f"{data['peak_bytes_of_index_and_plans'] / 1e6:.0f} MB", requests, files,
        f"{plan['rows_read_for_one_needed']:.3f}", f"{plan['travel_of_uniform']:.2f}",
    )  # fmt: skip
    columns = ">index read|>plan of a worker|>memory|>requests an epoch|>files|>rows read / needed|>shuffled"
    return table(columns, [row])


@part
def driver_memory() -> str:
    rows = []
    for share in results("driver_memory")["rows"]:
        size = "not known" if share["size_bytes"] is None else f"{share['size_bytes'] / 2**20:,.0f} MiB"
        name, sms = share["card"] or "none", share["multiprocessors"]
        card = f"{name}, {sms} SMs" if sms else name
        basis = share["basis"] if share["source"] is None else f"[{share['basis']}]({share['source']})"
        rows.append((share["part"], share["capability"], card, size, basis, share["framework"], share["note"]))
    return table("part|compute capability|card|>size|how|framework|what it is", rows)
