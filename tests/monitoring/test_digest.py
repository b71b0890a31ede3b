"""Logs in brief: peaks, growth, curves."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kerasmem.monitoring import Sample, Timeline, logfile, read_timeline
from kerasmem.monitoring.curves import thin
from kerasmem.monitoring.log_summary import growth, summarise, summarise_file
from kerasmem.monitoring.timeline import COLUMNS, PhasePeaks


def sample(
    seconds, peak, *, run=0, phase="train", epoch=0, batch=0, device="GPU:0", between=None, rss=None, in_use=None
):
    return Sample(run, seconds, phase, epoch, batch, 1, device, in_use, peak, between, None, None, None, rss, None)


def test_a_run_in_brief():
    rows = [
        sample(0.1, 500, batch=0, rss=10, in_use=100),
        sample(0.1, 900, batch=0, device="GPU:1", rss=10, in_use=300),
        sample(0.2, 600, batch=1, rss=30, in_use=100),
        sample(0.2, 800, batch=1, device="GPU:1", rss=30, in_use=100),
        sample(0.3, 950, batch=0, phase="validation", rss=20),
        sample(0.4, 950, phase="epoch", batch=None, between=940),
        sample(0.9, 300, run=1, phase="evaluate", epoch=None),
    ]
    phases = [PhasePeaks(0, 0, "epoch end", 2, 70, 90, 0, None), PhasePeaks(0, 1, "epoch end", 1, 60, 95, 0, None)]
    log = summarise(Timeline(rows, ["a note"], phases), "run.csv")
    fit, evaluate = log.runs
    assert (fit.kind, fit.batches) == ("fit", 2)
    assert (fit.peak_bytes, fit.peak_phase, fit.peak_batch) == (950, "validation", 0)
    assert fit.rss_bytes == 70, "background readings count"
    assert fit.mean_in_use_bytes == 100 and fit.in_use_growth_bytes is None
    assert (evaluate.kind, evaluate.batches, evaluate.rss_bytes) == ("evaluate", 1, None)
    assert [(peaks.phase, peaks.tree_bytes, peaks.readings) for peaks in log.phases] == [("epoch end", 95, 3)]
    assert log.notes == ("a note",) and log.rows == 7
    (stretch,) = log.curves
    assert {(line.size, line.device) for line in stretch.lines} == {
        ("peak_bytes", "GPU:0"), ("peak_bytes", "GPU:1"), ("in_use_bytes", "GPU:0"), ("in_use_bytes", "GPU:1"),
        ("rss_bytes", None),
    }  # fmt: skip


def test_a_peak_between_batches_is_told_as_such():
    (run,) = summarise(Timeline([sample(0.1, 5), sample(0.2, None, phase="epoch", batch=None, between=9)]), "x").runs
    assert (run.peak_bytes, run.peak_batch, run.peak_phase) == (9, None, "epoch")
    (run,) = summarise(Timeline([sample(0.1, 5), sample(0.2, 6, batch=1, between=9)]), "x").runs
    assert (run.peak_bytes, run.peak_batch, run.peak_phase) == (9, None, "train")
    (run,) = summarise(Timeline([sample(0.1, None)]), "x").runs
    assert (run.peak_bytes, run.peak_batch) == (None, None)


def test_thinning_keeps_what_stands_out():
    values = np.sin(np.arange(100_000) / 500)
    values[77_777], values[12_345] = 9, -9
    seconds = np.arange(100_000.0)
    kept = thin(seconds, values, 500)
    assert len(kept) <= 500 and {0, 12_345, 77_777, 99_999} <= set(kept.tolist())
    assert list(thin(seconds[:10], values[:10], 500)) == list(range(10))


def test_growth_passes_over_warm_up_and_single_peaks():
    steady = np.full(100, 50.0)
    steady[:15], steady[95] = np.arange(15), 1e9
    assert growth(steady) == 0
    assert growth(np.arange(100.0)) == 60
    assert growth(np.arange(9.0)) is None


def test_a_summary_holds_less_than_the_log(tmp_path, monkeypatch):
    path = tmp_path / "log.csv"
    row = "0,{0},train,0,{0},1,CPU:0,{1},{2},100000000,,,,{3},0\n"
    sizes = ((10**8 + n % 7, 10**8 + n % 11, 10**9 + n % 13) for n in range(12_000))
    path.write_text(",".join(COLUMNS) + "\n" + "".join(row.format(n, *three) for n, three in enumerate(sizes)))
    monkeypatch.setattr(logfile, "TABLE_ROWS", 200)
    tracemalloc.start()
    log = summarise_file(path, points=100)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 0.8 * path.stat().st_size
    assert log.to_dict() == summarise(read_timeline(path), str(path)).to_dict()
    assert log.rows == log.runs[0].batches == 12_000
    assert {max(line.values) for line in log.curves[0].lines} == {10**8 + 6, 10**8 + 10, 10**9 + 12}
