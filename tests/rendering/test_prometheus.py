"""Prometheus text, read back by prometheus-client's own parser."""

from __future__ import annotations

import sys

import pytest

from kerasmem.errors import MissingExtraError
from kerasmem.monitoring import Sample, Timeline
from kerasmem.monitoring.log_summary import summarise
from kerasmem.monitoring.rank_logs import TrainingLogs
from kerasmem.rendering.contents import read_composition
from kerasmem.rendering.prometheus import render_prometheus

parser = pytest.importorskip("prometheus_client.parser")
HOSTILE = 'a"b\\c\nd{} 1\n# TYPE x gauge'


def training(name, rank=None, peak=900):
    row = Sample(0, 0.5, "train", 0, 0, 1, "GPU:0", None, peak, None, None, None, None, 7, 0)
    return TrainingLogs(name, (summarise(Timeline([row]), name, rank),))


def report(name):
    data = {"format_version": 1, "model": {"name": name}, "settings": {"method": "xla", "batch_size": 32},
            "bytes": {"total": 10, "weights": 4}}  # fmt: skip
    return read_composition(data, name)


def test_every_metric_has_its_help_type_and_labels():
    text = render_prometheus([training("run.rank1.csv", 1)], [report("m.json")])
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    for name, family in families.items():
        assert family.type == "gauge" and family.documentation, name
        assert f"# HELP {name} " in text and f"# TYPE {name} gauge" in text
    (peak,) = families["kerasmem_run_peak_bytes"].samples
    assert peak.value == 900
    assert peak.labels == {"log": "run.rank1.csv", "rank": "1", "run": "0", "kind": "fit"}
    parts = {sample.labels["category"]: sample.value for sample in families["kerasmem_step_bytes"].samples}
    assert parts == {"total": 10, "weights": 4}


def test_what_is_not_known_has_no_line():
    text = render_prometheus([training("a.csv", peak=None)])
    assert "kerasmem_run_peak_bytes" not in text and "kerasmem_run_host_bytes{" in text
    assert render_prometheus([]) == ""


def test_labels_cannot_break_out():
    text = render_prometheus([training(HOSTILE + "\ud800")], [report(HOSTILE)])
    assert not any(line.startswith(("d{}", "# TYPE x")) for line in text.splitlines())
    families = list(parser.text_string_to_metric_families(text))
    (peak,) = next(family for family in families if family.name == "kerasmem_run_peak_bytes").samples
    assert peak.labels["log"].startswith('a"b\\c\\nd{}')


def test_without_the_library_its_install_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kerasmem\[prometheus\]'"):
        render_prometheus([])
