import mmap
from pathlib import Path

import psutil

from kerasmem.devices.host import TreeReader


def test_resident_bytes_follow_what_is_touched():
    reader = TreeReader()
    before = reader.read().rss_bytes
    block = mmap.mmap(-1, 64 * 2**20)
    untouched = reader.read().rss_bytes
    block.write(b"x" * (64 * 2**20))
    touched = reader.read().rss_bytes
    block.close()
    assert untouched - before < 16 * 2**20
    assert touched - before > 48 * 2**20
    assert abs(reader.read().rss_bytes - psutil.Process().memory_info().rss) < 8 * 2**20


def test_without_proc_psutil_answers_and_swap_is_unknown(monkeypatch):
    monkeypatch.setattr("kerasmem.devices.host._PROC", Path("/nonexistent"))
    reading = TreeReader().read()
    assert reading.rss_bytes > 2**20 and reading.swap_bytes is None
