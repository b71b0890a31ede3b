"""The recorder with a clock and devices of the test's own: no TensorFlow, no sleeping."""

import math
import os
import threading

import pytest

from kerasmem.devices.training_devices import AllocatorReading, TrackedDevice
from kerasmem.monitoring import device_reader, logfile, read_timeline, run_log
from kerasmem.monitoring.logger import MemoryLogger
from kerasmem.monitoring.recorder import Recorder


class Clock:
    """Every reading is a second later than the one before."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Ledger:
    """An allocator whose memory the test takes and gives back."""

    device = "GPU:0"

    def __init__(self):
        self.in_use = self.peak = 0

    def take(self, size):
        self.in_use += size
        self.peak = max(self.peak, self.in_use)

    def spike(self, size):
        self.take(size)
        self.take(-size)

    def read(self):
        return AllocatorReading(self.in_use, self.peak, self.in_use + 1)

    def reset(self):
        self.peak = self.in_use


@pytest.fixture
def ledger(monkeypatch):
    ledger = Ledger()
    monkeypatch.setattr(device_reader, "tracked_devices", lambda: ([TrackedDevice("GPU:0", ledger)], ["a note"]))
    return ledger


def recorder(**changes):
    settings = {"filename": None, "nvml": False, "epoch_logs": "bytes", "sampling": 0.0}
    return Recorder(**{**settings, **changes}, clock=Clock())


def running(**changes):
    rec = recorder(**changes)
    rec.begin_run()
    return rec


def train(rec, batch):
    rec.begin_batch("train", batch)
    rec.end_batch("train", "train", batch)


def test_an_epoch_of_three_batches(ledger):
    ledger.spike(90_000)
    rec = running()
    rec.begin_epoch(0)
    for batch, size in enumerate([100, 900, 300]):
        ledger.spike(50)
        rec.begin_batch("train", batch)
        ledger.spike(size)
        ledger.take(1)
        rec.end_batch("train", "train", batch)
    ledger.spike(70_000)
    logs, line = rec.end_epoch()
    rows = [(s.batch, s.in_use_bytes, s.peak_bytes, s.between_peak_bytes, s.reserved_bytes) for s in rec.timeline]
    assert rows == [(0, 1, 100, 50, 2), (1, 2, 901, 51, 3), (2, 3, 302, 52, 4), (None, 3, 70_003, 70_003, 4)]
    assert logs["memory_peak_bytes"] == 70_003.0 and logs["memory_in_use_bytes"] == 3.0
    assert logs["memory_reserved_bytes"] == 4.0
    assert line.startswith("memory, epoch 1 (GPU:0): peak 68.4 KiB, in use up to 3 B")
    rec.end_run()
    assert rec.run_peaks == {"GPU:0": 70_003}, "the peak before the run does not count"
    assert rec.notes == ("a note",)


def test_an_evaluation_between_epochs_belongs_to_neither(ledger):
    rec = running()
    rec._write_at = math.inf
    rec.begin_epoch(0)
    rec.end_epoch()
    rec.begin_part("test", "validation")
    rec.begin_batch("test", 0)
    ledger.spike(900)
    rec.end_batch("test", "validation", 0)
    rec.begin_epoch(1)
    logs, _ = rec.end_epoch()
    assert logs["memory_peak_bytes"] == 0


def test_two_recorders_at_once_have_every_peak_each(ledger):
    ledger.spike(10_000)
    first, second = recorder(), recorder()
    rest = [
        first.begin_run, second.begin_run,
        lambda: first.begin_batch("train", 0), lambda: second.begin_batch("train", 0),
        lambda: ledger.spike(900),
        lambda: first.end_batch("train", "train", 0),
        lambda: ledger.spike(40),
        lambda: second.end_batch("train", "train", 0),
        lambda: first.begin_batch("train", 1), lambda: second.begin_batch("train", 1),
        lambda: ledger.spike(70),
        lambda: second.end_batch("train", "train", 1), lambda: first.end_batch("train", "train", 1),
    ]  # fmt: skip
    for step in rest:
        step()
    assert [(s.peak_bytes, s.between_peak_bytes) for s in first.timeline] == [(900, 0), (70, 40)]
    assert [(s.peak_bytes, s.between_peak_bytes) for s in second.timeline] == [(900, 0), (70, 0)]
    first.end_run()
    ledger.spike(5_000)
    second.end_run()
    assert first.run_peaks == {"GPU:0": 900}, "its run had ended"
    assert second.run_peaks == {"GPU:0": 5_000}


def test_threads_that_read_one_allocator_lose_no_peak(ledger):
    recorders = [running() for _ in range(4)]
    stop = threading.Event()

    def read(rec):
        batch = 0
        while not stop.is_set():
            train(rec, batch)
            batch += 1

    threads = [threading.Thread(target=read, args=(rec,)) for rec in recorders[1:]]
    for thread in threads:
        thread.start()
    for size in range(1, 200):
        with device_reader._lock:  # the fake's own take and reset are not atomic
            ledger.spike(size)
    stop.set()
    for thread in threads:
        thread.join()
    for rec in recorders:
        rec.end_run()
    assert [rec.run_peaks for rec in recorders] == [{"GPU:0": 199}] * 4


def test_a_note_on_a_full_disk_ends_the_writing_alone(ledger, monkeypatch, tmp_path):
    rec = running(filename=tmp_path / "log.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, rec.log._file._file)
    os.close(full)
    with pytest.warns(UserWarning, match="writing to .* stopped: No space left"):
        rec.log.add_note("something turned out")
    train(rec, 0)
    assert len(rec.timeline) == 1 and rec.log.run == 0


@pytest.mark.parametrize(("update_freq", "sampled"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (10, [0])])
def test_every_nth_batch_of_each_part(ledger, update_freq, sampled):
    rec = running(update_freq=update_freq)
    for epoch in (0, 1):
        rec.begin_epoch(epoch)
        for batch in range(7):
            train(rec, batch)
        rec.begin_part("test", "validation")
        for batch in range(7):
            rec.begin_batch("test", batch)
            rec.end_batch("test", "validation", batch)
        rec.end_epoch()
    for phase in ("train", "validation"):
        found = [s.batch for s in rec.timeline if s.phase == phase and s.epoch == 1]
        assert found == sampled
    assert rec.overhead.batches == 28


def test_what_fails_after_the_start_is_nan_in_the_logs(ledger, monkeypatch):
    rec = running()
    rec.begin_epoch(0)
    monkeypatch.setattr(ledger, "read", lambda: 1 / 0)
    train(rec, 0)
    logs, line = rec.end_epoch()
    assert math.isnan(logs["memory_peak_bytes"]) and logs["memory_rss_bytes"] > 0
    assert "peak" not in line
    assert rec.notes[-1] == "allocator: GPU:0 could no longer be read: division by zero"


def test_an_allocator_that_cannot_be_reset_has_unknown_peaks(ledger, monkeypatch):
    def refuse():
        raise ValueError("Cannot reset memory stats for device 'GPU:0'")

    monkeypatch.setattr(ledger, "reset", refuse)
    ledger.spike(100)
    rec = running()
    for batch, size in enumerate([50, 200, 150, 300]):
        rec.begin_batch("train", batch)
        ledger.spike(size)
        rec.end_batch("train", "train", batch)
    assert [(s.in_use_bytes, s.peak_bytes) for s in rec.timeline] == [(0, None)] * 4
    rec.end_run()
    assert rec.run_peaks == {}
    assert [note for note in rec.notes if "Cannot reset" in note] and len(rec.notes) == 2


def test_a_broken_recorder_gets_a_new_chance_with_the_next_run(ledger):
    rec = running()
    rec._waiting = None
    rec.begin_batch("train", 0)
    with pytest.warns(UserWarning, match="unexpected AttributeError"):
        rec.end_batch("train", "train", 0)
    assert rec.log.run is None
    rec.begin_epoch(0)
    assert rec.end_epoch() is None
    rec.begin_run()
    train(rec, 0)
    assert len(rec.timeline) == 1 and rec.log.run == 1


def test_validation_after_a_failure_of_the_recording_starts_no_run(ledger, recwarn):
    logger = MemoryLogger(memory_growth=False, sampling=0)
    logger.on_train_begin()
    logger._recorder._waiting = None
    logger.on_train_batch_begin(0)
    logger.on_train_batch_end(0)
    logger.on_test_begin()
    logger.on_test_end()
    logger.on_train_end()
    assert logger._recorder.log._next_run == 1 and len(recwarn) == 1


def test_a_forked_process_leaves_the_parents_batches_alone(ledger, tmp_path):
    rec = running(filename=tmp_path / "log.csv")
    rec._write_at = math.inf
    train(rec, 0)
    child = os.fork()
    if child == 0:
        logfile._before_exit()
        os._exit((tmp_path / "log.csv").read_text().count("\n") - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rec.write_quietly()
    assert len(read_timeline(tmp_path / "log.csv")) == 1


def test_a_logger_deleted_in_a_forked_process_writes_nothing(ledger, tmp_path):
    logger = MemoryLogger(tmp_path / "log.csv", memory_growth=False, sampling=0)
    logger.on_train_begin()
    logger._recorder._write_at = math.inf
    logger.on_train_batch_begin(0)
    logger.on_train_batch_end(0)
    child = os.fork()
    if child == 0:
        del logger
        os._exit((tmp_path / "log.csv").read_text().count("\n") - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    logger.close()
    assert len(read_timeline(tmp_path / "log.csv")) == 1


def test_the_oldest_samples_are_dropped_beyond_the_limit(ledger, monkeypatch):
    monkeypatch.setattr(run_log, "_MOST_BYTES", 20_000)
    rec = running()
    for batch in range(1000):
        train(rec, batch)
    batches = [s.batch for s in rec.timeline]
    assert batches == list(range(1000 - len(batches), 1000)) and 50 < len(batches) < 170
