"""The measured figures of the README and the manual, each part from the JSON that its bench has written."""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kerasmem.devices.driver_memory import driver_shares
from kerasmem.estimation.truth.checking import fields
from kerasmem.estimation.truth.rows import distribution, findings

RESULTS = Path(__file__).resolve().parent / "bench" / "results"
_PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

PARTS: dict[str, Callable[[], str]] = {}


def part(function: Callable[[], str]) -> Callable[[], str]:
    PARTS[function.__name__] = function
    return function


def rewritten(text: str) -> str:
    """Return a page with every part rewritten."""
    return _PART.sub(lambda found: f"{found[1]}{PARTS[found[2]]().strip()}\n{found[3]}", text)


def differing(one: str, other: str) -> list[str]:
    """Return the names of the parts that differ."""
    pairs = zip(_PART.finditer(one), _PART.finditer(other), strict=True)
    return [before[2] for before, after in pairs if before[0] != after[0]]


def results(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def table(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table; a column whose name begins with ">" is set to the right."""
    names = columns.split("|")
    lines = [
        "| " + " | ".join(name.lstrip(">") for name in names) + " |",
        "|" + "|".join("---:" if name.startswith(">") else "---" for name in names) + "|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def prose(text: str) -> str:
    """Return paragraphs in lines of equal width."""
    return "\n\n".join(textwrap.fill(each, 118, break_long_words=False) for each in text.strip().split("\n\n"))


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


@part
def estimates() -> str:
    found = results("estimates")["summary"]
    methods, rivals, held, capped = found["methods"], found["rivals"], found["held_out"], found["capped"]
    goals = {"xla": "≤ 2 % / ≤ 8 %", "graph": "≤ 3 % / ≤ 12 %", "probe": "≤ 2 % / ≤ 8 %"}
    rows = [
        (name, each["rows"], f"{each['median_absolute_error_percent']} %", f"{each['p95_absolute_error_percent']} %",
         goals.get(name, ""))
        for name, each in [*((name, methods[name]) for name in goals),
                           *((name, rivals[name]) for name in ("formula", "grappler", "model-profiler"))]
    ]  # fmt: skip
    every = results("jax_estimates")["summary"]["all"]
    rows.insert(1, (
        "xla, Keras on JAX (resident memory)", every["rows"], f"{every['median_absolute_error_percent']} %",
        f"{every['p95_absolute_error_percent']} %", "≤ 2 %",
    ))  # fmt: skip
    tried = sum(capped[name]["at_high"] for name in capped)
    died = sum(len(capped[name]["ran_out_at_high"]) for name in capped)
    below = sum(capped[name]["below_need"] for name in capped)
    survived = sum(len(capped[name]["trained_below_need"]) for name in capped)
    all_of_them = f"all {below}" if not survived else f"{below - survived} of {below}"
    graph, xla = methods["graph"], methods["xla"]
    first = prose(
        f"{found['measured']} of the 215 designed rows are measured; the rest are heavy models in mixed precision, "
        "which take hours on two cores:"
    )
    last = prose(f"""
XLA's plan equals what the allocator was asked for in {xla["plan"]["equal_percent"]:.0f} % of rows (but for scalars that
TensorFlow copies beside it). On the held-out models the median error is
{held["graph"]["median_absolute_error_percent"]} % for `graph` and
{held["xla"]["median_absolute_error_percent"]} % for `xla`. In graph mode `high` is
{graph["median_high_to_measured"]:.2f} × the measured median and covers the largest step of
{graph["maximum_within_high_percent"]:.0f} % of rows (goal 98 %); under XLA it is {xla["median_high_to_measured"]:.2f} ×
and covers {xla["maximum_within_high_percent"]:.0f} %. Trained again under a limit of `high`, {died} of {tried} runs
went out of memory (goal: 2 %), and under nine tenths of the need {all_of_them} did. *grappler* is TensorFlow's virtual
cluster (`DeterminePeakMemoryUsage`), *model-profiler* the package of that name; both ran on
{rivals["grappler"]["rows"]} of the rows.""")
    return f"{first}\n\n{table('method|>rows|>median error|>95th percentile|goal', rows)}\n\n{last}"


@part
def jax_estimates() -> str:
    found = results("jax_estimates")
    every, held, versions = found["summary"]["all"], found["summary"]["held_out"], found["environment"]
    failed = "".join(
        f" {each['model'].rpartition(':')[2]}: {each['reason'].split('; ')[0]}." for each in found["failed"]
    )
    said = prose(f"""
Against resident memory (`scripts/bench/jax_estimates.py`: JAX {versions["jax"]}, Keras
{versions["keras"]}, a busy {versions["cores"]}-core CPU) the median error is
{every["median_absolute_error_percent"]} %, of the {held["rows"]} rows held out
{held["median_absolute_error_percent"]} %, and the worst {every["worst_percent"]} % (goal: a median of 2 %).
{every["most_within_high"]} of {every["rows"]} largest steps lie within `high`, which is
{every["median_high_to_measured"]} × the measured median. Without a figure:{failed}

What kernels take from the C library is in the measurement and not in XLA's plan. What YNNPACK's convolutions copy is
counted; Eigen's kernels run products of transposed matrices and most of the gradients of convolutions, and what those
take is not: some 2 % for models of matrix products. So read `high` on a CPU for training with convolutions, or measure;
a card's kernels take other scratch.""")
    return f"{said}\n\n{rows_of_models(found['rows'])}"


def rows_of_models(found: list[dict[str, Any]]) -> str:
    """Return the table of what was estimated and measured, model by model."""
    rows = [
        (row["model"].rpartition(":")[2], row["batch_size"], row["optimizer"], row["dtype_policy"], row["mode"],
         mib(row["estimated"]), mib(row["measured"]), f"{100 * (row['ratio'] - 1):+.1f} %")
        for row in found
    ]  # fmt: skip
    return table("model|>batch|optimizer|precision|mode|>estimated|>measured|>off by", rows)


@part
def accuracy() -> str:
    found = results("estimates")["summary"]
    methods, by_hand = found["methods"], found["rivals"]["formula"]["median_absolute_error_percent"]
    (xla, xla95), (graph, graph95) = (
        (methods[name]["median_absolute_error_percent"], methods[name]["p95_absolute_error_percent"])
        for name in ("xla", "graph")
    )
    return prose(f"""
Against {found["measured"]} measured training steps (a 2-core CPU, TensorFlow's GPU allocator) the median error is
{xla} % for models compiled by XLA and {graph} % in graph mode; 95 % of the rows are within {xla95} % and {graph95} %.
The formula that is usually done by hand misses by {by_hand} %.
""")


@part
def kernels() -> str:
    found = results("estimates_kernels")["kernels"]
    names = {"onednn": "oneDNN's", "eigen": "TensorFlow's own"}
    rows = []
    for kind, name in names.items():
        each, noise = found[kind]["graph"], found[kind]["noise_percent"]
        rows.append(
            (name, each["rows"], f"{each['median_absolute_error_percent']} %",
             f"{each['p95_absolute_error_percent']} %", f"{each['maximum_within_high_percent']:.0f} %",
             each["median_high_to_measured"], noise["median_load_average"])
        )  # fmt: skip
    columns = "CPU kernels|>rows|>median error|>95th percentile|>largest step ≤ `high`|>`high` / measured|>load average"
    return table(columns, rows)


@part
def drawn() -> str:
    found = results("drawn_truth")["summary"]
    rows = []
    for kind, name in (("onednn", "oneDNN's"), ("eigen", "TensorFlow's own")):
        each = found[kind]
        worst = max(abs(error) for error in each["worst"].values())
        rows.append(
            (name, each["models"], f"{each['median_absolute_error_percent']} %",
             f"{each['p95_absolute_error_percent']} %", f"{worst} %",
             f"{each['most_covered_by_high']} of {each['models']}",
             f"{each['measured_within_interval']} of {each['models']}")
        )  # fmt: skip
    columns = (
        "CPU kernels|>models|>median error|>95th percentile|>worst|>largest step ≤ `high`|>usual step in the interval"
    )
    return table(columns, rows)


@part
def examples() -> str:
    found = results("example_answers")
    kinds = found["kinds"]
    short = {name: re.sub(r"\S+/(?=\w+)", "…/", why.partition(";")[0]) for name, why in found["unanswered"].items()}
    without = "".join(f" None for `{name}`: {why}." for name, why in short.items())
    not_asked = f" Not asked yet: {', '.join(found['not_asked'])}." if found["not_asked"] else ""
    return prose(f"""
{found["answered"]} of {found["examples"]} models get an answer by `auto`, no step being run ({found["share"]:.1%}):
{kinds["examples"]} of Keras's published examples, rebuilt at small size with the same layers; {kinds["loops"]} loops
without `fit`; {kinds["hub"]} models on backbones of keras-hub; {kinds["applications"]} of
`keras.applications`.{without}{not_asked}""")


@part
def estimate_cost() -> str:
    rows = []
    for row in results("estimate_cost")["rows"]:
        if "seconds" not in row:
            continue
        goal = f"≤ {row['goal']:g}" if row.get("goal") else ""
        if "estimates" in row:
            goal = f"{row['estimates']:.1f} of one estimate, ≤ {row['estimates_goal']:g}"
        times = f"{row['imports']:.1f}" if "imports" in row else "not known"
        rows.append(
            (row["model"].split(",")[0], row["asked"], times, goal, f"{row['seconds']:.0f}",
             f"{row['host_bytes'] / 1e9:.2f} GB")
        )  # fmt: skip
    return table("model|asked|>× import keras|goal|>seconds|>host memory", rows)


@part
def dataset() -> str:
    """The errors of the estimates in the data set, by method and kernels."""
    rows = [json.loads(line) for line in (RESULTS / "estimates.jsonl").read_text().splitlines()]
    known = [row for row in rows if row.get("truth", {}).get("runs")]
    found = distribution(each for row in known for each in findings(row))
    cells = [
        (each.method, each.kernels, each.rows, *(f"{error:+.1f} %" for error in each.percentiles),
         f"{each.covered} of {each.with_high}")
        for each in found
    ]  # fmt: skip
    names = "method|kernels|>rows|>5 %|>25 %|>median|>75 %|>95 %|>largest step within `high`"
    first = prose(f"""{len(rows)} rows of {len({row["model"] for row in rows})} networks; {len(known)} of them are
measured. The columns in between are percentiles of the signed error: the prediction against the measured median.""")
    return f"{first}\n\n{table(names, cells)}"


@part
def dataset_fields() -> str:
    """The fields of a row of the data set."""
    rows = []
    for field in fields().values():
        kind = field.type + (f", {field.unit}" if field.unit else "") + (" or null" if field.null else "")
        words = "" if not field.choices else f" ({', '.join(f'`{word}`' for word in field.choices)})"
        rows.append((f"`{field.path}`", kind, "yes" if field.required else "", field.what + words))
    return table("field|type|in every row|what it is", rows)


@part
def driver_memory() -> str:
    """What a process takes of a card beside its allocator."""
    rows = []
    for share in driver_shares():
        size = "not known" if share.size_bytes is None else mib(share.size_bytes)
        name = share.card or "none"
        card = f"{name}, {share.multiprocessors} SMs" if share.multiprocessors else name
        how = share.basis if share.source is None else f"[{share.basis}]({share.source})"
        rows.append((share.part, "{}.{}".format(*share.capability), card, size, how, share.framework, share.note))
    return table("part|compute capability|card|>size|how|framework|what it is", rows)


@part
def logger() -> str:
    found = results("logger")["summary"]
    return prose(f"""
`MemoryLogger` in `fit` (`scripts/bench/logger.py`: a small CNN, steps of {found["step_milliseconds"]:.1f} ms): its
hooks take {found["hooks_in_fit_microseconds"]:.0f} µs a batch (goal 50), {100 * found["median_own_share"]:.2f} % of the
step by its own count; {len(results("logger")["rows"])} pairs of runs with and without it differ by a median of
{100 * found["median_difference_share"]:.2f} % (goal 1 %).""")


@part
def streaming() -> str:
    found = results("streaming")
    rows = [row for row in found["summary"] if "bytes read" not in row["what"]]
    read = max(row["value"] for row in found["summary"] if "bytes read" in row["what"])
    loops = sorted(
        row["beyond"]["fit on one batch beyond own steps on one batch"]["median"]
        for row in found["rows"] if row["part"] == "fit"
    )  # fmt: skip
    rates = sorted(
        statistics.median(rate)
        for row in found["rows"] for name, rate in row.get("gb_per_second", {}).items() if "as_tf_dataset" in name
    )  # fmt: skip
    said = prose(f"""
Bytes read an epoch are {read:.3f} of those stored. What misses the goals: rows of 3 KB cost a vector each in the
kernel; of what is faster to unpack than to copy (blosc, uint8) the copy to the batch is the limit. Of the time that
`fit` takes beyond the step itself, Keras's own loop takes a part: on one batch that is there already it is
{100 * loops[0]:.0f} to {100 * loops[-1]:.0f} % of the step. `as_tf_dataset()` costs a copy through tf.data
and delivers {rates[0]:.1f} to {rates[-1]:.1f} GB/s.
""")
    made = table("what|>ratio|goal", ((row["what"], f"{row['value']:.2f}", row["goal"]) for row in rows))
    return f"{made}\n\n{said}"


@part
def formula() -> str:
    found = results("formula")
    shown = {
        ("mnist_cnn", "adam"), ("wide_mlp", "sgd"), ("wide_mlp", "adam"), ("vgg16", "adam"), ("resnet50", "adam"),
        ("resnet50_wide_batch", "sgd"), ("mobilenet_v2", "adam"), ("unet", "adam"), ("transformer", "adam"),
        ("lstm", "sgd"),
    }  # fmt: skip
    rows = [
        (row["model"], row["optimizer"], row["batch_size"], f"{row['formula_bytes'] / 2**20:.1f}",
         f"{row['measured_bytes'] / 2**20:.1f}", f"{row['ratio']:.2f}")
        for row in found["rows"] if (row["model"], row["optimizer"]) in shown
    ]  # fmt: skip
    made = table("model|optimizer|>batch|>formula (MiB)|>measured (MiB)|>ratio", rows)
    error = found["summary"]["median_absolute_error_percent"]
    ends = sorted(found["rows"], key=lambda row: row["ratio"])
    (low, first), (high, last) = ((each["ratio"], each["model"]) for each in (ends[0], ends[-1]))
    said = prose(f"""
Over all {len(ends)} rows the formula's median error, against the whole peak with the optimizer's slots in it, is
{error:.0f} %: deep networks free and reuse buffers ({low:.2f} for `{first}`), and recurrent layers hold far more inside
than they put out ({high:.1f} for `{last}`). That is why the report gives an interval, and no upper end where a
layer hides its inside.
""")
    return f"{made}\n\n{said}"


@part
def startup() -> str:
    rows = ((f"`{row['command']}`", f"{row['median_seconds']:.3f}") for row in results("startup")["rows"])
    return table("command|>seconds", rows)


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
def isolation() -> str:
    found = results("isolation")
    names = {
        "keeping": "a loop that keeps its models", "loop": "a loop that keeps the best weights only",
        "clear_session": "the same, with `keras.backend.clear_session()`",
        "spawn": "`ProcessPoolExecutor`, a process a trial", "isolated": "`run_isolated` and `BestWeights`",
    }  # fmt: skip
    rows = (
        (names[way["way"]], mib(way["resident_bytes"]["settled"]), mib(way["resident_bytes"]["last"]),
         f"{way['grown_bytes_per_trial'] / 2**20:.2f} MiB", f"{way['seconds_per_trial']:.2f}")
        for way in found["ways"]
    )  # fmt: skip
    return table("way|>after 10 trials|>after 50|>grown a trial|>seconds a trial", rows)


@part
def recovery() -> str:
    found = results("recovery")
    kills, checkpoint, peers = found["kills"], found["checkpoint"], found["peers"]
    shares = [each["overhead_share"] for each in found["overhead"].values()]
    steps = [each["step_milliseconds"] for each in found["overhead"].values()]
    lost, differences = found["lost_where_it_ran_out"], found["differences"]
    norm = max(each["norm"] for each in differences.values())
    ragged = peers["ragged"]["error_of_the_update"]
    theirs = kills["backup_and_restore"]
    unreadable = sum("error" in row.get("backup_and_restore", {}) for row in kills["rows"])
    first = prose(f"""
Measured (`scripts/bench/recovery.py`): where nothing runs out, the time of `kerasmem.fit`
differs by {" and ".join(f"{100 * share:+.1f} %" for share in shares)} from that of `model.fit` at steps of
{" and ".join(f"{step:.0f}" for step in steps)} ms. A step that runs out costs
{lost["graph"]["seconds_lost_per_failure"]:.0f} s in graph mode, ten of which TensorFlow's allocator waits, and
{lost["xla"]["seconds_lost_per_failure"]:.0f} s under XLA, where a process dies of it; the weights of a training
that ran out differ from those of one that did not by {norm:.0e} of their norm at most. A checkpoint of
{checkpoint["state_bytes"] / 1e6:.0f} MB takes {checkpoint["copy_milliseconds"]:.0f} ms to copy and
{checkpoint["write_milliseconds"]:.0f} ms to write. Killed at
{kills["kills"]} random moments with a checkpoint every {kills["every"]} batches, {kills["bit_equal"]} of
{kills["kills"]} runs ended with the same weights, bit for bit, and none lost more than
{kills["most_batches_lost"]} batches. Of {theirs["kills"]} that were killed so with Keras's `BackupAndRestore`,
{theirs["bit_equal"]} ended with the same weights; {unreadable} found a backup that cannot be read.
Where the last piece of a batch is smaller, the update is off by
{ragged["kerasmem.fit"]:.0e} of its size, that of `gradient_accumulation_steps` by
{ragged["gradient_accumulation_steps"]:.0e}.""")
    return f"{first}\n\n{_cases(found)}"


def _cases(found: dict[str, Any]) -> str:
    """Return what came of the seeded runs that run out, and of those that nothing helps."""
    cases, hopeless = found["cases"], found["hopeless"]
    twice = sum(count for failures, count in cases["failures"].items() if int(failures) > 2)
    seconds = [each["seconds"] for each in hopeless.values()]
    by_one = [each["keras_by_one_row"] for each in cases["rows"] if "one row does not fit" in each["outcome"]]
    first = prose(f"""
{cases["cases"]} seeded runs under limits that they run out under (model, limit, optimizer, precision and loop are
drawn), each beside the same run with memory enough. {twice or "None"} of them failed more than twice, and the weights
of those that end as the undisturbed run differ from its by {cases["largest_difference_of_the_exact"]:.0e} of their
norm at most (goal 1e-05):""")
    last = prose(f"""
Of {len(by_one)} runs that ended with the word that not even one row fits,
{sum(set(each) != {"fits"} for each in by_one)} were right: Keras's own `fit` with batches of one row ran out under
the same limit, tried twice.

Where nothing helps, the error came after {min(seconds):.0f} to {max(seconds):.0f} s (goal 30 s; the allocator waits ten
of them, and the load average of this machine of {found["environment"]["cores"]} cores was
{found["load_average"]["hopeless"]:.0f}).""")
    onednn = found["cases_onednn"]
    ended = ", ".join(f"{count} {outcome}" for outcome, count in onednn["outcomes"].items())
    other = prose(f"""
The first {onednn["cases"]} of them once more with oneDNN's kernels, each step in a process of its own: {ended}.""")
    rows = cases["outcomes"].items()
    return f"{first}\n\n{table('how it ended|>runs', rows)}\n\n{other}\n\n{last}"


@part
def recompute() -> str:
    found = results("recompute")
    summary, rows = found["summary"], found["rows"]
    names = {"dense": "48 × Dense(1024), batch 4096", "resnet50": "ResNet50, 128², batch 16",
             "transformer": "12-layer Transformer"}  # fmt: skip
    first = []
    for model, name in names.items():
        for mode in ("graph", "xla"):
            plain, ours = (summary[f"{model}/{mode}/float32/{way}"] for way in ("plain", "kerasmem/auto"))
            first.append(
                (name, mode, f"{plain['peak_mb']:,.0f}", f"{ours['peak_mb']:,.0f}", f"{ours['peak']:.2f}",
                 f"{ours['above_start']:.2f}", f"{ours['activations']:.2f}", f"{ours['step_time']:.2f} ×")
            )  # fmt: skip
    second = []
    for policy in ("float32", "mixed_bfloat16"):
        plain = f"dense/graph/{policy}/plain"
        if plain not in summary:
            continue
        for key, row in rows.items():
            if key.startswith(f"dense/graph/{policy}/") and key in summary and ("kerasmem" in key or key == plain):
                what = key.split("/")[-1].replace("plain", "none").replace("bad", "3, cut badly")
                each = summary[key]
                predicted = "" if each["predicted_mb"] is None else f"{each['predicted_mb']:,.0f}"
                seconds = f"{row['median_step_seconds']:.2f}"
                second.append((policy, what, f"{each['above_start_mb']:,.0f}", predicted, seconds))
    second.sort(
        key=lambda row: (row[0], row[1] != "none", not row[1].isdecimal(), int("0" + re.sub(r"\D", "", row[1])))
    )
    failed = sorted(key.split("/")[0] + ", " + key.split("/")[1] for key, row in rows.items()
                    if "RematScope" in key and "error" in row)  # fmt: skip
    rival = next(
        f"`tf.recompute_grad` around each layer leaves {summary[key]['above_start']:.2f} of the peak at "
        f"{summary[key]['step_time']:.2f} × the time. "
        for key in summary
        if "recompute_grad" in key
    )
    return "\n\n".join(
        [
            prose(
                'Measured (`scripts/bench/recompute.py --again 2`, SGD, `segments="auto"`, MB; *above start* is the '
                "peak less what was in memory before the step, *activations* the peak less weights and gradients, both "
                "as shares of the plain model's):"
            ),
            table("model|mode|>plain|>recomputed|>peak|>above start|>activations|>step time", first),
            prose(
                "The dense stack in graph mode, cut into more and more segments: peak above what is in memory before "
                "the step, in MB:"
            ),
            table("policy|segments|>measured|>predicted|>seconds a step", second),
            prose(f"{rival}`keras.RematScope` fails in `fit` on TensorFlow ({'; '.join(failed)})."),
            *_curve(found["curve"]),
        ]
    )


def _curve(found: dict[str, Any]) -> list[str]:
    """Return what is left of the activations of many architectures, on both kinds of kernels."""
    kinds = {"onednn": "oneDNN's", "eigen": "TensorFlow's own"}
    measured = {
        kind: {name: row for name, row in found[kind].items() if "error" not in row} for kind in kinds if kind in found
    }

    def once(row: dict[str, Any]) -> dict[str, Any]:
        return row

    def twice(row: dict[str, Any]) -> dict[str, Any]:
        return row["two_levels"]

    rows = []
    for name in sorted({name for each in measured.values() for name in each}):
        of_kind = [each.get(name) for each in measured.values()]
        row = next(each for each in of_kind if each is not None)
        left = [
            ", ".join(f"{of(each)['activations']:.2f}" if each else "not measured" for each in of_kind)
            for of in (once, twice)
        ]
        planned = [f"{of(row)['planned']:.2f}" for of in (once, twice)]
        layers = f"{row['layers']}, {row['keeping_layers']}"
        promised = f"{row['curve']:.2f}, {row['curve_of_keeping']:.2f}"
        alone = f"{row['one_layer']:.2f}"
        rows.append((f"`{name}`", layers, promised, alone, planned[0], left[0], planned[1], left[1]))

    def counts(which: str, of: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
        return [f"{sum(of(row)[which] for row in each.values())} of {len(each)}" for each in measured.values()]

    every = [row for each in measured.values() for row in each.values()]
    asked = [of(row)["asked_bytes"] / of(row)["planned_bytes"] for row in every for of in (once, twice)]
    names = [name for each in measured.values() for name in each for _ in (once, twice)]
    most = names[asked.index(max(asked))]
    times, took = (
        [statistics.median(of(row)[name] for row in every) for of in (once, twice)]
        for name in ("extra_time", "step_time")
    )
    first_kind = next(iter(measured.values())).values()
    first = prose(
        "Of n layers that keep as much each, √n segments keep 2 √n (Chen et al., 2016). So many architectures leave at "
        "most that of their activations' peak, where n counts all layers, and where it counts those that keep "
        "something for the gradient; the times are medians, measured beside other work (`scripts/bench/recompute.py "
        "--curve onednn eigen`, graph mode; `transfer` and `encoder_in_model` are models inside a model; `decoder`, "
        "`encoder_in_model` and `mixer` are in `mixed_bfloat16`):"
    )
    summary = table(
        "|".join(
            ["", *(f">{which}, {kinds[kind]}" for which in ("all layers", "that keep") for kind in measured),
             ">predicted time", ">step time"]
        ),
        [
            (f"`levels={level}`", *counts("is_on_it", of), *counts("is_on_that_of_keeping", of),
             f"{1 + times[level - 1]:.2f} ×", f"{took[level - 1]:.2f} ×")
            for level, of in ((1, once), (2, twice))
        ],
    )  # fmt: skip
    second = prose(
        "Layers that differ have other bounds. *one layer* is what the gradient of the largest layer takes alone, "
        f"which no cut makes less: for {sum(row['one_layer'] > row['curve'] for row in first_kind)} of "
        f"{len(first_kind)} that is more than the curve; in convolutional networks the first layers keep most. "
        "*planned* is the lowest that cuts between layers allow at the price of one more forward pass, or two. "
        "These are for oneDNN's kernels. *left* is measured, with oneDNN's kernels and with TensorFlow's own, all but "
        "the weights: the batch, the kernels' scratch and what the allocator's chunks waste are in it. Where it is "
        "above *planned*, it is the chunks, which may be twice what lies in them, and on TensorFlow's own kernels "
        "their scratch: the tensors alone, recorded, ask for "
        f"{100 * min(asked):.0f} to {100 * max(asked):.0f} % of what was planned (median "
        f"{100 * statistics.median(asked):.0f} %; most in `{most}`). XLA compiles the "
        "grouped convolutions of `convnext_tiny` on a CPU, "
        "and one of them alone works in more than half of what the plain step takes:"
    )
    columns = "model|>layers, that keep|>2 / √ of each|>one layer|>planned|>left|>planned, `levels=2`|>left, `levels=2`"
    return [first, summary, second, table(columns, rows)]


@part
def parallel() -> str:
    found = results("parallel")["summary"]
    flow, jax = found["tensorflow"], found["jax"]
    return prose(
        "Compared with 2 and 4 processes on loopback (`scripts/bench/parallel.py`): median error "
        f"{flow['median_percent']:.1f} % on TensorFlow (worst {flow['worst_percent']:.1f} %, goal 15; {flow['rows']} "
        f"rows, allocator peaks) and {jax['median_percent']:.1f} % on JAX (worst {jax['worst_percent']:.1f} %, "
        f"{jax['rows']} rows, resident memory)."
    )


@part
def remote() -> str:
    found = results("remote")
    shares: dict[tuple[str, str], dict[float, float]] = {}
    last = {}
    for row in found["summary"]:
        if "cache filled" not in row["way"]:
            key = row["way"], row["order"]
            shares.setdefault(key, {})[row["link_bytes_per_second"] / 1e6] = row["link_share"]
            last[key] = f"{row['requests']:,.0f}", f"{row['read_amplification']:.3f}"
    rates = sorted({rate for each in shares.values() for rate in each})
    rows = ((*key, *(f"{100 * each[rate]:.0f} %" for rate in rates), *last[key]) for key, each in shares.items())
    columns = "|".join(["way", "order", *(f">of {rate:g} MB/s" for rate in rates), ">requests", ">read / file"])
    megabytes = found["settings"]["file_bytes"] / 1e6
    said = prose(
        f"(`scripts/bench/remote.py`: a file of {megabytes:.0f} MB behind a server on loopback that answers after "
        "20 ms and sends no faster than the link; one epoch, opening included, goal 80 %.)"
    )
    return f"{table(columns, rows)}\n\n{said}"


@part
def cluster_plan() -> str:
    data = results("cluster_plan")
    scale, small = data["scale"], data["checked_row_for_row"]
    rows = []
    for plan in data["plans"]:
        ranges = plan["requests_of_a_rank"], plan["files_of_a_rank"]
        requests, files = (f"{low:,} to {high:,}" for low, high in ranges)
        rows.append(
            [
                f"{plan['plan_seconds']:.2f} s",
                requests,
                files,
                f"{plan['rows_read_for_one_needed']:.3f}",
                f"{plan['rows_of_a_rank'][1] / plan['rows_of_a_rank'][0]:.5f}",
                f"{plan['travel_of_uniform']:.2f}",
            ]
        )
    index, opened = data["index_bytes"] / 1e6, data["open_index_seconds"]
    first = prose(
        f"What {scale['ranks']:,} workers would do with {scale['files']:,} files of {scale['rows']:,} rows each "
        "(`scripts/bench/cluster_plan.py`: plans alone, by the functions that training uses; no such files exist). The "
        f"index has {index:.0f} MB and is read in {opened:.1f} s; it and the plans take "
        f"{data['peak_bytes_of_index_and_plans'] / 1e6:.0f} MB:"
    )
    last = prose(
        "The last column says how far rows lie from their place in the files, against a uniform shuffle. Plans of "
        f"{small['ranks']} workers and {small['rows']:,} rows were compared row by row: each comes once, but for the "
        f"{small['rows_left_out']:,} of the last batches."
    )
    columns = ">plan of a worker|>requests an epoch|>files|>rows read / needed|>most / fewest rows|>shuffled"
    return f"{first}\n\n{table(columns, rows)}\n\n{last}"


@part
def scale() -> str:
    found = results("scale")
    sizes, workers = {}, []
    for row in found["rows"]:
        if row["part"] == "workers" and row["loader"] == "kerasmem":
            workers.append(row)
        elif row["part"] == "sizes" and "skipped" not in row:
            sizes[row["file_bytes"], row["state"], row["loader"]] = row
    rows = [
        (f"{size / 2**30:.0f} GiB", state, f"{row['median_nanoseconds_per_row']:,.0f} ns",
         f"{max(row['grown_bytes']) / 1e6:,.0f} MB" if state == "cold" else "", f"{row['bytes_read'][-1] / size:.3f}",
         *(f"{sizes[size, state, name]['median_nanoseconds_per_row']:,.0f} ns"
           if (size, state, name) in sizes else "–" for name in ("h5py", "grain", "tf.data")))
        for (size, state, loader), row in sorted(sizes.items(), key=lambda item: (item[0][1], item[0][0]))
        if loader == "kerasmem"
    ]  # fmt: skip
    each = [
        max(row["nanoseconds_per_row"]) / min(row["nanoseconds_per_row"])
        for (_, state, loader), row in sizes.items()
        if (state, loader) == ("cold", "h5py") and len(row["nanoseconds_per_row"]) > 1
    ]
    counts = ", ".join(str(row["workers"]) for row in workers)
    rates = ", ".join(f"{row['rows_per_second'] / 1e6:.1f}" for row in workers)
    most = max(row["read_over_file"] for row in workers)
    return "\n\n".join(
        [
            prose(
                "Time a row and memory by the size of the file (`scripts/bench/scale.py`: one process, rows of 3 KB, "
                "`memory_budget` 128 MB, shuffled, from the disk and from the page cache; beside it h5py's slices in "
                "file order, and grain and tf.data in shuffled blocks, each broken off after "
                f"{found['settings']['seconds']:.0f} s):"
            ),
            table("file||>time a row|>memory|>read / file|>h5py, in order|>grain|>tf.data", rows),
            prose(
                "From the disk times say little of the size: h5py's own passes over one file differ by up to "
                f"{max(each):.1f} × on this machine. Memory grows with the index of the file's chunks. With "
                f"{counts} workers on 2 cores {rates} million rows a second come from the page cache, and all together "
                f"read {most:.3f} × the file at most."
            ),
        ]
    )
