"""What `scripts/fuzz` found, each made small and by code: an error that names the file, and never a defect."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from kerasmem import convert_data
from kerasmem.errors import DataError
from kerasmem.monitoring import read_timeline
from kerasmem.monitoring.log_summary import summarise


def npy(header: bytes) -> bytes:
    header = header.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


@pytest.mark.parametrize(
    "header", [b"{'descr': '<f4', (", b"(" * 117, b"'''", b"{'descr': 1/0}", b"\x00", b"{1: 2, **3}"]
)
def test_an_array_whose_header_is_no_python(tmp_path, header):
    (tmp_path / "x.npy").write_bytes(npy(header) + bytes(64))
    with pytest.raises(DataError, match=r"x\.npy.*is no \.npy file"):
        convert_data(tmp_path / "x.npy", tmp_path / "out.h5")


@pytest.mark.parametrize("field", ["run", "time", "phase"])
def test_a_log_that_does_not_know_when_a_sample_was(tmp_path, field):
    sample = {"kind": "sample", "run": 0, "time": 0.5, "phase": "train", "peak_bytes": 7}
    lines = [{"kind": "run", "format_version": 1, "run": 0, "notes": []}, sample, {**sample, field: None}, sample]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    timeline = read_timeline(tmp_path / "run.jsonl")
    assert len(timeline) == 2 and any("line 3" in note for note in timeline.notes)
    assert summarise(timeline, "run.jsonl", None, 100).runs


def test_a_record_whose_error_is_no_text(tmp_path):
    tf = pytest.importorskip("tensorflow")
    value = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0, 2.0]))
    sound = tf.train.Example(features=tf.train.Features(feature={"x": value})).SerializeToString()
    with tf.io.TFRecordWriter(str(tmp_path / "d.tfrecord")) as writer:
        writer.write(sound)
        writer.write(b"\xff\x89" + np.arange(64, dtype="u1").tobytes())
    with pytest.raises(DataError, match="records 0 to 2 cannot be read"):
        convert_data(tmp_path / "d.tfrecord", tmp_path / "out.h5")
