import os
import pickle
import tracemalloc

import numpy as np
import pytest

from kerasmem.errors import InputError, UsageError
from kerasmem.monitoring import Sample, Timeline, read_timeline
from kerasmem.monitoring.logfile import LogFile, format_of
from kerasmem.monitoring.recorder import Recorder
from kerasmem.monitoring.timeline import COLUMNS


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


# ------------------------------------------------------------- timeline


def test_a_timeline_gives_back_what_it_was_given(timeline):
    assert timeline.samples == tuple(ROWS)
    assert timeline[-1] == ROWS[-1] and list(timeline)[1:3] == ROWS[1:3]
    with pytest.raises(IndexError):
        timeline[len(ROWS)]
    assert Timeline([ROWS[0]._replace(peak_bytes=2**53 - 1)]).max() == 2**53 - 1
    assert pickle.loads(pickle.dumps(timeline)) == timeline
    assert timeline != Timeline(ROWS) and timeline != Timeline(ROWS[:-1], ["a note"])


def test_the_largest_of_a_size(timeline):
    assert timeline.max() == 980
    assert timeline.max("peak_bytes", phase="train") == 900
    assert timeline.max("peak_bytes", device="GPU:1") == 700
    assert timeline.max("peak_bytes", epoch=1) == 400
    assert timeline.max("peak_bytes", run=1) == 300
    assert timeline.max("reserved_bytes") is None
    assert (timeline.largest().phase, timeline.largest().peak_bytes) == ("epoch", timeline.max())
    assert timeline.largest(phase="train").batch == 1
    assert timeline.largest("reserved_bytes") is None
    with pytest.raises(UsageError, match=r"field must be one of in_use_bytes, peak_bytes.*got 'batch'"):
        timeline.max("batch")


# ---------------------------------------------------------------- files


@pytest.fixture(params=["csv", "jsonl"])
def log(request, tmp_path):
    return tmp_path / "deep" / "folder" / f"log.{request.param}"


def write(path, rows, append=False, notes=()):
    file = LogFile(path, append)
    file.add_object("run", format_version=1, run=file.next_run, notes=notes)
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
    assert timeline.notes == ("file: 3 damaged line(s) were left out (line 4, 6, 7)",)


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
        with pytest.raises(UsageError, match=r"filename: .*append=False"):
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


def test_columns_of_another_version_are_tolerated(tmp_path):
    (tmp_path / "log.csv").write_text("run,time,phase,new_bytes\n0,1,train,7\n")
    (row,) = read_timeline(tmp_path / "log.csv")
    assert row.time == 1.0 and row.peak_bytes is None


def test_a_log_is_read_line_by_line(tmp_path):
    """What reading holds beside the samples does not grow with the log."""
    (tmp_path / "log.csv").write_text(",".join(COLUMNS) + "\n" + "0,0.5,train,0,1,1,GPU:0,1,2,3,4,5,6,7,8\n" * 5_000)
    tracemalloc.start()
    timeline = read_timeline(tmp_path / "log.csv")
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(timeline) == 5_000
    assert held < 150 * len(timeline) and most < 2 * held


def test_files_that_are_no_log(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_timeline(tmp_path / "none.csv")
    for text in ("", "a,b\n1,2\n", "{}\n{}\n", "{broken\n", "\0\1\2"):
        (tmp_path / "log").write_text(text)
        with pytest.raises(InputError, match="not a kerasmem log"):
            read_timeline(tmp_path / "log")
    (tmp_path / "log").write_text('{"kind":"run","format_version":9}\n')
    with pytest.raises(InputError, match="format_version must be 1; got 9"):
        read_timeline(tmp_path / "log")


def test_formats():
    assert [format_of(name) for name in ("a.csv", "a.CSV", "b.jsonl", "c.ndjson")] == ["csv"] * 2 + ["jsonl"] * 2
    with pytest.raises(UsageError, match=r"\.csv or \.jsonl"):
        format_of("a.txt")


# ------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"filename": 3}, {"filename": "/tmp"}, {"update_freq": 0}, {"update_freq": True}, {"update_freq": 1.5},
        {"nvml": "yes"}, {"epoch_logs": "byte"}, {"nvml": None}, {"sampling": -1}, {"update_freq": np.bool_(True)},
        {"update_freq": np.float32(2)}, {"update_freq": np.int64(0)}, {"filename": "a\0.csv"},
        {"filename": "\ud800.csv"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(UsageError, match=rf"^{next(iter(wrong))}(:| must be) "):
        Recorder(**{"filename": "a.csv", **wrong})
