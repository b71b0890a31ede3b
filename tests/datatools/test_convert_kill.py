"""A conversion that is killed goes on, and ends with the same bytes; two at once keep out of each other's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from converted import content, left_in

from kerasmem.data import convert
from kerasmem.datatools.converting.job import folder_of
from kerasmem.errors import UsageError

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
ROWS = 4000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("source") / "d.npz"
    np.savez(path, x=rng.random((ROWS, 50)), y=np.arange(ROWS), label=np.arange(ROWS) % 7)
    return path


def run(settings, point="never", count=1):
    done = subprocess.run(
        [sys.executable, HERE / "convert_killed.py", json.dumps(settings), point, str(count)],
        capture_output=True, text=True, timeout=120, env=ENVIRONMENT,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


WAYS = {
    "in order": ({}, [("put", 3), ("after", 2), ("sums", 2)]),
    "packed, split": (
        {"compression": "gzip:1", "split": "0.7,0.3"},
        [("checkpoint", 2), ("put", 9), ("after", 3), ("place", 7)],
    ),
    "shuffled": ({"shuffle": True}, [("flush", 1), ("after", 2), ("put", 2), ("state", 6), ("sums", 3)]),
    "shuffled, packed, split": (
        {"shuffle": True, "compression": "zstd", "split": "0.6,0.2,0.2", "group": "label"},
        [("after", 1), ("after", 5), ("put", 8)],
    ),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_killed_again_and_again(tmp_path, source, way):
    settings, points = WAYS[way]
    whole = tmp_path / "whole"
    whole.mkdir()
    settings = {"sources": [str(source)], "memory_budget": "400KiB", **settings}
    convert(**{**settings, "output": whole / "out.h5"})
    given = {**settings, "output": str(tmp_path / "out.h5")}
    killed = 0
    for point, count in points:
        code, _ = run(given, point, count)
        if code == -signal.SIGKILL:
            killed += 1
            assert left_in(tmp_path, "whole", folder_of("out.h5")) == [] or point == "place"
    assert killed >= len(points) - 1
    code, said = run(given)
    assert code == 0, said
    assert left_in(tmp_path, "whole", *os.listdir(whole)) == []
    for name in os.listdir(whole):
        one, other = content(whole / name), content(tmp_path / name)
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype and one[key].tobytes() == other[key].tobytes()
        with h5py.File(whole / name) as first, h5py.File(tmp_path / name) as second:
            assert first["x"].attrs["kerasmem_crc32"] == second["x"].attrs["kerasmem_crc32"]


def test_what_was_done_is_not_done_again(tmp_path, source):
    given = {"sources": [str(source)], "output": str(tmp_path / "out.h5"), "memory_budget": "400KiB"}
    assert run(given, "after", 4)[0] == -signal.SIGKILL
    with pytest.raises(UsageError, match="a conversion with other settings, or of sources that have changed since"):
        convert(source, tmp_path / "out.h5", memory_budget="400KiB", shuffle=True)
    assert os.path.isdir(folder_of(str(tmp_path / "out.h5")))  # still to be gone on with
    code, said = run(given)
    assert code == 0 and 0 < said["resumed_rows"] < ROWS
    os.unlink(tmp_path / "out.h5")
    assert run(given, "after", 2)[0] == -signal.SIGKILL
    convert(source, tmp_path / "out.h5", memory_budget="400KiB", shuffle=True, force=True)
    assert left_in(tmp_path, "out.h5") == []


def test_ctrl_c_leaves_what_can_be_gone_on_with(tmp_path, source):
    given = {"sources": [str(source)], "output": str(tmp_path / "out.h5"), "memory_budget": "400KiB"}
    calls = []

    def interrupt(what, done, total):
        calls.append(done)
        if what == "writing" and done > 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr("kerasmem.datatools.converting.job.CHECKPOINT_BYTES", 64 << 10)
        convert(source, given["output"], memory_budget="400KiB", progress=interrupt)
    assert left_in(tmp_path) == [os.path.basename(folder_of("out.h5"))]
    done = convert(source, given["output"], memory_budget="400KiB")
    assert done.resumed_rows > 0 and left_in(tmp_path, "out.h5") == []


def test_two_at_once(tmp_path, source):
    """The second is told so, and the first goes on undisturbed."""
    code = (
        "import sys, time\nimport kerasmem\n"
        "def slow(what, done, total):\n    print(done, flush=True); time.sleep(0.05)\n"
        "kerasmem.data.convert(sys.argv[1], sys.argv[2], memory_budget='400KiB', progress=slow)"
    )
    output = tmp_path / "out.h5"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(output)], stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as first:  # fmt: skip
        deadline = time.monotonic() + 30
        while not os.path.isdir(folder_of(str(output))) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        with pytest.raises(UsageError, match="another process is writing this output"):
            convert(source, output, memory_budget="400KiB")
        first.communicate(timeout=60)
    assert first.returncode == 0 and left_in(tmp_path, output) == []
    assert np.array_equal(content(output)["y"], np.arange(ROWS))


def test_a_full_disk_leaves_nothing(tmp_path, source):
    """A limit on the size of files stands for a disk without room."""
    code = (
        "import resource, signal, sys\nfrom kerasmem.cli import main\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "main(['data', 'convert', sys.argv[1], '-o', sys.argv[2], '--shuffle', '--memory', '400KiB'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out.h5")],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    assert (
        done.returncode == 1 and "cannot be written: File too large" in done.stderr and "Traceback" not in done.stderr
    )
    assert left_in(tmp_path) == []
