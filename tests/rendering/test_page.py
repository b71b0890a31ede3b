"""The report's page, as text and as a tree of elements."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import kerasmem
from kerasmem.errors import InputError, UsageError
from kerasmem.estimation.report import Bytes, DeviceVerdict, Formula, LayerMemory, MemoryReport, ModelFacts, Settings
from kerasmem.monitoring import Sample, Timeline
from kerasmem.monitoring.log_summary import summarise
from kerasmem.monitoring.timeline import PhasePeaks
from kerasmem.rendering.charts import Limit, over_time
from kerasmem.rendering.formatting import html_text, middle, svg_text
from kerasmem.rendering.page import render_page
from kerasmem.rendering.report_contents import PageContents, SavedReport, read_report

MIB = 2**20
HOSTILE = '</script><img src=x onerror="a()"><b>\u202e\x1b[31m\'&'
ALONE = {"meta", "link", "br", "img"}


def report(method="graph", batch_size=32, layers=(("dense", 6 * MIB), ("flat", None)), device=None, **sizes):
    settings = Settings(batch_size, "adam", "mse", "float32", "train", method, "graph", None)
    need = {"total": 10 * MIB, "low": None, "high": None, "weights": 4 * MIB, "activations": 5 * MIB, **sizes}
    rows = [
        LayerMemory(name=name, class_name="Dense", output_shape=None, bytes=size, bytes_at_peak=size)
        for name, size in layers
    ]
    model = ModelFacts("net", "net.h5", len(rows), 10, 10)
    return MemoryReport(model, settings, Bytes(**need), Formula(1, 1, 1, 1), tuple(rows), device=device)


def on(verdict, available=9 * MIB):
    return DeviceVerdict("t4", 2 * available, available, verdict)


def timeline(count, notes=(), phases=(), **sizes):
    fields = dict.fromkeys(Sample._fields)
    rows = (
        Sample(**{**fields, "run": 0, "time": i / 100, "phase": "train", "epoch": i // 1000, "batch": i % 1000,
                  "peak_bytes": (500 + i % 9) * MIB, **sizes})
        for i in range(count)
    )  # fmt: skip
    return Timeline(rows, notes, phases)


def alternating(epochs=3, batches=10, validation=2):
    """A log in which validation needs less than training."""
    fields = dict.fromkeys(Sample._fields)
    return Timeline(
        Sample(**{**fields, "run": 0, "time": float(epoch * 100 + i), "epoch": epoch, "batch": i, "device": "CPU:0",
                  "phase": "train" if i < batches else "validation", "peak_bytes": (500 if i < batches else 90) * MIB})
        for epoch in range(epochs) for i in range(batches + validation)
    )  # fmt: skip


def page_of(*logs, reports=()):
    saved = tuple(SavedReport(name, each) for name, each in reports)
    return render_page(PageContents(logs, saved))


class Elements(HTMLParser):
    """The elements of a page, each closed where it must be."""

    def __init__(self, page):
        super().__init__()
        self.names, self.attributes, self.texts, self._open = [], [], [], []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs
        if tag not in ALONE:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def text_of(html):
    return re.sub("<[^>]+>", "", html)


# ------------------------------------------------------------------- reading


def test_a_saved_report_is_read_back():
    found = read_report(report(device=on("fits")).to_dict(), "e.json")
    assert found.report == report(device=on("fits")) and not found.is_measured
    assert read_report(report("measure").to_dict(), "m.json").is_measured


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format_version": 2}, "format_version must be 1; got 2"),
        ({"bytes": {"total": "9", "low": None, "high": None}}, "total"),
        ({"bytes": {"total": None, "low": None, "high": None}}, "total"),
        ({"bytes": {"total": 10**5000, "low": None, "high": None}}, r"bytes\.total"),
        ({"bytes": {"total": 1, "low": -1, "high": None}}, r"bytes\.low"),
        ({"bytes": [1]}, "bytes"),
        ({"settings": None}, "settings"),
        ({"layers": {"a": 1}}, "layers"),
        ({"layers": [5]}, r"layers\[0\]"),
    ],
)
def test_what_is_no_report_is_refused_by_field(changes, field):
    with pytest.raises(InputError, match=f"e.json: .*{field}.*kerasmem estimate") as caught:
        read_report({**report().to_dict(), **changes}, "e.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


# -------------------------------------------------------------------- markup


def test_text_from_files_is_escaped():
    assert html_text("<b>\u202e\x1b[31m\"'&") == "<bdi>&lt;b&gt;\\u202e\\x1b[31m&quot;&#x27;&amp;</bdi>"
    assert svg_text("<b>&", 40) == "&lt;b&gt;&amp;"
    assert middle("abcdefghij", 5) == "ab…ij" and middle("abc", 5) == "abc"


def test_hostile_names_add_no_element_anywhere():
    def page(name):
        log = summarise(
            timeline(50, [name], [PhasePeaks(0, 0, name, 3, MIB)], device=name, phase=name, rss_bytes=7), name
        )
        estimate = report(layers=((name, MIB), ("b", 2 * MIB)), low=1, high=2, device=DeviceVerdict(name, 9, 8, "fits"))
        return page_of(log, reports=[(name, estimate), (f"{name}2", report("measure", layers=((name, MIB),)))])

    plain, hostile = Elements(page("plain")), Elements(page(HOSTILE))
    assert hostile.names == plain.names and not {"script", "img", "iframe"} & set(hostile.names)
    names = {name for name, _ in hostile.attributes}
    assert not any(name.startswith("on") for name in names) and names == {name for name, _ in plain.attributes}
    assert any("<img" in text for text in hostile.texts)
    assert not any(mark in text for text in hostile.texts for mark in ("\u202e", "\x1b"))


def test_the_page_names_nothing_outside_itself():
    page = page_of(summarise(timeline(50), "run.csv"), reports=[("e.json", report())])
    assert not re.search(r"""(?<![\w-])(?:src|href|action)\s*=\s*["'](?!data:)""", page)
    assert "@import" not in page and "url(" not in page and "<script" not in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    assert re.match(r"default-src 'none'; style-src 'sha256-[^']+';", policy) and "unsafe" not in policy
    assert ' style="' not in page, "which the policy would ignore"
    assert page.count("<h2>") == page.count("</h2>") == 4


