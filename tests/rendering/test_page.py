"""The report's page and picture, as text and numbers; `test_page_browser` looks at the page in a browser."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from kerasmem.errors import InputError, MissingExtraError, UsageError
from kerasmem.monitoring import Sample, Timeline
from kerasmem.monitoring.log_summary import summarise
from kerasmem.monitoring.rank_logs import TrainingLogs
from kerasmem.rendering.contents import PageContents, read_composition
from kerasmem.rendering.escape import chart_label, embedded_json, html_text, middle
from kerasmem.rendering.page import document, render_page, tables
from kerasmem.rendering.page.charts import over_time, unit_for
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


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setattr(document, "plotly_script", lambda: "/* plotly */")


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
    assert "<" not in chart_label(hostile) and "<" not in embedded_json({"a": hostile})
    assert middle("abcdefghij", 5) == "ab…ij" and middle("abc", 5) == "abc"


def test_a_chart_takes_the_unit_that_suits_it():
    assert [unit_for(size)[0] for size in (0, 1023, 1024, 5 * MIB, 3 * 2**30, 2**41)] == [
        "B", "B", "KiB", "MiB", "GiB", "TiB",
    ]  # fmt: skip


# ---------------------------------------------------------------------- page


def test_the_page_names_nothing_outside_itself(no_library):
    page = render_page(contents(summarise(timeline(50), "run.csv"), reports=[("e.json", report())]))
    assert not re.search(r"""(?<![\w-])(?:src|href|action)\s*=\s*["'](?!data:)""", page)
    assert "@import" not in page and "url(" not in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert re.search(r"script-src ('sha256-[^']+' ?)+;", policy)
    assert page.count("<h2>") == page.count("</h2>") == 4


def test_the_whole_page_is_small_whatever_the_log():
    pytest.importorskip("plotly")
    log = summarise(timeline(60_000, rss_bytes=5, in_use_bytes=6, reserved_bytes=7), "run.csv", points=3000)
    assert max(len(line.values) for line in log.curves[0].lines) <= 3000
    many = [TrainingLogs(f"run{place}", (log,)) for place in range(30)]
    assert len(render_page(PageContents(tuple(many), ()))) < 10e6


def test_what_there_is_too_much_of_is_counted_not_dropped(no_library):
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
    assert [note["text"] for note in chart.layout["annotations"]] == ["epoch 1", "2", "3"]
    assert chart.layout["yaxis"]["title"]["text"] == "device, MiB"
    assert chart.layout["yaxis2"]["title"]["text"] == "host, GiB"


def test_estimate_and_profile_are_laid_side_by_side(no_library):
    profile = report(settings={"batch_size": 16, "method": "profile"})
    page = render_page(contents(reports=[("e.json", report()), ("p.json", profile)]))
    assert "layer by layer" in page and "they differ in batch size" in page
    assert "Estimated − measured" in page


def test_without_plotly_its_install_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    document.plotly_script.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'kerasmem\[report\]'"):
        render_page(contents(reports=[("e.json", report())]))


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
