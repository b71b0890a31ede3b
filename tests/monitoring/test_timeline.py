import json
import os
import pickle

import numpy as np
import pytest

from kerasmem.errors import InputError, UsageError
from kerasmem.monitoring import Sample, Timeline, read_timeline
from kerasmem.monitoring.logfile import LogFile, format_of
from kerasmem.monitoring.recorder import LoggerSettings
from kerasmem.monitoring.timeline import COLUMNS, KINDS, PackedRows


def sample(batch, peak, *, phase="train", epoch=0, device="GPU:0", run=0, **sizes):
    values = dict.fromkeys(COLUMNS)
    values.update(run=run, time=batch / 10 if batch is not None else 9.0, phase=phase, epoch=epoch, batch=batch)
    values.update(steps=1, device=device, peak_bytes=peak, **sizes)
    return Sample(**values)


ROWS = [
    sample(0, 500, in_use_bytes=100, rss_bytes=10, swap_bytes=0),
    sample(0, 700, device="GPU:1", rss_bytes=10, swap_bytes=0),
    sample(1, 900, in_use_bytes=300, driver_used_bytes=2000, driver_total_bytes=4000),
    sample(1, None, device="GPU:1"),
    sample(0, 950, phase="validation", between_peak_bytes=970),
    sample(None, 980, phase="epoch", between_peak_bytes=980),
    sample(0, 400, epoch=1),
    sample(0, 300, phase="evaluate", epoch=None, device=None, run=1),
]


@pytest.fixture
def timeline():
    return Timeline(ROWS, ["a note"])


# ----------------------------------------------------------------- rows


def test_packed_rows_give_back_what_they_were_given():
    rows = PackedRows(KINDS)
    for row in ROWS:
        rows.append(row)
    assert list(rows) == [tuple(row) for row in ROWS]
    assert rows[-1] == tuple(ROWS[-1]) and list(rows)[1:3] == [tuple(row) for row in ROWS[1:3]]
    with pytest.raises(IndexError):
        rows[len(ROWS)]
    big = PackedRows(["int"])
    big.append([2**62])
    assert big[0] == (2**62,)


@pytest.mark.parametrize("keep", [0, 1, 10, 1000])
def test_the_oldest_rows_are_dropped_beyond_what_is_kept(keep):
    rows = PackedRows(["int"], keep)
    for number in range(5000):
        rows.append([number])
        assert len(rows) <= keep + max(1, keep // 8)
    assert [row[0] for row in rows] == list(range(5000 - len(rows), 5000))
    assert len(rows) >= keep


# ------------------------------------------------------------- timeline


def test_the_largest_of_a_size(timeline):
    assert timeline.max() == 980
    assert timeline.max("peak_bytes", phase="train") == 900
    assert timeline.max("peak_bytes", device="GPU:1") == 700
    assert timeline.max("peak_bytes", epoch=1) == 400
    assert timeline.max("peak_bytes", run=1) == 300
    assert timeline.max("reserved_bytes") is None
    assert timeline.largest().phase == "validation"
    assert timeline.largest(phase="train").batch == 1
    assert timeline.largest("reserved_bytes") is None
    with pytest.raises(UsageError, match=r"'batch' is no size; choose one of in_use_bytes, peak_bytes"):
        timeline.max("batch")


def test_plain_data_and_back(timeline):
    data = json.loads(json.dumps(timeline.to_dict()))
    assert data["format_version"] == 1 and data["columns"][0] == "run"
    assert Timeline.from_dict(data) == timeline
    assert pickle.loads(pickle.dumps(timeline)) == timeline
    assert timeline != Timeline(ROWS) and timeline != Timeline(ROWS[:-1], ["a note"])


def test_columns_of_another_version_are_tolerated(timeline):
    data = timeline.to_dict()
    data["columns"].append("new_bytes")
    data["rows"] = [[*row, 1] for row in data["rows"]]
    assert Timeline.from_dict(data) == timeline
    few = {"format_version": 1, "columns": ["run", "time", "phase"], "rows": [[0, 1, "train"]]}
    assert Timeline.from_dict(few)[0].peak_bytes is None


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"format_version": None},
        {"rows": [[1]]},
        {"rows": 3},
        {"columns": ["run"], "rows": [[1]]},
        {"columns": ["run", "time", "phase"], "rows": [[float("inf"), 0.5, "train"]]},
        {"notes": None},
    ],
)
def test_what_is_no_timeline_is_an_input_error(timeline, change):
    with pytest.raises(InputError, match="timeline: "):
        Timeline.from_dict({**timeline.to_dict(), **change})


# ---------------------------------------------------------------- files


@pytest.fixture(params=["csv", "jsonl"])
def log(request, tmp_path):
    return tmp_path / "deep" / "folder" / f"log.{request.param}"


def write(path, rows, append=False, notes=()):
    file = LogFile(path, append)
    file.start_run(file.next_run, "2020-01-01T00:00:00+00:00", notes)
    file.add(rows)
    file.close()
    return file