# --------------------------------------------------------------------- sizes


def test_what_there_is_too_much_of_is_counted():
    rows = [
        Sample(run, 0.1, "predict", None, 0, 1, None, None, run, None, None, None, None, None, None)
        for run in range(999)
    ]
    estimate = report(layers=[(f"layer{i}", i + 1) for i in range(1000)])
    page = page_of(summarise(Timeline(rows), "loop.csv"), reports=[("e.json", estimate)])
    assert "and 799 more <bdi>runs;" in page and "and 800 more <bdi>layers" in page
    assert page.count("<bdi>layer") == 200 + 1 and "<bdi>total</bdi>" in page


# -------------------------------------------------------------------- charts


def panels(figure):
    return ElementTree.fromstring(figure).findall("div/svg")


def test_the_devices_limit_stands_in_the_chart():
    (stretch,) = summarise(timeline(50, rss_bytes=5), "run.csv").curves
    device, host = panels(over_time(stretch, "caption", Limit(600 * MIB, "card")))
    assert device.find("line[@class='limit']").get("y1") == "12.5" and host.find("line[@class='limit']") is None
    beyond, _ = panels(over_time(stretch, "caption", Limit(2**40, "card")))
    assert beyond.find("line[@class='limit']") is None


# ------------------------------------------------------------------ sections


def test_the_verdict_comes_first():
    log = summarise(timeline(50, driver_used_bytes=990 * MIB, driver_total_bytes=1000 * MIB), "run.csv")
    page = page_of(log, reports=[("e.json", report(device=on("does not fit")))])
    head = text_of(page[page.index("<header>") : page.index("</header>")])
    assert "✘ does not fit t4: net needs 10.0 MiB, of 9.00 MiB" in head
    assert "run.csv: at most 990 MiB, 99 % of 0.98 GiB (card)" in head
    without = text_of(page_of(summarise(timeline(5), "run.csv")))
    assert "run.csv: at most 504 MiB" in without and "No verdict without a device" in without


def test_the_limit_of_a_named_device_stands_in_charts_of_its_size():
    reports = [("e.json", report(device=on("fits", 2**30)))]
    assert page_of(summarise(timeline(50), "run.csv"), reports=reports).count(">t4, for TensorFlow: 1.00 GiB") == 2


def test_estimate_and_measurement_are_laid_side_by_side():
    estimate = report(low=9 * MIB, high=11 * MIB)
    page = page_of(reports=[("e.json", estimate), ("m.json", report("measure", 16, total=20 * MIB))])
    assert "9.00 MiB to 11.0 MiB: ✘ outside" in page and "−10.0 MiB (−50.0 %)" in page


def test_an_estimate_without_a_known_lower_end_claims_the_upper_one():
    estimate = report("xla", total=30 * MIB, low=3 * MIB, high=31 * MIB)
    estimate = replace(estimate, settings=replace(estimate.settings, stands_in=True))
    assert SavedReport("e.json", estimate).low is None
    page = page_of(reports=[("e.json", estimate), ("m.json", report("measure", total=20 * MIB))])
    assert "at most 31.0 MiB: ✔ inside" in page


def test_a_notebook_shows_the_page_in_a_frame(tmp_path):
    page = kerasmem.report_page(alternating(), report("formula"), title="<mine>")
    assert page.html.count("<h2>") == 4 and "&lt;mine&gt;" in page.html
    frame = page._repr_html_()
    assert frame.startswith('<iframe sandbox=""') and frame.count('"') == 8 and len(frame) < 200_000
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    with pytest.raises(UsageError, match="got str"):
        kerasmem.report_page("run.csv")
    with pytest.raises(UsageError, match="got none"):
        kerasmem.report_page()
