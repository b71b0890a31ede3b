"""From bytes of any length to the few lines that are worth reading, with their numbers, in bounded memory.

Plain lines cost a search for a dozen pieces of text in each block; only what stands around a find is cut into lines.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import BinaryIO

from kerasmem.errors import InputError

# Every line that says that memory ran out, and every death that may mean it, holds one of these.
NEEDLES = (
    b"emory", b"lloc", b"OOM", b"oom", b"OUT_OF", b"nitialized", b"illed", b"137", b"SIGKILL", b"_FAILED", b"Hbm usage",
)  # fmt: skip
BLOCK = 2**20
TAIL = 2**18  # of the end, read line by line: there stands what ended the run
_BEFORE, _AFTER = 100, 60  # lines around a find; a traceback with the node's name comes before
_LONG = 2**14  # a longer line is read around its finds only
_OVERLAP = 2**12
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -c"), b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"), b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ": ("xz", "xz -dc"), b"PK\x03\x04": ("zip", "unzip -p"),
}  # fmt: skip
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_])")
_PREFIX = re.compile(
    r"\s*(?:"
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?:?\s"  # date and time
    r"|\[\s*\d{1,10}\.\d{1,9}\]\s"  # the kernel's clock
    r"|\[?(?:rank|default|worker)\s?\d{1,6}\]?:\s"
    r"|\[\d{1,6},\d{1,6}\]<std(?:err|out)>:"
    r"|\((?:[\w:. ]{1,60} )?pid=\d{1,12}[^)]{0,60}\)\s"
    r"|\[pod/[^\]]{1,200}\]\s|std(?:err|out) [FP]\s"
    r"|[\w.-]{1,60}\s{1,4}\|\s"
    r"|[IWEF]\d{4} [\d:.]{5,30}\s{1,8}\d{1,10} [\w./-]{1,120}:\d{1,6}\]\s?"
    r"|[IWEF] [\w./\\-]{1,160}:\d{1,6}\]\s?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,80} kernel:\s"
    r")"
)


def interesting_lines(
    stream: BinaryIO, *, name: str = "the log", wanted: re.Pattern[bytes] | None = None
) -> Iterator[tuple[int, str]]:
    """Return the lines around everything that may matter, and those at the end, each once and in order.

    Args:
        stream: opened for reading bytes.
        name: of it, for messages.
        wanted: only lines in which this is found; cheaper here than with the text.

    Yields:
        The line's number, from 1, and its text without terminal codes and the prefixes that loggers add. What a
        progress bar wrote over counts as one line.

    Raises:
        InputError: the bytes are compressed.
    """
    numbered = _Lines(wanted)
    for block in _blocks(stream, name):
        yield from numbered.take(block)
    yield from numbered.end()


def _blocks(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Return the bytes as UTF-8 or whatever they are, UTF-16 converted."""
    first = stream.read(BLOCK)
    for magic, (kind, command) in _PACKED.items():
        if first.startswith(magic):
            raise InputError(f"{name}: is compressed ({kind}); unpack it first: {command} FILE | kerasmem explain -")
    encoding = _wide(first)
    decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
    block = first
    while block:
        yield decoder.decode(block).encode("utf-8", "replace") if decoder else block
        block = stream.read(BLOCK)


def _wide(first: bytes) -> str | None:
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    head = first[:4096]
    if len(head) >= 64:  # without a mark: every second byte of plain text is zero
        odd, even = head[1::2].count(0), head[::2].count(0)
        if odd > 0.4 * len(head) and even < 0.05 * len(head):
            return "utf-16-le"
        if even > 0.4 * len(head) and odd < 0.05 * len(head):
            return "utf-16-be"
    return None


