"""Reads the relevant lines of a log, in bounded memory, and matches them against `data/messages.json`.

A message has these fields. The first message that matches a line wins.

========= ==========================================================================================================
needles   pieces of text; every such line contains at least one. They are searched first, because that is fast
pattern   a regular expression without unbounded backtracking, searched in the line. `<limit_bytes:size>` is a group for
          a fact: `size` ("1.5GiB"), `count` (bytes without a unit), `kilobytes` (without a unit) or `shape`
          ("64,112,112,64"). Any other `(?P<name>…)` is text; a `place`, an `allocator` or the number of a `gpu` gives
          the device. `<start>` is the start of a message.
kind      "failure" (memory ran out), "weak" (a kill, most likely because memory ran out), "detail" (of a failure
          nearby), "ahead" (of a failure that follows), "cancel" (revokes the previous failure) or "other" (another
          error)
family    as in `Diagnosis.family`
what      identifier within the family, which selects the sentence and the suggestions
facts     constant facts of such lines: fields of a `Diagnosis` in bytes and counts, "processes", "pool", "free_piece",
          "note"
sentences name of a list of patterns, which are searched in the match of `pattern`
========= ==========================================================================================================
"""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from kerasmem.errors import InputError
from kerasmem.files import package_data

MOST = 2**62  # larger sizes, dimensions and counts are ignored
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
START = r"(?:^|[\])|:F] )"  # of a message, also after the date, rank, pod or source of a logger
_FORM = re.compile(r"<(\w+):(size|count|kilobytes|shape)>")
_GROUPS = {
    "size": r"(?P<{0}__size>\d{{1,20}}(?:,\d{{3}}){{0,6}}(?:\.\d{{0,6}})?) ?(?P<{0}__unit>[kKMGTP]?i?[bB]?(?:ytes)?)\b",
    "count": r"(?P<{0}__count>\d{{1,20}})",
    "kilobytes": r"(?P<{0}__kilobytes>\d{{1,18}})",
    "shape": r"(?P<{0}__shape>[\d, ]{{1,200}})",
}


@dataclass(frozen=True)
class Message:
    """A known message. The docstring of the module has its fields."""

    needles: tuple[str, ...]
    pattern: str
    kind: str
    family: str
    what: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()

    def read(self, line: str) -> dict[str, Any] | None:
        """Read the facts in a line with one of the needles. Return None if the line does not match."""
        match = _compile(self.pattern).search(line)
        if match is None:
            return None
        facts = {**self.facts, **_named_facts(match)}
        for sentence in self.sentences:
            sentence_facts = [_named_facts(part) for part in _compile(sentence).finditer(line, *match.span())]
            if sentence_facts and "processes" in sentence_facts[0]:  # the processes on the card
                facts["processes"] = [process["processes"] or 0 for process in sentence_facts]
            elif sentence_facts:
                facts |= sentence_facts[0]
        if self.sentences and not facts:
            return None
        return _with_device(facts)


def read_data(name: str) -> dict[str, Any]:
    """Load a data file of this package: "messages", "scopes" or "texts"."""
    return package_data(__package__, name)


@functools.cache
def all_messages() -> tuple[Message, ...]:
    """Return the messages in matching order."""
    messages = []
    for row in (row for section in read_data("messages")["sections"] for row in section["messages"]):
        sentences = read_data("messages")["sentences"][row["sentences"]] if "sentences" in row else ()
        messages.append(Message(**{**row, "sentences": tuple(sentences)}))
    return tuple(messages)


@functools.cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(_FORM.sub(lambda mark: _GROUPS[mark[2]].format(mark[1]), pattern.replace("<start>", START)))


