"""The report's page in headless Chromium: it renders, tells values, fits its window, and reaches no network."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import pytest

from kerasmem.monitoring import Sample, Timeline
from kerasmem.monitoring.log_summary import summarise
from kerasmem.monitoring.phases import PhasePeaks
from kerasmem.monitoring.rank_logs import TrainingLogs
from kerasmem.rendering.contents import PageContents, read_composition
from kerasmem.rendering.page import render_page

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'kerasmem[test]'")

CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no Chromium or no chromedriver; on Debian: apt-get install chromium chromium-driver (.ci/run does)",
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
MIB = 2**20
HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "</script><img src=http://127.0.0.1:9/x onerror=\"document.title = 'owned'\">",
    "\"quoted\" 'twice' & <b>bold</b> &lt; %{y} $x^2$",
    "שלום/עולם",
    "abc\u202etxt.exe",
    "plain_layer_with_a_name_that_is_much_longer_than_any_label_can_be/of/a/nested/model",
]


def log(name="run.jsonl", rank=None, device="GPU:0"):
    rows = [
        Sample(0, i / 10, "validation" if i % 100 > 89 else "train", i // 100, i % 100, 1, device, (200 + i % 7) * MIB,
               (700 + i % 50) * MIB, None, 900 * MIB, 1100 * MIB, 16384 * MIB, (500 + i // 10) * MIB, 0)
        for i in range(300)
    ]  # fmt: skip
    phases = [PhasePeaks(0, 0, HOSTILE[0], 3, 600 * MIB, 700 * MIB, 0, None)]
    return summarise(Timeline(rows, [f"note: {HOSTILE[1]}"], phases), name, rank)


def report(source, method, share):
    layers = [
        {"name": name, "class": HOSTILE[0], "bytes_at_peak": int((100 - 9 * place) * MIB * share)}
        for place, name in enumerate(HOSTILE)
    ]
    data = {
        "format_version": 1,
        "model": {"name": HOSTILE[1]},
        "settings": {"batch_size": 32, "method": method, "optimizer": HOSTILE[2]},
        "bytes": {"total": int(700 * MIB * share), "low": int(650 * MIB * share), "high": int(800 * MIB * share),
                  "weights": 100 * MIB, "activations": 300 * MIB, HOSTILE[0]: 5 * MIB},
        "layers": layers,
        "device": {"name": HOSTILE[1], "verdict": HOSTILE[0]},
        "notes": [HOSTILE[1]],
        "unmodelled": [{"what": HOSTILE[0], "why": HOSTILE[2]}],
    }  # fmt: skip
    return read_composition(data, source)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    contents = PageContents(
        (
            TrainingLogs("run.rank*.jsonl", (log("run.rank0.jsonl", 0), log("run.rank1.jsonl", 1))),
            TrainingLogs(HOSTILE[1], (log(HOSTILE[1], device=HOSTILE[0]),)),
        ),
        (
            report("estimate.json", "graph", 1.0),
            report("profile.json", "profile", 0.97),
            report(HOSTILE[0], "xla", 0.9),
        ),
        title=HOSTILE[0],
    )
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_page(contents), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A browser for all tests of this file: starting one takes seconds."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    kept = {name: os.environ.get(name) for name in ("NO_PROXY", "no_proxy")}
    os.environ.update(dict.fromkeys(kept, "localhost,127.0.0.1"))  # selenium speaks to chromedriver over the loopback
    try:
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        yield driver
        driver.quit()
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class Window:
    """The page in a window of some width and theme."""

    def __init__(self, driver, page, width=1200, theme="light"):
        self.driver = driver
        feature = {"name": "prefers-color-scheme", "value": theme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.resize(width)
        driver.get("about:blank")
        self.messages(), self.requests()
        driver.get(page.as_uri())
        self.wait("return document.documentElement.dataset.drawn === 'yes'")

    def resize(self, width):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, script):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 10, poll_frequency=0.05).until(lambda driver: driver.execute_script(script))

    def messages(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self):
        """Addresses that the page asked for: what the browser's own pages do is no concern of ours."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                parameters = message["params"]
                if not parameters.get("documentURL", "").startswith("chrome://"):
                    found.append(parameters.get("request", parameters)["url"])
        return found

    def hover(self, chart, x, y):
        """Put the mouse at shares of a chart's plotting area; return what the chart then tells."""
        box = self.js(
            "const e = document.getElementById(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const r = e.querySelector('.plot').getBoundingClientRect(); return [r.x, r.y, r.width, r.height]",
            chart,
        )
        self.mouse("mouseMoved", box[0] + box[2] * x, box[1] + box[3] * y)
        return self.wait(
            f"const e = document.getElementById('{chart}').parentNode.querySelector('.tip');"
            " return e.hidden ? null : e.textContent"
        )

    def mouse(self, kind, x, y, **more):
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})

    def charts(self):
        return self.js("return [...document.querySelectorAll('.chart')].map(e => e.id)")


