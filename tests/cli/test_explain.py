"""`kerasmem explain`."""

from __future__ import annotations

import gzip
import io
import json
import sys

import pytest

OOM = "OOM when allocating tensor with shape[48,64,64,96] and type float on /device:GPU:1 by allocator GPU_1_bfc\n"
OOM += "\t [[{{node net_1/wide_1/Relu}}]]\n"


@pytest.fixture
def log(tmp_path):
    def write(text, name="train.log"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return write


def test_it_says_what_where_and_what_to_do(cli, log):
    done = cli("explain", log("Epoch 1\n" + OOM))
    assert (done.code, done.err) == (0, "")
    first, *rest = done.out.splitlines()
    assert first == "GPU:1 ran out of memory while computing wide: 72.0 MiB was requested."
    text = "\n".join(rest)
    assert "48×64×64×96 float" in text and "wide (forward pass)" in text and "lines 2–3" in text
    assert "model.fit(x, y, batch_size=16)" in text and not any(line != line.rstrip() for line in rest)


def test_json(cli, log):
    done = cli("explain", log(OOM), "--json")
    data = json.loads(done.out)
    assert (data["out_of_memory"], data["family"], data["lines"]) == (True, "tensorflow", [1, 2])
    assert set(data) >= {
        "format_version", "out_of_memory", "family", "requested_bytes", "free_bytes", "limit_bytes", "in_use_bytes",
        "reserved_bytes", "device", "tensor_shape", "layer", "pass", "cause", "suggestions", "lines",
    }  # fmt: skip
    assert set(data["suggestions"][0]) == {"what", "why", "code"}


@pytest.mark.parametrize("text", ["", "Epoch 1\n", "No space left on device\n", b"\x00\xff\x89PNG" * 9])
def test_what_is_not_out_of_memory_is_no_error(cli, log, text):
    done = cli("explain", log(text))
    assert done.code == 0 and done.err == "" and "ran out of memory" not in done.out.replace("that memory ran out", "")


def test_standard_input(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.encode())))
    assert "GPU:1 ran out of memory" in cli("explain", "-").out


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda log, folder: folder / "none.log", "cannot be read"),
        (lambda log, folder: folder, "directory"),
        (lambda log, folder: log(gzip.compress(OOM.encode()), "train.log.gz"), "unpack it first"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(cli, log, tmp_path, make, told):
    done = cli("explain", make(log, tmp_path))
    assert done.code == 2 and told in done.err and done.err.count("\n") == 1 and "Traceback" not in done.err
    assert done.out == ""


def test_a_log_cannot_steer_the_terminal(cli, log):
    done = cli("explain", log("Out of memory: Killed process 7 (py\x07\u202ethon) total-vm:9kB, anon-rss:8kB\n"))
    assert "The kernel killed py" in done.out and "\x07" not in done.out and "\u202e" not in done.out
    done = cli("explain", log("OOM when allocating tensor with shape[2,2] \x1b]0;title\x07\u202e [bold]x[/bold]\n"))
    assert "\x1b" not in done.out and "\u202e" not in done.out and "[bold]x[/bold]" in done.out
