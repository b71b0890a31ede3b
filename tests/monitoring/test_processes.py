"""What is left of the log when the process dies, and when TensorFlow has nothing to tell."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fresh import environment

from kerasmem.monitoring import read_timeline

pytestmark = pytest.mark.usefixtures("loaded_python")

PRELUDE = """
import json, os, sys
import keras, numpy as np
from kerasmem import MemoryLogger
def model(width=8):
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made
def data(rows):
    return np.ones((rows, 4), "float32"), np.ones((rows, 1), "float32")
"""

OUT_OF_MEMORY = """
import tensorflow as tf
class Growing(keras.utils.PyDataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return data(2 ** (index + 4))
logger = MemoryLogger("log.csv")
try:
    model(2048).fit(Growing(), shuffle=False, verbose=0, callbacks=[logger])
    error = None
except tf.errors.ResourceExhaustedError as caught:
    error = caught.message
before = len(logger.timeline)
model().fit(*data(16), batch_size=8, verbose=0, callbacks=[logger])
print("RESULT", json.dumps([error, before, logger.run_peak, [list(s) for s in logger.timeline]]))
"""

ENDLESS = """
logger = MemoryLogger(sys.argv[1])
model().fit(*data(800), batch_size=8, epochs=100_000, verbose=0, callbacks=[logger])
"""

NOTHING_TO_TELL = """
logger = MemoryLogger("log.csv", epoch_logs="bytes")
history = model().fit(*data(16), batch_size=8, verbose=0, callbacks=[logger])
print("RESULT", json.dumps([[list(s) for s in logger.timeline], logger.notes, sorted(history.history),
                            logger.run_peak]))
"""


def result(done):
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def test_a_real_out_of_memory_leaves_every_batch_before_it(run_python, tmp_path):
    done = run_python("-c", PRELUDE + OUT_OF_MEMORY, TF_CPU_BFC_MEM_LIMIT_IN_MB="64")
    error, before, run_peak, rows = result(done)
    assert error is not None and "OOM when allocating" in error
    assert 3 <= before < 12
    timeline = read_timeline(tmp_path / "log.csv")
    assert [list(sample) for sample in timeline] == rows
    first = [sample for sample in timeline if sample.run == 0]
    assert [sample.batch for sample in first] == list(range(before))
    peaks = [sample.peak_bytes for sample in first]
    assert peaks[-1] > 4 * 2**20 and max(peaks) <= 64 * 2**20
    assert [sample.phase for sample in timeline if sample.run == 1] == ["train", "train", "epoch"]
    assert run_peak < 64 * 2**20, "the run after it has a peak of its own"


def test_kill_9_leaves_whole_lines(tmp_path):
    log = tmp_path / "log.csv"
    command = [sys.executable, "-c", PRELUDE + ENDLESS, log]
    child = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not log.exists() or log.stat().st_size < 60_000:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    text = log.read_text()
    timeline = read_timeline(log)
    lines = text[: text.rfind("\n") + 1].splitlines()
    assert len(timeline) == len(lines) - 1 > 100, "one is the header"
    assert [s.batch for s in timeline if s.epoch == 0 and s.phase == "train"] == list(range(100))
    assert all(sample.peak_bytes and sample.rss_bytes for sample in timeline)
    assert not [note for note in timeline.notes if "damaged" in note] or not text.endswith("\n")


def test_without_allocator_statistics_the_host_is_logged(run_python, tmp_path):
    environ = {"TF_CPU_ALLOCATOR_USE_BFC": "false", "TF_ENABLE_ONEDNN_OPTS": "0"}
    rows, notes, keys, run_peak = result(run_python("-c", PRELUDE + NOTHING_TO_TELL, **environ))
    assert len(rows) == 3 and run_peak is None
    timeline = read_timeline(tmp_path / "log.csv")
    assert [list(sample) for sample in timeline] == rows
    assert all(sample.peak_bytes is None and sample.rss_bytes > 0 for sample in timeline)
    assert keys == ["loss", "memory_rss_bytes", "memory_swap_bytes", "memory_tree_bytes"]
    assert any("TF_CPU_ALLOCATOR_USE_BFC=true" in note for note in notes)
