"""What Windows and macOS lack is missed where it is used, not when kerasmem is imported."""

from __future__ import annotations

import pytest

# A Python that looks like one on Windows: without the modules and functions that only Unix has. What others need of
# them is loaded before.
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
    (tmp_path / "elsewhere.py").write_text(
        ELSEWHERE
        + """
import importlib, pathlib, pkgutil
import kerasmem

for name in kerasmem.__all__:
    getattr(kerasmem, name)
from kerasmem import cli
for module in pkgutil.iter_modules(cli.__path__, "kerasmem.cli."):
    importlib.import_module(module.name)

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("adam", "mse")
for method in ("formula", "graph"):
    assert kerasmem.estimate(model, batch_size=4, method=method).bytes.total > 0
with h5py.File("train.h5", "w") as file:
    file["x"], file["y"] = np.arange(512, dtype="f4").reshape(64, 8), np.zeros((64, 1), "f4")
    file.create_dataset("z", data=np.arange(64), chunks=(16,), compression="gzip")
for columns in (("x", "y"), ("x", "z")):
    with kerasmem.H5ChunkSequence("train.h5", *columns, batch_size=8) as train:
        rows = np.concatenate([x for x, _ in train])
        assert np.array_equal(np.sort(rows[:, 0]), np.arange(0, 512, 8))
with kerasmem.H5ChunkSequence("train.h5", batch_size=8) as train:
    logger = kerasmem.MemoryLogger("run.csv")
    resume = kerasmem.ResumeTraining("run.resume", train)
    model.fit(train, epochs=2, verbose=0, callbacks=[logger, resume])
assert len(kerasmem.read_timeline("run.csv")) > 8 and logger.timeline.max("rss_bytes") > 0
kerasmem.fit(model, np.ones((8, 8)), np.ones((8, 1)), verbose=0)
assert kerasmem.explain_oom("MemoryError: Unable to allocate 1.39 GiB").out_of_memory
try:
    kerasmem.run_isolated(len, "four")
except kerasmem.KerasmemError as error:
    print(error)
"""
    )
    done = program("elsewhere.py", cwd=tmp_path)
    assert done.code == 0, done.err[-3000:]
    assert "run_isolated" in done.out and "works on Linux alone" in done.out


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