def _named_facts(match: re.Match[str]) -> dict[str, Any]:
    """Return the named groups of a match as facts, without missing ones."""
    facts: dict[str, Any] = {}
    for group, text in match.groupdict().items():
        name, _, form = group.partition("__")
        if text is None or form == "unit":
            continue
        if form == "shape":
            facts[name] = _shape(text)
        elif form:
            unit = {"size": match.groupdict().get(f"{name}__unit"), "count": "", "kilobytes": "k"}[form]
            facts[name] = _size(text, unit or "")
        else:
            facts[name] = text
    return facts


def _with_device(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with a device such as "GPU:0"."""
    named = [name for key in ("place", "allocator") if (name := _device_name(facts.get(key, "")))]
    if "gpu" in facts:
        named = [f"GPU:{int(facts['gpu'])}"]
    return {**facts, "device": named[0]} if named else facts


def _device_name(text: str) -> str | None:
    """Return "GPU:0" for "/job:localhost/replica:0/task:0/device:GPU:0" or "GPU_0_bfc", or None."""
    match = re.search(r"(?:^|[/:_(])(cpu|gpu|tpu)[:_](\d{1,4})(?!\d)", text, re.IGNORECASE)
    if match:
        return f"{match[1].upper()}:{int(match[2])}"
    return "CPU:0" if "cpu" in text.lower() else None


def _size(number: str, unit: str) -> int | None:
    """Return bytes for a number and a unit (powers of 1024), or None if unreasonable."""
    factor = _UNITS.get(unit.lower().removesuffix("ytes").removesuffix("b").removesuffix("i"), 1)
    number = number.replace(",", "")
    value = int(number) * factor if number.isdigit() else round(float(number) * factor)
    return value if value <= MOST else None


def _shape(text: str) -> tuple[int, ...] | None:
    """Parse a shape of at most 16 sizes, such as "64,112,112,64", or return None."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or len(parts) > 16 or not all(part.isdecimal() and len(part) < 19 for part in parts):
        return None
    return tuple(int(part) for part in parts)


def tensor_bytes(sizes: tuple[int, ...] | None, dtype: str | None) -> int | None:
    """Return the bytes of a tensor, or None if the type is unknown or the size unreasonable."""
    name = (dtype or "").lower().removesuffix("_ref")
    width = next((int(width) for width, names in read_data("messages")["widths"].items() if name in names), None)
    if sizes is None or width is None:
        return None
    total = math.prod(sizes) * width
    return total if total <= MOST else None


# Every out-of-memory message, and every kill that may be due to memory, contains at least one.
NEEDLES = (
    b"emory", b"lloc", b"OOM", b"oom", b"OUT_OF", b"nitialized", b"illed", b"137", b"SIGKILL", b"_FAILED", b"Hbm usage",
    b"Exhausted", b"EXHAUSTED",
)  # fmt: skip
_NEEDLE = re.compile(b"|".join(NEEDLES))
_BEFORE, _AFTER = 100, 60  # lines around a match; a traceback with the node's name precedes it
_LONG, _OVERLAP = 2**14, 2**12  # a longer line is read in overlapping parts
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -c"), b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"), b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ": ("xz", "xz -dc"), b"PK\x03\x04": ("zip", "unzip -p"),
}  # fmt: skip
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_])")


def interesting_lines(
    stream: BinaryIO, *, name: str = "the log", wanted: re.Pattern[bytes] | None = None
) -> Iterator[tuple[int, str]]:
    """Yield the lines around possible messages, and the last lines, in order.

    A line costs one search for a dozen pieces of text. Only lines around a match are decoded.

    Args:
        stream: binary stream.
        name: name of the stream, for errors.
        wanted: pattern of the lines to yield, or None for all.

    Yields:
        Number of the line, from 1, and its text without terminal codes. All states of a progress bar are one line.

    Raises:
        InputError: If the bytes are compressed.
    """
    before: deque[tuple[int, bytes]] = deque(maxlen=_BEFORE)  # and the last lines, with the end of the run
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
    """Yield the lines with their numbers. A very long line has several parts.

    NULs are removed, so most UTF-16 text becomes ASCII.
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
