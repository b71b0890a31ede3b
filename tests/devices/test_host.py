import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_nvml import RecordedNvml

from kerasmem.devices.host import TreeReader, parse_status
from kerasmem.devices.machine import others_on_card
from kerasmem.devices.nvml import Nvml

MIB = 2**20
STATUS = b"Name:\tVmRSS:  9 kB\nVmPeak:\t  500 kB\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nVmSwap:\t   4 kB\nThreads:\t9\n"


def test_the_kernels_status_is_read():
    assert parse_status(STATUS) == {"VmRSS": 200 * 1024, "VmHWM": 300 * 1024, "VmSwap": 4 * 1024}
    assert parse_status(b"Name:\tkthreadd\n") == {}


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


def child(mebibytes):
    command = [sys.executable, "-c", f"b = b'x' * ({mebibytes} * 2**20); print(flush=True); input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def in_children(reader):
    reading = reader.read()
    return reading.tree_bytes - reading.rss_bytes


def test_children_are_found_when_a_second_has_passed_and_forgotten_when_they_end(clock):
    reader = TreeReader(clock)
    before = in_children(reader)
    process = child(60)
    try:
        assert in_children(reader) - before < 30 * MIB, "which processes there are costs too much to ask every time"
        clock.now += 1.1
        with_child = in_children(reader)
    finally:
        process.communicate(b"\n")
    assert 60 * MIB < with_child - before < 90 * MIB
    assert in_children(reader) - before < 30 * MIB


def test_without_proc_psutil_answers_and_swap_is_unknown(monkeypatch):
    monkeypatch.setattr("kerasmem.devices.host._PROC", Path("/nonexistent"))
    reading = TreeReader().read()
    assert reading.rss_bytes > 2**20 and reading.swap_bytes is None


def test_others_on_a_card_are_named_with_their_share():
    api = RecordedNvml("t4")
    device = api.data["devices"][0]
    total = device["memory"]["total"] if isinstance(device["memory"], dict) else device["memory"][0]["total"]
    device["processes"] = [
        {"pid": os.getpid(), "usedGpuMemory": total // 8},
        {"pid": os.getppid(), "usedGpuMemory": total // 4},
        {"pid": 2**22 + 1, "usedGpuMemory": total // 2},
        {"pid": 2**22 + 2, "usedGpuMemory": 2**64 - 1},
    ]
    nvml, _ = Nvml.open(api)
    largest, parent = others_on_card(nvml, nvml.devices[0], total)
    nvml.close()
    assert largest == f"process {2**22 + 1} has 7.50 GiB there, 50 % of the card"
    assert parent.startswith(f"process {os.getppid()} ('") and parent.endswith("there, 25 % of the card")