def test_the_page_draws_every_chart_and_reaches_no_network(chromium, page):
    window = Window(chromium, page)
    charts = window.charts()
    assert len(charts) >= 7
    for chart in charts:
        assert window.js(f"return document.querySelectorAll('#{chart} .mark').length") > 0, chart
    assert window.messages() == []
    assert {url.partition(":")[0] for url in window.requests()} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in window.requests()) <= 1


def test_the_tests_of_network_and_console_can_fail(chromium, tmp_path):
    other = tmp_path / "other.html"
    other.write_text(
        "<html data-drawn=yes><img src='http://127.0.0.1:9/picture.png'><script>nonsense()</script></html>"
    )
    window = Window(chromium, other)
    assert "http://127.0.0.1:9/picture.png" in window.requests()
    assert any("nonsense" in message for message in window.messages())


def test_hovering_tells_values_with_their_unit(chromium, page):
    window = Window(chromium, page)
    over_time = window.hover(first_chart(window, "path.line"), 0.5, 0.5)
    assert "peak of the batch" in over_time and "host process" in over_time
    assert over_time.count("MiB") + over_time.count("GiB") >= 3 and " s" in over_time
    bar = window.hover(first_chart(window, ".bar"), 0.1, 0.1)
    assert "MiB" in bar and "run.rank0.jsonl" in bar


def first_chart(window, selector):
    return window.js("return document.querySelector(arguments[0]).closest('.chart').id", f".chart {selector}")


def test_a_stretch_of_time_is_zoomed_into_and_a_line_hidden(chromium, page):
    window = Window(chromium, page)
    chart = first_chart(window, "path.line")
    window.hover(chart, 0.5, 0.5)
    last = f"return [...document.querySelectorAll('#{chart} .tick[text-anchor=middle]')].at(-2).textContent"
    assert window.js(last) == "25"
    box = window.js(
        f"const r = document.querySelector('#{chart} .plot').getBoundingClientRect(); return [r.x, r.y, r.width]"
    )
    window.mouse("mousePressed", box[0] + 0.2 * box[2], box[1] + 20, button="left", clickCount=1)
    window.mouse("mouseMoved", box[0] + 0.4 * box[2], box[1] + 20, button="left")
    window.mouse("mouseReleased", box[0] + 0.4 * box[2], box[1] + 20, button="left", clickCount=1)
    assert window.js(last) == "11.5"
    window.js(f"document.querySelector('#{chart} svg').dispatchEvent(new MouseEvent('dblclick'))")
    assert window.js(last) == "25"
    lines = f"return document.querySelectorAll('#{chart} path.line').length"
    before = window.js(lines)
    window.js(f"document.getElementById('{chart}').parentNode.querySelector('.legend button').click()")
    assert window.js(lines) == before - 1


def test_the_limit_and_what_missed_are_drawn(chromium, page):
    window = Window(chromium, page)
    assert window.js("return document.querySelectorAll('.limit').length") >= 4
    assert "card: 16.0 GiB, beyond this chart" in window.js("return document.querySelector('.limit-label').textContent")
    missed = window.js("return getComputedStyle(document.querySelector('.interval.missed')).stroke")
    assert missed == "rgb(194, 54, 43)"
    assert window.js("return document.querySelector('path.line').getAttribute('d').match(/M/g).length") == 6
    assert window.js("return [...document.querySelectorAll('.bar')].every(e => e.getBoundingClientRect().width >= 1)")
    head = window.js("return document.querySelector('header').textContent")
    assert "run.rank0.jsonl: at most 1.07 GiB, 7 % of 16.0 GiB (card)" in head


