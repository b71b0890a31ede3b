"""Leaks: the statistics on series with a known answer and on recorded noise, then real loops that leak or do not."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import kerasmem
from kerasmem.errors import InputError, UsageError
from kerasmem.monitoring.evidence import Census, Container, Evidence, compare
from kerasmem.monitoring.leak_watch import LeakReport, early_noise, judge_growth, theil_sen, without_witness

HERE = Path(__file__).parent
KIB = 1024
# Host memory after each iteration of real loops that keep nothing: fit, predict with one and with seven shapes, a
# tf.function; KiB, recorded with `held_bytes`.
CLEAN = json.loads((HERE / "clean_loops.json").read_text())
# The first 20 iterations of the loop `many_shapes` in 136 processes, KiB above the first.
YOUNG = json.loads((HERE / "young_heaps.json").read_text())


def accumulated(steps, start=400_000 * KIB):
    series = [start]
    for step in steps:
        series.append(series[-1] + step)
    return series


def clean_run(seed):
    """A run that keeps nothing: a warm-up, the noise of a recorded loop, drawn again, and what else happens in one."""
    rng = random.Random(seed)
    count = rng.choice([20, 30, 60, 120])
    level, series = 0.0, []
    recorded = rng.choice(list(CLEAN.values()))
    quiet = recorded[len(recorded) // 3 :]
    line = (quiet[-1] - quiet[0]) / (len(quiet) - 1)
    noise = [value - quiet[0] - line * place for place, value in enumerate(quiet)]
    kind = seed % 5
    steps = {rng.randrange(count) for _ in range(rng.choice([1, 2]))}
    warm, rate = rng.uniform(0.5, 30) * KIB, rng.uniform(1.5, 8)
    for place in range(count):
        if kind == 1 and place in steps:
            level += rng.uniform(0.1, 3) * KIB  # a buffer that grew once
        settling = warm * (1 - 2.718 ** (-place * rate / (count / 4)))
        swing = 800 * ((place % 7) / 7) if kind == 2 else 0  # shapes by turns
        pages = rng.choice([0, 0, 0, 2048]) if kind == 3 else 0  # huge pages that come and go
        wave = rng.gauss(0, 300) if kind == 4 else 0  # threads at work
        creep = line * place
        series.append((400_000 + level + settling + swing + pages + wave + creep + rng.choice(noise)) * KIB)
    return series


def test_at_most_one_false_alarm_in_a_hundred_clean_runs():
    alarms = [seed for seed in range(300) if judge_growth(clean_run(seed), 16 * KIB).verdict == "leak"]
    assert len(alarms) <= 3, alarms


@pytest.mark.parametrize("size", [20, 50, 100])
def test_leaks_in_the_same_noise_are_found(size):
    found = 0
    for seed in range(0, 100, 5):  # the kind without swings and jumps, whose noise is that of the loops
        series = [value + size * KIB * place for place, value in enumerate(clean_run(seed))]
        growth = judge_growth(series, 16 * KIB)
        found += growth.verdict == "leak"
        if growth.verdict == "leak" and size == 100:
            assert growth.slope == pytest.approx(size * KIB, rel=0.5)
    assert found >= {20: 16, 50: 19, 100: 19}[size]


def test_recorded_loops_that_keep_nothing_are_no_leaks():
    for name, series in CLEAN.items():
        assert judge_growth([value * KIB for value in series], 16 * KIB).verdict == "settled", name


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("constant", [5e8] * 40),
        ("a step", [5e8] * 25 + [6e8] * 25),
        ("levels off", [5e8 + 1e8 * min(n, 30) for n in range(60)]),
        ("saturates", [5e8 + 3e8 * (1 - 0.9**n) for n in range(60)]),
        ("a saw", [5e8 + 1e7 * (n % 10) for n in range(60)]),
        ("shrinks", [5e8 - 1e6 * n for n in range(60)]),
        ("cache of ten", [5e8 + 1e6 * min(n, 10) for n in range(30)]),
    ],
)
def test_series_that_settle_are_no_leaks(name, series):
    assert judge_growth(series).verdict == "settled", name


def test_a_leak_in_every_tenth_iteration_is_a_leak():
    growth = judge_growth(accumulated([10_000_000 if n % 10 == 9 else 0 for n in range(400)]))
    assert growth.slope == pytest.approx(1e6, rel=0.2)


def test_a_young_heap_is_no_leak():
    alarms = 0
    for series in YOUNG:
        growth = judge_growth([value * KIB for value in series], 16 * KIB)
        alarms += growth.verdict == "leak"
        assert without_witness(growth).verdict != "leak", series
    assert alarms, "else this would prove nothing"


def test_models_that_are_built_and_freed_are_no_leak():
    # Steps of the host's memory in KiB while each of 20 small models is built, trained and freed with clear_session.
    steps = [500, 252, 84, 284, 100, 76, 48, 208, 76, 88, 44, 64, 52, 48, 40, 152, 36, 44, 72]
    series = [value * KIB for value in accumulated(steps, 400_000)]
    growth = judge_growth(series, 16 * KIB)
    assert growth.verdict == "leak", "else this would prove nothing"
    decided = without_witness(growth, early_noise(series))
    assert decided.verdict == "undecided" and "no arrays or graphs grow in step; run " in decided.reason
    steady = [100 * KIB * place for place in range(20)]
    assert without_witness(judge_growth(steady), early_noise(steady)).verdict == "leak"


@pytest.mark.parametrize("size", [20, 50, 100])
def test_leaks_in_a_young_heap_are_found(size):
    """With what else grows at once; by the rise alone as soon as it is above what holes explain."""
    found, told = 0, 0
    for series in YOUNG:
        growth = judge_growth([(value + size * place) * KIB for place, value in enumerate(series)], 16 * KIB)
        alone = without_witness(growth)
        found, told = found + (growth.verdict == "leak"), told + (alone.verdict == "leak")
        if alone != growth:
            assert growth.rise_bytes < 512 * KIB and alone.verdict == "undecided"
            assert f"host memory rose by only {growth.rise_bytes / KIB:.0f} KiB, and no " in alone.reason
            needed = int(alone.reason.partition("step; run ")[2].split()[0])
            assert 20 < needed <= 60
            line = [growth.slope * place for place in range(needed)]
            assert without_witness(judge_growth(line, 16 * KIB)).verdict == "leak"
    assert found >= 0.9 * len(YOUNG) and told >= {20: 0, 50: 0.9, 100: 0.97}[size] * len(YOUNG)


def test_few_values_are_undecided():
    for count in (0, 1, 5, 17):
        growth = judge_growth([1e6 * n for n in range(count)])
        assert growth.verdict == "undecided" and f"{count} iterations are too few; run 19" in growth.reason
    assert judge_growth([1e6 * n for n in range(19)]).verdict == "leak"


def test_the_slope_ignores_outliers():
    values = [3.0 * n for n in range(21)]
    values[7] = 1e9
    slope, low, high = theil_sen(values)
    assert slope == pytest.approx(3) and low <= 3 <= high


def test_growth_in_step_is_evidence_and_the_rest_is_not():
    held = {1: Container("list", 8, 8, 8000), 2: Container("dict", 9, 9, 10**6)}
    before = Census(8, Counter({"live graphs": 5, "variables": 9}), Counter(step=1, f=2), None, held)
    grown = {1: Container("list", 24, 24, 24_000), 2: held[2], 3: Container("list", 16, 16, 160)}
    after = Census(24, Counter({"live graphs": 21, "variables": 12}), Counter(step=1, f=18), None, grown)
    found = compare(before, after, slope=1000.0)
    assert (found.known, found.tracings) == ({"live graphs": 16}, {"f": 16})
    assert found.explain()[0] == "a list holds 24 arrays, 23.4 KiB, 1000 B more per iteration"
    assert found.explain()[1].startswith("f was traced 16 more times in 16 iterations")
    assert Evidence.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_deleted_models_that_are_kept_are_named_with_their_bytes():
    before, after = (Census(count, Counter(), Counter(), 1000 * count) for count in (8, 24))
    found = compare(before, after)
    assert found.kept_bytes == 16000
    assert found.explain()[0].startswith("15.6 KiB of it are weights and optimizers of deleted models")
    assert "kerasmem.clear_session()" in found.explain()[0]


def test_a_watch_of_plain_python():
    watch, kept = kerasmem.LeakWatch("bytes"), []
    for _ in range(22):
        kept.append([np.ones(2**15) for _ in range(18)])  # too large for holes in the heap
        watch.sample()
    report = watch.report()
    assert any("a list holds 396 arrays, 99.0 MiB, 4.50 MiB more per iteration" in line for line in report.explain())
    assert not any("objects" in line for line in report.explain())
    assert report.leaks and report.growth["host"].slope == pytest.approx(18 * 2**18, rel=0.2)
    assert LeakReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert report.explain()[0].startswith("bytes: host memory grows by ")
    calm = kerasmem.LeakWatch()
    calm.sample()
    assert not calm.report().leaks and "too few" in calm.report().explain()[0]
    assert calm.report().too_short == "1 iterations are too few; run 19"
    assert str(calm.report()) == f"loop: undecided: {calm.report().too_short} (1 iterations)"
    assert report.too_short is None and kerasmem.LeakWatch("x").report().too_short == "nothing was sampled"
    assert "nothing was sampled" in kerasmem.LeakWatch("x").report().explain()[0]


def test_wrong_usage():
    with pytest.raises(UsageError, match="label must be a name"):
        kerasmem.LeakWatch("")
    with pytest.raises(InputError, match="leak report: format_version must be 1; got None"):
        LeakReport.from_dict({"label": "x"})


# What leaves many objects comes last: garbage collection takes longer from then on.
LOOPS = ["many_shapes", "filling_cache", "retracing", "kept_results", "epochs", "new_models"]


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """What each loop's watch says; one process runs all."""
    from fresh import python

    # The memory of a fork grows as it writes to pages that it shares.
    done = python(HERE / "leak_scenarios.py", *LOOPS, cwd=tmp_path_factory.mktemp("leaks"), new=True)
    return json.loads(done.stdout.rpartition("RESULT ")[2])


