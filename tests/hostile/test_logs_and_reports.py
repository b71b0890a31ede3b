"""Hostile logs and reports: lines with unreasonable numbers or nesting are skipped."""

from __future__ import annotations

import pytest

from kerasmem.errors import InputError
from kerasmem.monitoring.logfile import LogFile, read_timeline

GOOD = '{"kind":"sample","run":0,"time":1.0,"phase":"train","peak_bytes":900}\n'
BAD = {
    "a run of forty digits": '{"kind":"sample","run":' + "9" * 40 + ',"time":1,"phase":"train"}\n',
    "an endless run": '{"kind":"sample","run":1e999,"time":1,"phase":"train"}\n',
    "nested lists": '{"kind":"sample","run":' + "[" * 100_000 + "\n",
    "a number of 10,000 digits": '{"kind":"sample","run":' + "9" * 10_000 + "}\n",
    "lists for texts": '{"kind":"phase","run":' + "[" * 900 + "]" * 900 + "}\n",
}


@pytest.mark.parametrize("name", BAD)
def test_unreasonable_line_is_skipped(tmp_path, name):
    path = tmp_path / "run.jsonl"
    path.write_text(GOOD + BAD[name])
    timeline = read_timeline(path)
    assert timeline.max("peak_bytes") == 900
    assert any("1 damaged line(s) were left out (line 2)" in note for note in timeline.notes)
    path.write_text(BAD[name])
    with pytest.raises(InputError, match="no line is a valid sample"):
        read_timeline(path)


def test_unreasonable_csv_line_is_skipped(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("run,time,phase,peak_bytes\n0,1,train,900\n" + "9" * 400 + ",1,train,1\n")
    assert read_timeline(path).max("peak_bytes") == 900


def test_append_to_log_with_deeply_nested_last_line(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(GOOD + '{"kind":"sample","run":' + "[" * 20_000 + "\n")
    log = LogFile(path, append=True)
    assert log.next_run == 1
    log.close()


def test_deeply_nested_report_is_refused(attack, tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"bytes":' + "[" * 200_000)
    done = attack("report", path, seconds=40)
    assert done.code == 2 and "nested too deeply" in done.err
