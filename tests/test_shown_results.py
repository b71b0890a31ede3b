"""How results show themselves: `print` the answer, `repr` one line, a notebook a table, `to_frame` for pandas."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import keras
import pytest

import kerasmem
from kerasmem.datatools.reports import ColumnStats, Conversion, DatasetReport, DataStats, Inspection
from kerasmem.estimation.report import Bytes, DeviceVerdict, LayerMemory, ModelFacts, Settings
from kerasmem.monitoring.timeline import Sample, Timeline
from kerasmem.records import MOST_ROWS
from kerasmem.recovery.advice import Advice, Remedy

MIB = 2**20


def build(units=64):
    model = keras.Sequential(
        [keras.Input((32,)), keras.layers.Dense(units), keras.layers.Dense(2)], name="<net>\x1b[31m"
    )
    model.compile("sgd", "mse")
    return model


OOM = "OOM when allocating tensor with shape[512,12] and type float"


def advice():
    need = Bytes(100 * MIB, 95 * MIB, 110 * MIB, *[None] * 7)
    plan = Remedy(
        "4 micro-batches of 16", ({"kind": "micro_batches", "value": 4},), "same", "none", 1.0, 30 * MIB, 29 * MIB,
        31 * MIB, 100 * MIB, "fits", "graph", "import keras\nmodel.fit()\n",
    )  # fmt: skip
    settings = Settings(64, "adam", "mse", "float32", "train", "graph", "graph", "50MiB")
    device = DeviceVerdict("50MiB", 50 * MIB, 50 * MIB, "does not fit")
    return Advice(ModelFacts("net", "net.keras", 8, 1, 1), settings, need, device, (plan,), (plan,))


def data_results():
    dataset = DatasetReport("/x", (100, 8), "float32", "chunked", (10, 8), ("gzip",), 1 << 20, 3200, 1024)
    yield Inspection("a\u202e.h5", 1 << 20, (dataset,), 32, "/x", line="H5ChunkSequence('a.h5')"), "1.00 MiB"
    yield (
        DataStats("a.h5", 100, (ColumnStats("/x", (8,), "float32", (0.5,), (0.1,), 0.0, 1.0),), ""),
        "100 rows of /x",
    )
    done = Conversion(("a.npy",), ("b.h5",), 9, (), 99, 0, 0.1)
    yield done, "9 rows, 99 B, written to b.h5"


def every_result():
    search = kerasmem.max_batch_size(build, device="2MB", method="formula")
    yield search, f"2MB: batch_size {search.largest:,} fits, needs "
    yield search.report, "<net>\\x1b[31m fits 2MB: needs "
    yield kerasmem.rank_cards(build, method="formula"), "<net>\\x1b[31m fits "
    yield advice(), "net fits 50MiB with 4 micro-batches of 16: needs 30.0 MiB, of 50.0 MiB"
    yield (
        kerasmem.explain_oom(OOM),
        "The device ran out of memory: 24.0 KiB was requested.",
    )
    yield (
        Timeline([Sample(0, 0.5, "train", 0, 7, 1, "GPU:0", 100, 3 * MIB, *[None] * 6)]),
        ("1 readings, peak 3.00 MiB, in train, epoch 1, batch 8"),
    )
    yield from data_results()


@pytest.fixture(scope="module")
def results():
    return list(every_result())


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("place", range(9))
def test_a_result_shows_itself(results, place):
    result, answer = results[place]
    assert answer in str(result) and "\n" not in str(result)
    assert repr(result) == f"<{type(result).__name__}: {result}>"
    page = Cells()
    page.feed(result._repr_html_())
    assert str(result) in page.texts and set(page.tags) <= {"p", "b", "table", "tr", "th", "td"}
    assert not {"\x1b", "\u202e"} & set(str(result) + repr(result) + result._repr_html_())
    assert len(result.to_frame().columns) >= (0 if answer.startswith("9 rows") else 3)


def test_names_from_models_and_logs_steer_nothing():
    """Also those that stand in a list, as the layers do that a layer takes, and the phase of a log."""
    hostile = "<i>\u202e\x1b[31m"
    timeline = Timeline([Sample(0, 0.5, hostile, 0, 7, 1, hostile, 100, 3 * MIB, *[None] * 6)])
    layer = LayerMemory(name=hostile, class_name=hostile, output_shape=(None, 2), inputs=(hostile, "x"))
    for result in (timeline, dataclasses.replace(kerasmem.estimate(build(), method="formula"), layers=(layer,))):
        assert not {"\x1b", "\u202e"} & set(str(result) + repr(result) + result._repr_html_())
        assert "<i>" not in result._repr_html_()


def test_fits_and_peak(results):
    search, report, ranking, advised, _, timeline, *_ = (result for result, _ in results)
    assert search.fits and search.peak == report.peak == search.report.bytes.total
    assert ranking.fits and ranking.peak > 0
    assert advised.fits and advised.peak == 100 * MIB
    assert timeline.peak == 3 * MIB
    nothing = kerasmem.max_batch_size(lambda: build(2**16), device="1MiB", method="formula")
    assert not nothing.fits and "1MiB: batch_size 1 does not fit" in str(nothing)


def test_a_table_has_sizes_in_units_and_an_end(results):
    search = results[0][0]
    page = Cells()
    page.feed(search._repr_html_())
    assert page.texts[1:6] == ["size", "total", "low", "high", "verdict"]
    assert f"{search.largest:,}" in page.texts and any(text.endswith("KiB") for text in page.texts)
    assert list(search.to_frame()["size"]) == [each.size for each in search.evaluations]
    long = Timeline(
        [Sample(0, 0.5, "train", 0, batch, 1, *["GPU:0", 1, 2], *[None] * 6) for batch in range(MOST_ROWS + 5)]
    )
    assert "<p>5 more rows: to_frame()</p>" in long._repr_html_() and len(long.to_frame()) == MOST_ROWS + 5


def test_results_without_a_table_keep_their_fields(results):
    report = results[1][0]
    part = dataclasses.replace(advice().plans[0], code="")
    assert repr(part).startswith("Remedy(name='4 micro-batches of 16'") and report.to_frame().shape[0] == 3
