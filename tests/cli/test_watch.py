"""`kerasmem watch`: a real training process beside it, a real terminal, a real Ctrl-C."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kerasmem.devices.processes import CardProcess, open_files, view_process
from kerasmem.errors import InputError, UsageError
from kerasmem.monitoring.snapshot import Snapshot, read_snapshot
from kerasmem.rendering.watch_view import sparkline, watch_view

HEADER = "run,time,phase,epoch,batch,steps,device,in_use_bytes,peak_bytes\n"
TRAIN = """
import sys
from kerasmem.monitoring.logfile import LogFile
from kerasmem.monitoring.timeline import Sample
log = LogFile(sys.argv[1], "jsonl", append=False)
log.start_run(0, "2026-01-01T00:00:00", [])
log.add([Sample(0, float(n), "train", 2, n, 1, "GPU:0", 100 * n, 200 * n, *[None] * 6) for n in range(5000)])
block = b"x" * 60_000_000
print(flush=True)
input()
"""


@pytest.fixture
def training():
    folder = tempfile.mkdtemp(prefix="w")  # a short name, since long ones are shortened where they are shown
    log = Path(folder) / "run \x1b[31m.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    yield process
    if process.poll() is None:
        process.communicate("\n", timeout=30)
    shutil.rmtree(folder)


def test_once_finds_the_process_and_how_far_it_is(cli, training):
    found = json.loads(cli("watch", training.pid, "--once", "--json").out)
    (run,) = found["runs"]
    assert (run["run"], run["epoch"], run["batch"], run["peak_bytes"]) == (0, 2, 4999, 999_800)
    assert run["pid"] == training.pid and run["age_seconds"] < 60
    assert found["processes"][0]["rss_bytes"] > 60_000_000
    assert found["format_version"] == 1 and found["machine"]["host"]["total_bytes"] > 0


def test_without_a_pid_whoever_trains_is_found_and_names_are_escaped(cli, training):
    done = cli("watch", "--once")
    assert done.code == 0 and f"Process {training.pid} python" in done.out
    assert "epoch 3, batch 5000" in done.out and "\\x1b[31m" in done.out and "\x1b" not in done.out


def test_a_log_can_be_named(cli, tmp_path):
    log = tmp_path / "run.csv"
    log.write_text(HEADER + "3,1.0,validation,1,7,1,GPU:0,100,200\n" + "3,2.0,valid")
    (run,) = json.loads(cli("watch", "--log", log, "--once", "--json").out)["runs"]
    assert (run["run"], run["phase"], run["batch"], run["pid"]) == (3, "validation", 7, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99999999", "--once"], "PID: process 99999999 is not running"),
        (["0", "--once"], "0 is not in the range"),
        (["--interval", "0", "--once"], "--interval: 0.0 is no number of seconds"),
        ([], "standard output is no terminal; pass --once"),
        (["--log", "/nowhere/run.csv", "--once"], "/nowhere/run.csv: cannot be read: No such file"),
        (["--log", "/dev/zero", "--once"], "/dev/zero: no file"),
    ],
)
def test_wrong_usage_is_one_message(cli, arguments, message):
    done = cli("watch", *arguments)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


def test_a_log_without_samples(tmp_path):
    log = tmp_path / "run.jsonl"
    log.write_text('{"kind":"run","format_version":1,"run":4,"notes":[]}\n')
    (run,) = read_snapshot(os.getpid(), log).runs
    assert (run.run, run.phase, run.batch) == (4, "starting", None)
    log.write_text('{"kind":"run","format_version":1,"run":Infinity,"notes":[]}\n')
    with pytest.raises(InputError, match="no sample in it yet"):
        read_snapshot(os.getpid(), log)
    log.write_text("hello\n")
    with pytest.raises(InputError, match=r"run\.jsonl: no kerasmem log"):
        read_snapshot(os.getpid(), log)


def test_in_a_terminal_it_lives_until_ctrl_c(training):
    control, terminal = pty.openpty()
    command = [sys.executable, "-m", "kerasmem", "watch", str(training.pid), "--every", "0.2"]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    watch = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environ)
    os.close(terminal)
    shown = b""
    deadline = time.monotonic() + 60
    while shown.count(b"batch 5000") < 3 and time.monotonic() < deadline:
        shown += os.read(control, 65536)
    watch.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(control, 65536):
            shown += chunk
    except OSError:  # how a terminal whose last writer has gone reads on Linux
        pass
    assert watch.wait(20) == 0
    os.close(control)
    text = shown.decode()
    assert "Traceback" not in text and "█" in text
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text, "the cursor is shown again"


def test_json_lines_end_with_the_process(training):
    command = [sys.executable, "-m", "kerasmem", "watch", str(training.pid), "--every", "0.1", "--json"]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = watch.stdout.readline()
    training.communicate("\n", timeout=30)
    rest, errors = watch.communicate(timeout=30)
    assert watch.returncode == 0 and f"process {training.pid} is not running any more" in errors
    assert all(json.loads(line)["format_version"] == 1 for line in [first, *rest.splitlines()])


def test_what_cannot_be_seen(tmp_path):
    assert open_files(99999999, (".csv",)) == []
    with pytest.raises(UsageError):
        view_process(2**40)


def test_sparklines_scale_from_nought():
    assert sparkline([], 5) == "" and sparkline([0, 0], 5) == "▁▁" and sparkline([5] * 100, 10) == "█" * 10
    assert len(sparkline(list(range(1000)), 30)) == 30


def test_names_from_the_driver_are_escaped():
    snapshot = read_snapshot(os.getpid())
    evil = CardProcess("T4", "GPU-1", 7, "\x1b[2Jevil[red]", None, 2**30, 0.25, False)
    snapshot = Snapshot(snapshot.time, snapshot.machine, snapshot.limits, (evil,), snapshot.processes, snapshot.runs)
    from rich.console import Console

    screen = Console(width=200, record=True, file=open(os.devnull, "w"), markup=False)  # noqa: SIM115
    screen.print(watch_view(snapshot, history={"host": [1, 2, 3]}))
    text = screen.export_text()
    assert "\\x1b[2Jevil[red]" in text and "25 % of it" in text and "▃▆█" in text
