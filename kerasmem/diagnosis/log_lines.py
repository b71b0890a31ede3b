"""From bytes of any length to the few lines that are worth reading, with their numbers, in bounded memory.

Plain lines cost a search for a dozen pieces of text in each block; only what stands around a find is cut into lines.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from kerasmem.errors import InputError

# Every line that says that memory ran out, and every death that may mean it, holds one of these.
NEEDLES = (
    b"emory", b"lloc", b"OOM", b"oom", b"OUT_OF", b"nitialized", b"illed", b"137", b"SIGKILL", b"_FAILED", b"Hbm usage",
    b"Exhausted", b"EXHAUSTED",
)  # fmt: skip
_NEEDLE = re.compile(b"|".join(NEEDLES))
BLOCK = 2**20
TAIL = 2**18  # of the end, read line by line: there stands what ended the run
_BEFORE, _AFTER = 100, 60  # lines around a find; a traceback with the node's name comes before
_LONG = 2**14  # a longer line is read around its finds only
_PIECES = 50  # of it, at most
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
    search = (wanted or re.compile(b"")).search
    before: deque[tuple[int, bytes]] = deque(maxlen=_BEFORE)  # the lines before a find, should one come
    tail: deque[tuple[int, bytes]] = deque()
    after = shown = 0  # lines to read after the last find, and the last line that was read
    for number, region in _regions(_blocks(stream, name)):
        tail.append((number, region))
        while sum(len(each) for _, each in tail) - len(tail[0][1]) >= TAIL:
            tail.popleft()
        if not after and not any(needle in region for needle in NEEDLES):
            before.extend((place, line[:_LONG]) for place, line in _numbered(number, region, _BEFORE))
            continue
        for place, line in _numbered(number, region):
            if _NEEDLE.search(line):
                yield from _read(before, search)
                before.clear()
                after = _AFTER
            if after:
                yield from _read([(place, line)], search)
                after, shown = after - 1, place
            else:
                before.append((place, line[:_LONG]))
    for number, region in tail:
        last = region if len(tail) > 1 else region[-TAIL:].partition(b"\n")[2] if len(region) > TAIL else region
        first = number + region.count(b"\n") - last.count(b"\n")
        yield from _read(((place, line[:_LONG]) for place, line in _numbered(first, last) if place > shown), search)


def _blocks(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Return the bytes as UTF-8 or whatever they are, UTF-16 converted."""
    first = stream.read(BLOCK)
    for magic, (kind, command) in _PACKED.items():
        if first.startswith(magic):
            raise InputError(f"{name}: is compressed ({kind}); unpack it first: {command} FILE | kerasmem explain -")
    is_wide = first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    decoder = codecs.getincrementaldecoder("utf-16")("replace") if is_wide else None
    block = first
    while block:
        yield decoder.decode(block).encode("utf-8", "replace") if decoder else block
        block = stream.read(BLOCK)


def _regions(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Cut blocks at line ends; return lines, with the number of the first. A very long line comes in several parts."""
    number, rest = 1, b""
    for block in blocks:
        rest += block
        end = rest.rfind(b"\n") + 1
        if end:
            yield number, rest[:end]
            number += rest.count(b"\n", 0, end)
            rest = rest[end:]
        if len(rest) >= BLOCK:
            yield number, rest
            rest = rest[-_OVERLAP:]
    if rest:
        yield number, rest


def _numbered(number: int, region: bytes, last: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Return the lines of a region, or the last of them, with their numbers."""
    region = region.removesuffix(b"\n")
    lines = region.split(b"\n") if last is None else region.rsplit(b"\n", last)[-last:]
    return enumerate(lines, number + region.count(b"\n") + 1 - len(lines))


def _read(lines: Iterable[tuple[int, bytes]], search: Callable[[bytes], object]) -> Iterator[tuple[int, str]]:
    """Return the readable parts of matching lines; of a very long line the parts around its matches."""
    for number, line in lines:
        pieces = [line]
        if len(line) > _LONG:
            places = list(dict.fromkeys(found.start() // 2048 * 2048 for found in _NEEDLE.finditer(line)))[:_PIECES]
            pieces = [line[max(0, place - 2048) : place + 8192] for place in places] or [line[:_LONG]]
        for piece in filter(search, pieces):
            for text in _texts(piece):
                yield number, text


def _texts(line: bytes) -> Iterator[str]:
    """Split a line at carriage returns and escaped line ends."""
    text = line.decode("utf-8", "replace").replace("\0", "")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    for part in text.replace("\\r", "\r").replace("\\n", "\r").split("\r"):
        if part.strip():
            yield without_prefix(part.rstrip())


def without_prefix(text: str) -> str:
    """Return a line without the date, rank, pod or source that a logger put before it.

    Examples:
        >>> without_prefix("2024-05-06 07:08:09.123456: W tensorflow/core/bfc.cc:12] Limit: 4")
        'Limit: 4'
    """
    for _ in range(4):
        found = _PREFIX.match(text)
        if not found:
            break
        text = text[found.end() :]
    return text