class _Lines:
    """Cuts blocks at line ends and picks the lines to read.

    `rest` begins `number` and has no end yet; `shown` is the last line that was yielded; `tail` holds what came last.
    """

    def __init__(self, wanted: re.Pattern[bytes] | None = None) -> None:
        self.search = (wanted or re.compile(b"")).search
        self.number = 1
        self.rest = b""
        self.before = b""  # the lines just before `rest`, for context
        self.hot = 0  # lines still to read after the last find
        self.shown = 0
        self.tail: list[tuple[int, bytes]] = []
        self.tail_bytes = 0

    def take(self, block: bytes) -> Iterator[tuple[int, str]]:
        data = self.rest + block
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) < BLOCK:
            self.rest = data
            return
        if end == 0:  # a line without end: read what there is of it, keep what a find may need
            yield from self._piece(data)
            self.rest = data[-_OVERLAP:]
            return
        self.rest = data[end:]
        if len(self.rest) > BLOCK:
            yield from self._piece(self.rest)
            self.rest = self.rest[-_OVERLAP:]
        yield from self._region(data[:end])

    def end(self) -> Iterator[tuple[int, str]]:
        if self.rest:
            yield from self._region(self.rest)
        for first, region in self.tail:
            if len(self.tail) == 1 and len(region) > TAIL:
                cut = region.find(b"\n", len(region) - TAIL) + 1
                first, region = first + region.count(b"\n", 0, cut), region[cut:]
            for offset, line in enumerate(region.split(b"\n")):
                if first + offset > self.shown and self.search(line, 0, _LONG):
                    for text in _texts(line[:_LONG]):
                        yield first + offset, text

    def _piece(self, data: bytes) -> Iterator[tuple[int, str]]:
        for place in _finds(data)[:50]:
            for text in _texts(data[max(0, place - 2048) : place + 6144]):
                yield self.number, text

    def _region(self, region: bytes) -> Iterator[tuple[int, str]]:
        """Read a stretch of whole lines."""
        self.tail.append((self.number, region))
        self.tail_bytes += len(region)
        while len(self.tail) > 1 and self.tail_bytes - len(self.tail[0][1]) >= TAIL:
            self.tail_bytes -= len(self.tail.pop(0)[1])
        count = region.count(b"\n")
        finds = _finds(region)
        if finds or self.hot:
            before = self.before.count(b"\n")
            yield from self._around(self.before + region, self.number - before, [f + len(self.before) for f in finds])
        self.number += count
        cut = len(region)
        for _ in range(_BEFORE + 1):
            cut = region.rfind(b"\n", max(0, len(region) - 2 * _LONG), cut)
            if cut < 0:
                break
        whole = len(region) <= 2 * _LONG
        self.before = region[cut + 1 :] if cut >= 0 else region if whole else region[-_LONG:].partition(b"\n")[2]

    def _around(self, data: bytes, first: int, finds: list[int]) -> Iterator[tuple[int, str]]:
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
        wanted = bytearray(len(lines))
        carried = max(0, self.number - first)  # lines of the block before
        wanted[carried : carried + self.hot] = b"\1" * min(self.hot, max(0, len(lines) - carried))
        hot, at, marked = self.hot - (len(lines) - carried), 0, 0
        found: dict[int, int] = {}
        for place in finds:
            while at + 1 < len(starts) and starts[at + 1] <= place:
                at += 1
            low, high = max(marked, at - _BEFORE), min(len(lines), at + _AFTER)
            if high > low:
                wanted[low:high], marked = b"\1" * (high - low), high
            found.setdefault(at, place - starts[at])
            hot = at + _AFTER - len(lines)
        self.hot = max(0, hot)
        for index, line in enumerate(lines):
            if wanted[index] and first + index > self.shown:
                self.shown = first + index
                if len(line) > _LONG:
                    places = _finds(line)[:20] if index in found else []
                    pieces = [line[max(0, place - 2048) : place + 6144] for place in places] or [line[:_LONG]]
                else:
                    pieces = [line]
                for piece in filter(self.search, pieces):
                    for text in _texts(piece):
                        yield first + index, text


def _finds(data: bytes) -> list[int]:
    """Return the places of the needles, one for each stretch of 2 KiB at most."""
    places = set()
    for needle in NEEDLES:
        place = data.find(needle)
        while place >= 0:
            places.add(place)
            end = data.find(b"\n", place, place + 2048)  # the rest of the line is read anyway
            place = data.find(needle, end + 1 if end >= 0 else place + 2048)
    return sorted(places)


def _texts(line: bytes) -> Iterator[str]:
    """Return the readable parts of a line: what a carriage return or an escaped line end divides."""
    text = line.decode("utf-8", "replace").replace("\0", "")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    for part in text.replace("\\r", "\r").replace("\\n", "\r").split("\r"):
        if part.strip():
            yield without_prefix(part.rstrip())


def without_prefix(text: str) -> str:
    """Return a line without the date, rank, pod or source that a logger put before it.

    Example:
        >>> without_prefix("2024-05-06 07:08:09.123456: W tensorflow/core/bfc.cc:12] Limit: 4")
        'Limit: 4'
    """
    for _ in range(4):
        found = _PREFIX.match(text)
        if not found:
            break
        text = text[found.end() :]
    return text