@pytest.mark.parametrize("name", ["many_shapes", "filling_cache"])
def test_real_loops_that_keep_nothing(loops, name):
    report, (said,) = loops[name]
    assert not report["leaks"] and report["evidence"] is None
    if name == "many_shapes" and report["growth"]["host"]["verdict"] == "undecided":  # a young heap may rise so far
        assert said.startswith(f"{name}: undecided: host memory rose by "), said
    else:
        assert said == f"{name}: no memory is kept (20 iterations)", said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("new_models", "more live graphs"),
        ("retracing", "scaled was traced"),
        ("kept_results", "more eager tensors"),
    ],
)
def test_real_loops_that_leak_are_caught_with_their_cause(loops, name, expected):
    report, said = loops[name]
    assert report["leaks"] and any(expected in line for line in said), said
    if name == "kept_results":
        assert 75_000 < report["growth"]["CPU:0"]["slope"] <= 110_000


def test_the_logger_reports_epochs_that_keep_memory(loops):
    leaky, clean = loops["epochs"]["leaky"], loops["epochs"]["clean"]
    assert leaky[0]["leaks"] and leaky[0]["iterations"] == 20, "over two fits"
    assert any("CPU:0 memory grows by " in note for note in leaky[1]), leaky
    assert not clean[0]["leaks"] and clean[1] == []
    assert (
        loops["epochs"]["after ten"]
        == ["leak: epochs: undecided: 10 iterations are too few; run 19 (10 iterations)"] * 2
    ), "it stands no longer once the second fit has told more"
