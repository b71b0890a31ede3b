import mmap
import os
from pathlib import Path

import psutil
import pytest

from kerasmem.devices.host import HostReader


@pytest.fixture
def reader():
    reader = HostReader()
    yield reader
    reader.close()


def test_resident_bytes_follow_what_is_touched(reader):
    before = reader.read().rss_bytes
    block = mmap.mmap(-1, 64 * 2**20)
    untouched = reader.read().rss_bytes
    block.write(b"x" * (64 * 2**20))
    touched = reader.read().rss_bytes
    block.close()
    assert untouched - before < 16 * 2**20
    assert touched - before > 48 * 2**20
    assert abs(reader.read().rss_bytes - psutil.Process().memory_info().rss) < 8 * 2**20


def test_a_forked_child_reads_itself(reader):
    reader.read()
    into, out = os.pipe()[::-1]
    child = os.fork()
    if child == 0:
        before = reader.read().rss_bytes
        block = mmap.mmap(-1, 64 * 2**20)
        block.write(b"x" * (64 * 2**20))
        os.write(into, str(reader.read().rss_bytes - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    grown = int(os.read(out, 100))
    os.close(into)
    os.close(out)
    assert 60 * 2**20 < grown < 80 * 2**20  # the parent, had it been read, would not have grown


def test_without_proc_psutil_answers_and_swap_is_unknown(reader, monkeypatch):
    monkeypatch.setattr("kerasmem.devices.host._SELF", Path("/nonexistent"))
    reading = reader.read()
    assert reading.rss_bytes > 2**20 and reading.swap_bytes is None


def test_figures_are_what_the_kernel_says_and_swap_is_read_now_and_then(monkeypatch, tmp_path):
    status, statm = tmp_path / "status", tmp_path / "statm"
    status.write_text("Name:\tx\nVmRSS:\t    2048 kB\nVmSwap:\t     512 kB\n")
    statm.write_text("1000 7 3 1 0 50 0\n")
    monkeypatch.setattr("kerasmem.devices.host._SELF", tmp_path)
    now = 100.0
    reader = HostReader(swap_every=0.5, clock=lambda: now)
    page = os.sysconf("SC_PAGE_SIZE")
    assert reader.read() == (7 * page, 512 * 1024)
    status.write_text("VmSwap:\t     1024 kB\n")
    statm.write_text("1000 9 3 1 0 50 0\n")
    now = 100.4
    assert reader.read() == (9 * page, 512 * 1024)
    now = 100.5
    assert reader.read() == (9 * page, 1024 * 1024)
    reader.close()


def test_open_files_do_not_pile_up():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        HostReader().read()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