def test_a_file_gives_back_what_was_written(log):
    write(log, ROWS)
    assert read_timeline(log).samples == tuple(ROWS)
    assert read_timeline(log).notes == ()


def test_notes_are_in_json_lines(tmp_path):
    write(tmp_path / "log.jsonl", ROWS, notes=["one"])
    file = LogFile(tmp_path / "log.jsonl", True)
    file.add_object("note", run=0, text="two")
    file.add_object("note", run=0, text="two")
    file.close()
    assert read_timeline(tmp_path / "log.jsonl").notes == ("one", "two")


def test_a_file_cut_anywhere_gives_its_whole_rows(log):
    write(log, ROWS)
    whole = log.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[0], len(whole)):
        log.write_bytes(whole[:cut])
        timeline = read_timeline(log)
        complete = sum(end <= cut for end in ends) - 1
        assert timeline.samples[:complete] == tuple(ROWS[:complete])
        # JSON shows that it is whole without its line end; a number in CSV does not.
        assert len(timeline) - complete in ((0, 1) if log.suffix == ".jsonl" else (0,))
        assert bool(timeline.notes) == (cut not in ends and len(timeline) == complete)


def test_lines_that_are_damaged_are_left_out_and_counted(log):
    write(log, ROWS)
    lines = log.read_text().splitlines()
    lines[3] = lines[3][:20]
    lines[5] = "\0\0\0"
    lines[6] = "1" * 200_000
    log.write_text("\n".join(lines) + "\n")
    timeline = read_timeline(log)
    assert len(timeline) == len(ROWS) - 3
    assert timeline.notes == ("file: 3 line(s) are not whole and were left out (line 4, 6, 7)",)


def test_appending_counts_runs_on_and_mends_a_half_line(log):
    write(log, ROWS)
    write(log, ROWS[:1], append=True)
    with log.open("a") as file:
        file.write('{"kind":"sam' if log.suffix == ".jsonl" else "0,0.3,tra")
    again = write(log, [ROWS[0]._replace(run=2)], append=True)
    assert again.next_run == (2 if log.suffix == ".csv" else 3), "JSON lines count the run without a row too"
    timeline = read_timeline(log)
    assert len(timeline) == len(ROWS) + 2 and timeline.notes == ()
    assert write(log, ROWS[:1]).next_run == 0
    assert len(read_timeline(log)) == 1


def test_appending_to_something_else_is_refused_and_leaves_it(tmp_path):
    for name, text in [
        ("a.csv", "run,time\n0,1\n"),
        ("a.jsonl", '{"kinds": 1}\n'),
        ("b.csv", '{"kind":"run"}\n'),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match="no kerasmem log"):
            LogFile(tmp_path / name, True)
        assert (tmp_path / name).read_text() == text


def test_a_file_that_cannot_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    os.symlink("/dev/full", tmp_path / "full.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UsageError, match=r"cannot be written: .*(Not a directory|File exists)"):
        LogFile(tmp_path / "file" / "log.csv", False)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        LogFile(tmp_path / "full.csv", False)
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        LogFile(tmp_path / "folder.csv", False)


def test_files_that_are_no_log(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_timeline(tmp_path / "none.csv")
    for text in ("", "a,b\n1,2\n", "{}\n{}\n", "{broken\n", "\0\1\2"):
        (tmp_path / "log").write_text(text)
        with pytest.raises(InputError, match="no kerasmem log"):
            read_timeline(tmp_path / "log")
    (tmp_path / "log").write_text('{"kind":"run","format_version":9}\n')
    with pytest.raises(InputError, match="format_version is 9"):
        read_timeline(tmp_path / "log")


def test_formats():
    assert [format_of(name) for name in ("a.csv", "a.CSV", "b.jsonl", "c.ndjson")] == ["csv"] * 2 + ["jsonl"] * 2
    with pytest.raises(UsageError, match=r"\.csv or \.jsonl"):
        format_of("a.txt")


# ------------------------------------------------------------ arguments

GOOD = {
    "filename": "a.csv", "update_freq": 1, "nvml": "auto", "verbose": 0, "sampling": 20,
    **dict.fromkeys(("append", "reset_peaks", "leaks")), "epoch_logs": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"filename": 3}, {"filename": "/tmp"}, {"update_freq": 0}, {"update_freq": True}, {"update_freq": 1.5},
        {"nvml": "yes"}, {"epoch_logs": "byte"},
        {"nvml": None}, {"verbose": 2}, {"verbose": "auto"}, {"sampling": -1}, {"update_freq": np.bool_(True)},
        {"update_freq": np.float32(2)}, {"update_freq": np.int64(0)}, {"filename": "a\0.csv"},
        {"filename": "\ud800.csv"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong):
    LoggerSettings(**GOOD)
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: "):
        LoggerSettings(**{**GOOD, **wrong})
