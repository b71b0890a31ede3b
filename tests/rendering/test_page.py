"""The report's page and picture, as text and numbers; `test_page_browser` looks at the page in a browser."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from xml.etree import ElementTree

import keras
import pytest

import kerasmem
from kerasmem.errors import InputError, MissingExtraError, UsageError
from kerasmem.monitoring import Sample, Timeline
from kerasmem.monitoring.log_summary import summarise
from kerasmem.monitoring.rank_logs import TrainingLogs
from kerasmem.rendering.contents import PageContents, read_composition
from kerasmem.rendering.escape import embedded_json, html_text, middle
from kerasmem.rendering.page import render_page, tables
from kerasmem.rendering.page.charts import Bar, Limit, bars, over_time, thinned, unit_for
from kerasmem.rendering.plot import render_plot

MIB = 2**20


def report(**changes):
    data = {
        "format_version": 1,
        "model": {"name": "net"},
        "settings": {"batch_size": 32, "method": "graph"},
        "bytes": {"total": 10 * MIB, "low": None, "high": None, "weights": 4 * MIB, "activations": 5 * MIB},
        "layers": [{"name": "dense", "class": "Dense", "bytes_at_peak": 6 * MIB}, {"name": "flat", "class": "Flatten"}],
    }
    return {**data, **changes}


def timeline(count, **sizes):
    fields = dict.fromkeys(Sample._fields)
    return Timeline(
        Sample(**{**fields, "run": 0, "time": i / 100, "phase": "train", "epoch": i // 1000, "batch": i % 1000,
                  "peak_bytes": (500 + i % 9) * MIB, **sizes})
        for i in range(count)
    )  # fmt: skip


def contents(*logs, reports=()):
    compositions = tuple(read_composition(data, name) for name, data in reports)
    return PageContents(tuple(TrainingLogs(log.name, (log,)) for log in logs), compositions)


# ------------------------------------------------------------------- reading


def test_an_estimate_is_read():
    found = read_composition(report(device={"name": "t4", "verdict": "fits"}), "e.json")
    assert (found.total, found.categories) == (10 * MIB, (("weights", 4 * MIB), ("activations", 5 * MIB)))
    assert found.is_at_peak and not found.is_measured and found.unnamed == 4 * MIB
    assert [layer.bytes for layer in found.layers] == [6 * MIB, None]
    assert read_composition(report(settings={"method": "profile"}), "p.json").is_measured


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format_version": 2}, "format_version is 2"),
        ({"bytes": {"total": "9"}}, "bytes.total is '9'"),
        ({"bytes": {"total": None}}, "bytes.total is not known"),
        ({"bytes": {"total": 10**5000}}, "bytes.total is a number beyond all memory"),
        ({"bytes": {"total": 1, "weights": -1}}, "bytes.weights is -1"),
        ({"bytes": {"total": 1, "weights": True}}, "bytes.weights is True"),
        ({"bytes": [1]}, r"bytes is \[1\]"),
        ({"settings": None}, "settings is missing"),
        ({"layers": {"a": 1}}, "layers is not a list"),
        ({"layers": [5]}, r"layers\[0\] is not an object"),
        ({"layers": [{"name": "a", "bytes_at_peak": 1.5}]}, r"layers\[0\].bytes_at_peak is 1.5"),
    ],
)
def test_what_is_no_estimate_is_refused_by_field(changes, field):
    with pytest.raises(InputError, match=f"e.json: .*{field}.*kerasmem estimate") as caught:
        read_composition(report(**changes), "e.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


# -------------------------------------------------------------------- markup


def test_text_from_files_is_escaped_everywhere():
    hostile = "</script><b>\u202e\x1b[31m\"'&"
    assert html_text(hostile) == "<bdi>&lt;/script&gt;&lt;b&gt;\\u202e\\x1b[31m&quot;&#x27;&amp;</bdi>"
    assert "<" not in embedded_json({"a": hostile})
    row = bars("c", "caption", [hostile], [(hostile, "c0", [Bar(5)])]).data["rows"][0]
    assert row == "</script><b>\\u202e\\x1b[31m\"'&"  # the page's script sets it as text
    assert middle("abcdefghij", 5) == "ab…ij" and middle("abc", 5) == "abc"


def test_a_chart_takes_the_unit_that_suits_it():
    assert [unit_for(size)[0] for size in (0, 1023, 1024, 5 * MIB, 3 * 2**30, 2**41)] == [
        "B", "B", "KiB", "MiB", "GiB", "TiB",
    ]  # fmt: skip


# ---------------------------------------------------------------------- page


def test_the_page_names_nothing_outside_itself():
    page = render_page(contents(summarise(timeline(50), "run.csv"), reports=[("e.json", report())]))
    assert not re.search(r"""(?<![\w-])(?:src|href|action)\s*=\s*["'](?!data:)""", page)
    assert "@import" not in page and "url(" not in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert re.search(r"script-src 'sha256-[^']+'; style-src 'sha256-[^']+';", policy) and "unsafe" not in policy
    assert page.count("<h2>") == page.count("</h2>") == 4


