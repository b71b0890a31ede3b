"""Worker processes of a transform do not outlive the training process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_pool.py")
SEMAPHORES = Path("/dev/shm")


def lives(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_worker_processes_end_when_their_parent_is_killed():
    if not SEMAPHORES.is_dir() or not Path("/proc/self/stat").exists():
        pytest.skip("needs Linux's /proc and /dev/shm")
    before = set(SEMAPHORES.glob("sem.mp-*"))
    parent = subprocess.Popen([sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True)
    children = [int(process) for process in parent.stdout.readline().split()]
    assert children
    assert all(map(lives, children))
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 20
    while (any(map(lives, children)) or set(SEMAPHORES.glob("sem.mp-*")) - before) and time.monotonic() < until:
        time.sleep(0.1)
    left = [process for process in children if lives(process)]
    for process in left:
        os.kill(process, 9)
    assert not left
    assert not set(SEMAPHORES.glob("sem.mp-*")) - before