@pytest.mark.parametrize("width", [390, 820, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_its_window(chromium, page, width, theme):
    window = Window(chromium, page, width, theme)
    assert window.js("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    widths = window.js("return [...document.querySelectorAll('.drawing')].map(e => e.clientWidth)")
    assert max(widths) <= width and min(widths) > 0.6 * min(width, 1240)
    plots = window.js("return [...document.querySelectorAll('.plot')].map(e => e.getBoundingClientRect().height)")
    assert min(plots) > 20, "a chart has no room"
    window.js("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    wide = window.js(
        "return [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    )
    assert width > 390 or wide == 0, "a table is wider than a phone"
    covered = window.js(
        "return [...document.querySelectorAll('figure')].filter(e => {"
        " const legend = e.querySelector('.legend'), plot = e.querySelector('.plot');"
        " if (!legend) return false;"
        " const a = legend.getBoundingClientRect(), b = plot.getBoundingClientRect();"
        " return a.bottom > b.top + 3 && a.top < b.bottom - 3; }).length"
    )
    assert covered == 0, "a legend lies on its chart"
    assert window.messages() == []


def test_a_window_that_changes_is_followed(chromium, page):
    window = Window(chromium, page, 1600)
    window.resize(400)
    window.wait("return Math.max(...[...document.querySelectorAll('.drawing')].map(e => e.clientWidth)) < 400")
    assert window.js("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    window.wait("return getComputedStyle(document.querySelector('#chart0 .bar')).fill === 'rgb(255, 154, 102)'")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_ground(chromium, page, theme):
    window = Window(chromium, page, 1200, theme)
    ground = luminance(window.js("return getComputedStyle(document.querySelector('section')).backgroundColor"))
    assert (ground < 0.1) == (theme == "dark")
    for selector, style in (("section p", "color"), ("h2", "color"), ("summary", "color"), ("svg .tick", "fill")):
        found = window.js(f"return getComputedStyle(document.querySelector('{selector}'))['{style}']")
        low, high = sorted((ground, luminance(found)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (selector, found)


def luminance(colour):
    """Return the relative luminance of "rgb(…)", as the Web Content Accessibility Guidelines define it."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_hostile_names_are_text(chromium, page):
    window = Window(chromium, page)
    assert chromium.title.startswith("<script>")
    assert window.js("return document.querySelectorAll('img, iframe, section script, section b b').length") == 0
    shown = window.js("return document.querySelector('main').textContent")
    for name in (HOSTILE[0], HOSTILE[2], HOSTILE[3]):
        assert name in shown
    assert "\u202e" not in shown and r"abc\u202etxt.exe" in shown
    labels = window.js("return [...document.querySelectorAll('.drawing .label')].map(e => e.textContent)")
    assert any("<script>docum" in label for label in labels), labels
    assert any("&lt; %{y} $x^2$" in label for label in labels), labels
    assert not any(tag in label for label in labels for tag in ("\u202e", "undefined"))
    layers = window.js(
        "return [...document.querySelectorAll('.chart')].filter(e =>"
        " e.querySelectorAll('.label').length === 6).map(e => e.id)"
    )
    told = window.hover(layers[-1], 0.05, 0.05)
    assert "<script>document.title = 'owned'</script>" in told and "MiB" in told
    assert window.messages() == []


def test_a_script_that_got_in_would_not_run(chromium, page, tmp_path):
    text = page.read_text(encoding="utf-8").replace("<main>", "<main><script>document.title = 'owned'</script>", 1)
    (tmp_path / "changed.html").write_text(text, encoding="utf-8")
    window = Window(chromium, tmp_path / "changed.html")
    assert chromium.title != "owned"
    assert any("Content Security Policy" in message for message in window.messages())


def test_the_page_can_be_read_without_seeing_its_charts(chromium, page):
    window = Window(chromium, page)
    unnamed = window.js(
        "return [...document.querySelectorAll('.chart')].filter(e =>"
        " !document.getElementById(e.getAttribute('aria-labelledby')).textContent.trim()).length"
    )
    assert unnamed == 0
    assert window.js("return [...document.querySelectorAll('table')].every(e => e.getAttribute('aria-label'))")
    assert window.js("return [...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0)")
    with contextlib.suppress(Exception):
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