def test_the_whole_page_is_small_whatever_the_log():
    log = summarise(timeline(60_000, rss_bytes=5, in_use_bytes=6, reserved_bytes=7), "run.csv", points=3000)
    assert max(len(line.values) for line in log.curves[0].lines) <= 3000
    many = [TrainingLogs(f"run{place}", (log,)) for place in range(30)]
    assert len(render_page(PageContents(tuple(many), ()))) < 1.5e6


def test_what_there_is_too_much_of_is_counted_not_dropped():
    layers = [{"name": f"layer{i}", "class": "Dense", "bytes_at_peak": i} for i in range(1000)]
    rows = [
        Sample(run, 0.1, "predict", None, 0, 1, None, None, run, None, None, None, None, None, None)
        for run in range(999)
    ]
    page = render_page(contents(summarise(Timeline(rows), "loop.csv"), reports=[("e.json", report(layers=layers))]))
    assert "and 799 more" in page and "runs with smaller peaks" in page
    assert "and 800 more <bdi>layers" in page


def test_epochs_are_marked_and_host_memory_has_its_own_panel():
    (stretch,) = summarise(timeline(3000, rss_bytes=9 * 2**30), "run.csv").curves
    chart = over_time("c", "caption", stretch)
    assert [number for _, number in chart.data["epochs"]] == [1, 2, 3]
    assert [panel["title"] for panel in chart.data["panels"]] == ["device, MiB", "host, GiB"]


def alternating(epochs=3, batches=10, validation=2):
    """A log in which validation needs less than training."""
    fields = dict.fromkeys(Sample._fields)
    return Timeline(
        Sample(**{**fields, "run": 0, "time": float(epoch * 100 + i), "epoch": epoch, "batch": i, "device": "CPU:0",
                  "phase": "train" if i < batches else "validation", "peak_bytes": (500 if i < batches else 90) * MIB})
        for epoch in range(epochs) for i in range(batches + validation)
    )  # fmt: skip


def test_no_line_leads_from_training_to_validation():
    (stretch,) = summarise(alternating(), "run.csv").curves
    (line,) = stretch.lines
    assert line.starts == (10, 12, 22, 24, 34)
    assert over_time("c", "caption", stretch).data["panels"][0]["lines"][0]["starts"] == [10, 12, 22, 24, 34]
    many = summarise(alternating(40, 200, 50), "run.csv", points=1000).curves[0].lines[0]
    for each in (many, thinned(many, 120)):
        edges = [0, *each.starts, len(each.values)]
        parts = [set(each.values[start:end]) for start, end in pairwise(edges)]
        assert all(len(part) == 1 for part in parts) and len(each.values) <= 1000


def test_the_devices_limit_stands_in_the_charts():
    (stretch,) = summarise(timeline(50, rss_bytes=5), "run.csv").curves
    device, host = over_time("c", "caption", stretch, Limit(2**30, "card")).data["panels"]
    assert device["limit"] == {"value": 1024.0, "label": "card: 1.00 GiB"} and host["limit"] is None
    data = report(device={"name": "t4", "verdict": "fits", "available_bytes": 2**30})
    page = render_page(contents(summarise(timeline(50), "run.csv"), reports=[("e.json", data)]))
    assert page.count('"label":"t4, for TensorFlow: 1.00 GiB"') == 3  # over time, by category, beside


