"""From bytes of any length to the few lines that are worth reading, with their numbers, in bounded memory.

A line costs one search for a dozen pieces of text; only lines around a find are decoded.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

from kerasmem.errors import InputError

# Every line that says that memory ran out, and every death that may mean it, holds one of these.
NEEDLES = (
    b"emory", b"lloc", b"OOM", b"oom", b"OUT_OF", b"nitialized", b"illed", b"137", b"SIGKILL", b"_FAILED", b"Hbm usage",
    b"Exhausted", b"EXHAUSTED",
)  # fmt: skip
_NEEDLE = re.compile(b"|".join(NEEDLES))
_BEFORE, _AFTER = 100, 60  # lines around a find; a traceback with the node's name comes before
_LONG, _OVERLAP = 2**14, 2**12  # a longer line is read in parts that overlap
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -c"), b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"), b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ": ("xz", "xz -dc"), b"PK\x03\x04": ("zip", "unzip -p"),
}  # fmt: skip
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_])")


def interesting_lines(
    stream: BinaryIO, *, name: str = "the log", wanted: re.Pattern[bytes] | None = None
) -> Iterator[tuple[int, str]]:
    """Return the lines around everything that may matter, and the last ones, in order.

    Args:
        stream: opened for reading bytes.
        name: of it, for messages.
        wanted: only lines that match; cheaper here than with the text.

    Yields:
        The line's number, from 1, and its text without terminal codes. What a progress bar wrote over
        counts as one line.

    Raises:
        InputError: If the bytes are compressed.
    """
    before: deque[tuple[int, bytes]] = deque(maxlen=_BEFORE)  # also the last lines, which tell what ended the run
    after = 0
    for number, line in _lines(stream, name):
        before.append((number, line))
        if _NEEDLE.search(line):
            after = _AFTER
        if after:
            yield from _texts(before, wanted)
            before.clear()
            after -= 1
    yield from _texts(before, wanted)


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Return the lines with their numbers; a very long line comes in several parts.

    Zeros are left out, so that most text in UTF-16 reads as ASCII.
    """
    number, rest = 1, b""
    while part := stream.readline(_LONG):
        if number == 1 and not rest:
            _refuse_packed(part, name)
        line = rest + part.replace(b"\0", b"")
        yield number, line
        is_whole = part.endswith(b"\n")
        rest = b"" if is_whole else line[-_OVERLAP:]
        number += is_whole


def _refuse_packed(start: bytes, name: str) -> None:
    for magic, (kind, command) in _PACKED.items():
        if start.startswith(magic):
            raise InputError(f"{name}: is compressed ({kind}); unpack it first: {command} FILE | kerasmem explain -")


def _texts(lines: deque[tuple[int, bytes]], wanted: re.Pattern[bytes] | None) -> Iterator[tuple[int, str]]:
    """Decode matching lines, and split them at carriage returns and escaped line ends."""
    for number, line in lines:
        if wanted is not None and not wanted.search(line):
            continue
        text = line.decode("utf-8", "replace")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        for part in text.replace("\\r", "\r").replace("\\n", "\r").split("\r"):
            if part.strip():
                yield number, part.rstrip()
