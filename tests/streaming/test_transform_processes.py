"""Worker processes of a transform do not outlive the training process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import is_alive, until

SCRIPT = Path(__file__).with_name("killed_pool.py")
SEMAPHORES = Path("/dev/shm")


def test_worker_processes_end_when_their_parent_is_killed():
    if not SEMAPHORES.is_dir() or not Path("/proc/self/stat").exists():
        pytest.skip("needs Linux's /proc and /dev/shm")
    before = set(SEMAPHORES.glob("sem.mp-*"))
    parent = subprocess.Popen([sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True)
    children = [int(process) for process in parent.stdout.readline().split()]
    assert children
    assert all(map(is_alive, children))
    parent.kill()
    parent.communicate()
    until(lambda: not any(map(is_alive, children)) and not set(SEMAPHORES.glob("sem.mp-*")) - before)