def test_the_verdict_comes_first():
    device = {"name": "t4", "verdict": "does not fit", "available_bytes": 9 * MIB}
    log = summarise(timeline(50, driver_used_bytes=990 * MIB, driver_total_bytes=1000 * MIB), "run.csv")
    page = render_page(contents(log, reports=[("e.json", report(device=device))]))
    head = re.sub("<[^>]+>", "", page[page.index("<header>") : page.index("</header>")])
    assert "✘ does not fit t4: net needs 10.0 MiB, of 9.00 MiB" in head
    assert "run.csv: at most 990 MiB, 99 % of 0.98 GiB (card)" in head
    assert "No device was named" in render_page(contents(summarise(timeline(5), "run.csv")))


def test_a_bar_of_nothing_is_left_out_and_a_missed_interval_marked():
    data = bars("c", "caption", ["a", "b"], [("x", "c0", [Bar(5, 4, 6, missed=True), Bar(None)])]).data
    assert data["series"][0]["bars"] == [{"value": 5.0, "low": 4.0, "high": 6.0, "text": "5 B", "missed": True}, None]
    estimate = report(bytes={"total": 10 * MIB, "low": 9 * MIB, "high": 11 * MIB})
    profile = report(settings={"method": "profile"}, bytes={"total": 20 * MIB})
    page = render_page(contents(reports=[("e.json", estimate), ("p.json", profile)]))
    assert '"missed":true' in page and '<b class="does-not-fit">missed</b>' in page


def test_a_notebook_shows_the_page_in_a_frame(tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    estimate = kerasmem.estimate(model, method="formula")
    page = kerasmem.report_page(alternating(), estimate, title="<mine>")
    assert page.html.count("<h2>") == 4 and "&lt;mine&gt;" in page.html
    frame = page._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts"') and frame.count('"') == 8 and len(frame) < 200_000
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    with pytest.raises(UsageError, match="str is no Timeline"):
        kerasmem.report_page("run.csv")
    with pytest.raises(UsageError, match="nothing was given"):
        kerasmem.report_page()


def test_estimate_and_profile_are_laid_side_by_side():
    profile = report(settings={"batch_size": 16, "method": "profile"})
    page = render_page(contents(reports=[("e.json", report()), ("p.json", profile)]))
    assert "layer by layer" in page and "they differ in batch size" in page
    assert "Estimated − measured" in page


# ------------------------------------------------------------------- picture


def test_pictures_are_drawn_with_names_as_they_are():
    pytest.importorskip("matplotlib")
    layers = [{"name": name, "class": "D", "bytes_at_peak": 5} for name in ("_x", "$a^{$", "<b>&", "שלום", "\x00")]
    data = report(layers=layers, bytes={"total": 9, "$x_{$": 4, "_hidden": 5})
    everything = contents(summarise(timeline(50, rss_bytes=5), "$\\frac{$.csv"), reports=[("$_{$", data)])
    assert render_plot(everything, "png").startswith(b"\x89PNG")
    picture = render_plot(everything, "svg")
    ElementTree.fromstring(picture)
    assert picture == render_plot(everything, "svg")
    with pytest.raises(UsageError, match="nothing to draw"):
        render_plot(contents(), "png")
    with pytest.raises(UsageError, match="neither png nor svg"):
        render_plot(everything, "gif")


def test_a_picture_names_each_line_and_shade_once():
    pytest.importorskip("matplotlib")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        both = [summarise(alternating(), name) for name in ("a.csv", "b.csv")]
        text = render_plot(contents(*both), "svg").decode()
    assert text.count(">peak of the batch<") == text.count(">validation<") == 1
    drawn = re.findall(r'd="([^"]+)"[^>]*stroke: #c8501e', text)
    assert any(path.count("M") == 6 for path in drawn)  # a stroke for each phase of each epoch


def test_without_matplotlib_its_install_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kerasmem\[plot\]'"):
        render_plot(contents(summarise(timeline(5), "run.csv")), "png")


def test_an_estimate_without_a_known_lower_end_claims_the_upper_one():
    data = report(settings={"method": "xla"}, bytes={"total": 30 * MIB, "low": 3 * MIB, "high": 31 * MIB})
    found = read_composition(data, "e.json")
    assert (found.low, found.lower_end) == (3 * MIB, None)
    beside = read_composition(report(settings={"method": "measure"}, bytes={"total": 20 * MIB}), "m.json")
    assert "at most 31.0 MiB: holds" in tables.beside_measured(PageContents((), (found, beside)))
