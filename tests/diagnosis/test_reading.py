"""Logs of any size and kind are read in a stream: numbers of lines, encodings, bounded memory and time."""

from __future__ import annotations

import gzip
import io
import random
import resource

import pytest
from corpus import NEGATIVE, POSITIVE

import kerasmem
from kerasmem.diagnosis.explaining import explain_stream
from kerasmem.diagnosis.log_messages import NEEDLES, all_messages
from kerasmem.errors import InputError

M = 2**20
PLAIN = b"2025-03-04 05:06:07 INFO Epoch 3/10 128/1563 [===>...] - ETA: 0:03:12 - loss: 0.4321 - lr=0.001 step=1234\n"
OOM = b"OOM when allocating tensor with shape[64,32,32,48] and type float on /device:GPU:0 by allocator GPU_0_bfc"


class Parts(io.RawIOBase):
    """A log of any length that takes no memory."""

    def __init__(self, *parts):
        self.parts = (data for times, data in parts for _ in range(times))
        self.rest = memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        self.rest = self.rest or memoryview(next(self.parts, b""))
        part, self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def stream_of(*parts):
    return io.BufferedReader(Parts(*parts), M)


def megabyte(line=PLAIN):
    return line * (M // len(line))


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("size", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_large_log_is_read_in_a_stream(size):
    block = megabyte()
    explain_stream(stream_of((2, block)))
    before = peak()
    found = explain_stream(stream_of((size // 2, block), (1, OOM + b"\n"), (size - size // 2, block)))
    assert found.out_of_memory and found.lines[0] == size // 2 * block.count(b"\n") + 1
    assert peak() - before < 50 * M


@pytest.mark.parametrize("size", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["no line end", "zeros", "garbage", "carriage returns"])
def test_a_log_without_lines_takes_no_more_memory(kind, size):
    block = {
        "no line end": b"loss 0.25 " * (M // 10),
        "zeros": bytes(M),
        "garbage": random.Random(4).randbytes(M),
        "carriage returns": megabyte(PLAIN[:-1] + b"\r"),
    }[kind]
    before = peak()
    found = explain_stream(stream_of((size, block), (1, b" " + OOM + b" "), (3, block)))
    assert found.tensor_shape == (64, 32, 32, 48)
    assert peak() - before < 50 * M


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_encodings(encoding):
    text = "Überblick: épocha 3\n" * 30 + OOM.decode() + "\n"
    assert kerasmem.explain_oom(text.encode(encoding)).lines == (31, 31)


def test_escaped_line_ends_and_terminal_codes():
    text = "Unable to allocate 2.00 GiB for an array with shape (2, 268435456) and data type float32"
    message = r'{"log": "Traceback\nMemoryError: ' + text + r'\n"}'
    assert kerasmem.explain_oom(message).requested_bytes == 2**31
    coloured = "\x1b[31mOOM when \x1b[0mallocating tensor with shape[\x1b[1m4,4\x1b[0m] and type float"
    assert kerasmem.explain_oom(coloured).tensor_shape == (4, 4)


@pytest.mark.parametrize(
    "data", [gzip.compress(OOM), b"\x28\xb5\x2f\xfdxxxx", b"BZh91AY", b"\xfd7zXZ\0", b"PK\x03\x04"]
)
def test_compressed_logs_are_refused_with_the_way_out(data):
    with pytest.raises(InputError, match=r"is compressed .* unpack it first"):
        kerasmem.explain_oom(data)


def test_every_needle_of_a_failure_is_found_by_the_search():
    """The whole log is searched for a few needles only."""
    for name, text, _ in POSITIVE:
        assert any(needle in text.encode() for needle in NEEDLES), name
    assert all(each.needles and all(each.needles) for each in all_messages())


@pytest.mark.parametrize("lines", [0, 1500])
def test_the_first_failure_is_the_cause(lines):
    first = (
        "numpy.MemoryError: Unable to allocate 1.00 GiB for an array with shape (128, 1048576) and data type float64"
    )
    texts = [first, *(f"RuntimeError: CUDA out of memory. Tried to allocate {n}.00 GiB" for n in range(2, 9))]
    found = kerasmem.explain_oom(("\n" + "Epoch 1/3 - loss: 0.5\n" * lines).join(texts))
    assert (found.evidence, found.family, found.lines) == (first, "host", (1, 1))


def test_a_death_after_a_failure_is_its_consequence():
    found = kerasmem.explain_oom(OOM.decode() + "\nKilled\nworker exited with code 137\n")
    assert found.family == "tensorflow"


HOSTILE = [
    "Killed process 1 (" + "(" * 50_000,
    "Allocator (" + "a" * 100_000 + ") ran out of memory",
    "OOM when allocating tensor with shape[" + "1," * 50_000 + "]",
    "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; " + "1.00 GiB free; " * 20_000,
    "exit " * 30_000 + "137",
    "Out of memory: Killed process 1 (" + ") total-vm:1kB, anon-rss" * 10_000,
    "[[{{node " + "a/" * 60_000 + "}}]] OOM",
    "MemoryError" * 20_000,
    "\x1b[" * 50_000 + "memory",
    "2025-03-04 05:06:07 " * 10_000 + "memory",
    "OOM when allocating tensor with shape[" + "9" * 5000 + "] and type float",
    "Unable to allocate "
    + "9" * 400
    + " GiB for an array with shape ("
    + "9" * 18
    + ", "
    + "9" * 18
    + ") and data type float64",
    "Error allocating "
    + "9" * 19
    + " bytes of device memory (out of memory). Driver report 1 bytes free and 0 bytes total",
    "memory " * 150_000,
    "OOM" + "\r" * 200_000,
    "MemoryError\n" * 50_000,
    " " * 200_000 + "MemoryError",
    "oom-kill:constraint=CONSTRAINT_MEMCG\n" * 20_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_read_and_cut(text):
    found = kerasmem.explain_oom(text)
    assert len(found.evidence or "") <= 400 and len(found.operation or "") <= 400
    found.to_dict()


def test_mutated_texts_never_raise():
    rnd = random.Random(20250304)
    texts = [text.encode() for _, text, *_ in (*POSITIVE, *NEGATIVE)]
    for _ in range(1000):
        data = bytearray(rnd.choice(texts))
        for _ in range(rnd.randrange(1, 6)):
            place, kind = rnd.randrange(len(data) + 1), rnd.randrange(5)
            if kind == 0:
                data[place : place + rnd.randrange(20)] = b""
            elif kind == 1:
                data[place:place] = rnd.randbytes(rnd.randrange(8))
            elif kind == 2:
                data[place:place] = rnd.choice(texts)[: rnd.randrange(200)]
            elif kind == 3:
                data[place:place] = rnd.choice([b"9" * 30, b"-1", b"\n", b"\r", b"\0", b"1e99", b"[", b"(", b"nan"])
            elif data:
                data[place % len(data)] = rnd.randrange(256)
        found = kerasmem.explain_oom(bytes(data))
        data_out = found.to_dict()
        sizes = [value for key, value in data_out.items() if key.endswith("_bytes") and value is not None]
        assert all(0 <= value <= 2**63 for value in sizes), data
        assert found.cause in (None, "capacity", "fragmentation", "other process", "unknown")
