"""Group messages, line by line, into failures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kerasmem.diagnosis.messages import Message, all_messages

_FAR = 500  # lines after which another failure is another one
_NEAR = 130  # lines around a failure in which details belong to it
_OPERATIONS = 8
# a failure told in several voices: the one that says most gives the family
_RANKS = {"cuda": 0, "host": 0, "tensorflow": 1, "theano": 2, "pytorch": 2, "xla": 2, "jax": 3}
_SPECIFIC = {"driver": 0, "bfc": 1, "": 0, "python": 0, "killed": 0}
_EXCEPTION = re.compile(r"^(?:[\w.]{1,120}\.)?\w{0,60}(?:Error|Exception|OutOfMemory)\b(?::|$)")


@dataclass
class Failure:
    """One failure as it is being read; see `Message` for the fields."""

    family: str
    what: str
    first: int
    last: int
    evidence: str
    facts: dict[str, Any] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)
    free_pieces: int = 0
    largest_piece: int = 0
    pieces: int = 0
    closed: bool = False
    exception: bool = False
    identity: tuple[Any, ...] = ()

    def add(self, facts: dict[str, Any], number: int) -> None:
        """Add facts that are not known yet."""
        self.last = max(self.last, number)
        for name, value in facts.items():
            if name == "operation" and value and len(self.operations) < _OPERATIONS:
                self.operations.append(value)
            elif name == "free_piece" and value:
                self.free_pieces += value
                self.largest_piece = max(self.largest_piece, value)
                self.pieces += 1
            elif value is not None:
                self.facts.setdefault(name, value)


class Collector:
    """Puts messages together."""

    def __init__(self) -> None:
        self._messages = [(needle, each) for each in all_messages() for needle in each.needles]
        needles = "|".join(sorted({re.escape(needle) for needle, _ in self._messages}))
        self._any = re.compile(needles)
        self.wanted = re.compile(f"{needles}|Error|Exception|BFCAllocator dump".encode())  # lines that `read` can use
        self.failures: list[Failure] = []
        self.weak: list[Failure] = []
        self.others: list[tuple[int, Message, str]] = []
        self.later = 0
        self._current: Failure | None = None
        self._ahead: dict[str, tuple[int, Any]] = {}
        self._dump_over = False

    def read(self, lines: Iterable[tuple[int, str]]) -> None:
        """Read numbered lines, in order."""
        for number, text in lines:
            self._exception(number, text)
            if self._any.search(text):
                self._read_line(number, text)

    def _read_line(self, number: int, text: str) -> None:
        """Read a line: at most one event, and any details."""
        decided = False
        for needle, message in self._messages:
            decides = message.kind not in ("detail", "ahead")
            if needle in text and not (decides and decided) and (facts := message.read(text)) is not None:
                decided = decided or decides
                self._take(number, text, message, facts)

    def _exception(self, number: int, text: str) -> None:
        current = self._current
        if current and number - current.last < _NEAR and _EXCEPTION.match(text):
            current.exception = True
        if "BFCAllocator dump" in text and current and current.pieces:
            self._dump_over = True  # the second dump is of another moment

    def _take(self, number: int, text: str, message: Message, facts: dict[str, Any]) -> None:
        current = self._current
        if message.kind == "failure":
            self._failure(number, text, message, facts)
        elif message.kind == "ahead":
            for name, value in facts.items():
                self._ahead[name] = (number, value)
            if current and number - current.last < _NEAR:
                self._join(current, number)
        elif message.kind == "detail":
            current = current or self._cut_off(number)
            if current and number - current.last < _NEAR and not (self._dump_over and "free_piece" in facts):
                current.add(facts, current.last if message.what == "node" else number)
                current.last = max(current.last, number)
        elif message.kind == "weak":
            if not (current and number - current.last < _FAR):
                self._weak(number, text, message, facts)
        else:
            if message.kind == "cancel":
                self._cancel(number)
            self.others.append((number, message, text))
            del self.others[:-2000]

    def _failure(self, number: int, text: str, message: Message, facts: dict[str, Any]) -> None:
        current = self._current
        identity = (message.family, message.what, *map(facts.get, ("requested_bytes", "tensor_shape", "free_bytes")))
        if current and message.family == "host" and facts.get("in_use_bytes") and current.facts.get("in_use_bytes"):
            current.closed = True  # the kernel names each process that it kills
            identity = (*identity, facts["in_use_bytes"])
        if current:
            is_other = current.closed and identity != current.identity and self._is_another(message)
            if is_other or number - current.last > _FAR:
                current = None
        if current is None:
            current = Failure(message.family, message.what, number, number, text, identity=identity)
            self._current, self._dump_over = current, False
            if len(self.failures) < 4:
                self.failures.append(current)
            else:
                self.later += 1
        elif _rank(message) > _rank(current):
            current.family, current.what = message.family, message.what
        current.add(facts, number)
        self._join(current, number)
        if _EXCEPTION.match(text) or current.exception:
            current.closed, current.identity = True, identity

    def _is_another(self, message: Message) -> bool:
        """Whether a failure after a closed one is another, and not an echo of the dying process."""
        assert self._current is not None
        return not (
            message.what in ("python", "os", "driver", "slurm", "container") and self._current.what != message.what
        )

    def _join(self, current: Failure, number: int) -> None:
        for name, (place, value) in list(self._ahead.items()):
            if number - place < _FAR:
                current.add({name: value}, current.last)
                if name == "operation":
                    del self._ahead[name]
        if "jax" in current.facts and current.family == "xla":
            current.family = "jax"

    def _cut_off(self, number: int) -> Failure | None:
        """Return the allocator's statistics just before, if the log begins within them."""
        last = self.weak[-1] if self.weak else None
        return last if last and last.what == "bfc" and number - last.last < _NEAR else None

    def _weak(self, number: int, text: str, message: Message, facts: dict[str, Any]) -> None:
        if message.what == "bfc" and (cut_off := self._cut_off(number)):
            cut_off.add(facts, number)
        elif len(self.weak) < 100:
            self.weak.append(Failure(message.family, message.what, number, number, text))
            self.weak[-1].add(facts, number)

    def _cancel(self, number: int) -> None:
        current = self._current
        if current and current.what == "bfc" and number - current.first <= 2 and current in self.failures:
            self.failures.remove(current)
            self._current = None


def _rank(found: Message | Failure) -> tuple[int, int]:
    return _RANKS.get(found.family, 0), _SPECIFIC.get(found.what, 2)
