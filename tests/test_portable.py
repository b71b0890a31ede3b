"""On Windows and macOS, kerasmem imports, and a feature that needs Linux raises an error when it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

# A Python that looks like one on Windows: without the modules and functions of Unix. Libraries that need them are
# loaded before.
ELSEWHERE = """
import ctypes, os, signal, socket, subprocess, sys, tempfile, multiprocessing, concurrent.futures.process
import h5py, keras, numpy as np, psutil, tensorflow, click, rich.console, cattrs, cloudpickle

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "resource", "termios", "pwd", "grp", "deflate"}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Blocked())
for name in ("fcntl", "resource", "termios", "pwd", "grp", "deflate"):
    sys.modules.pop(name, None)
for module, gone in (
    (os, "fork register_at_fork killpg preadv pread pwrite sysconf sysconf_names sched_getaffinity geteuid getuid "
         "posix_fadvise pidfd_open O_CLOEXEC O_NONBLOCK O_NOFOLLOW statvfs getloadavg setsid"),
    (signal, "SIGKILL SIGBUS SIGCHLD SIGUSR1 SIGUSR2 SIGHUP pthread_sigmask sigtimedwait sigwaitinfo siginterrupt"),
    (socket, "AF_UNIX SOCK_SEQPACKET recv_fds send_fds"),
):
    for name in gone.split():
        if hasattr(module, name):
            delattr(module, name)

def no_library(name, *rest, **more):
    if name is None:
        raise TypeError("no such handle")
    return load(name, *rest, **more)

load, ctypes.CDLL = ctypes.CDLL, no_library
"""


def test_everything_is_imported_and_the_core_works(program, tmp_path):
    core = (Path(__file__).parent / "support" / "portable_core.py").read_text()
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE + core)
    done = program("elsewhere.py", cwd=tmp_path)
    assert done.code == 0, done.err[-3000:]
    assert "run_isolated" in done.out and "need Linux" in done.out


@pytest.mark.parametrize("name", ["preadv", "pread"])
def test_bytes_are_read_from_their_place_without_preadv(name, monkeypatch, tmp_path):
    import os

    from kerasmem import files

    monkeypatch.delattr(os, name)
    (tmp_path / "data").write_bytes(bytes(range(100)))
    number = os.open(tmp_path / "data", files.READ)
    read = bytearray(30)
    assert files.read_at(number, memoryview(read), 5) == 30
    assert read == bytes(range(5, 35))
    assert files.read_bytes(number, 50, 90) == bytes(range(90, 100))
    os.close(number)
