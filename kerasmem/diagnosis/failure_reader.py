"""Groups the messages of a log into failures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kerasmem.diagnosis.log_messages import START, Message, all_messages

_FAR = 500  # lines after which a failure is a new one
_NEAR = 130  # lines around a failure with its details
_OPERATIONS = 8
# if several messages report one failure, the most detailed one gives the family
_RANKS = {"cuda": 0, "host": 0, "tensorflow": 1, "theano": 2, "pytorch": 2, "xla": 2, "jax": 3}
_SPECIFIC = {"driver": 0, "bfc": 1, "": 0, "python": 0, "killed": 0}
_EXCEPTION = re.compile(START + r"(?:[\w.]{1,120}\.)?\w{0,60}(?:Error|Exception|OutOfMemory)\b(?::|$)")


@dataclass
class Failure:
    """A failure that is being read. See `Message` for the fields."""

    family: str
    what: str
    first: int
    last: int
    evidence: str
    facts: dict[str, Any] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)
    free_pieces: int = 0
    largest_piece: int = 0
    exception: bool = False
    is_dump_over: bool = False
    identity: tuple[Any, ...] | None = None  # after its exception was raised

    def add(self, facts: dict[str, Any], number: int) -> None:
        """Add unknown facts."""
        self.last = max(self.last, number)
        for name, value in facts.items():
            if name == "operation" and value and len(self.operations) < _OPERATIONS:
                self.operations.append(value)
            elif name == "free_piece" and value:
                self.free_pieces += value
                self.largest_piece = max(self.largest_piece, value)
            elif value is not None:
                self.facts.setdefault(name, value)


class Collector:
    """Collects the messages of the first failure, and possible failures.

    Attributes:
        wanted: pattern of the lines that `read` needs.
        failure: the first failure, or None.
        weak: kills and errors that are most likely due to memory.
        others: messages about other errors, with the number and the text of the line.
    """

    def __init__(self) -> None:
        self._messages = [(needle, message) for message in all_messages() for needle in message.needles]
        needles = "|".join(sorted({re.escape(needle) for needle, _ in self._messages}))
        self.wanted = re.compile(f"{needles}|Error|Exception|BFCAllocator dump".encode())
        self.failure: Failure | None = None
        self.weak: list[Failure] = []
        self.others: list[tuple[int, Message, str]] = []
        self._ahead: dict[str, tuple[int, Any]] = {}
        self._is_complete = False

    def read(self, lines: Iterable[tuple[int, str]]) -> None:
        """Read numbered lines in order, up to the end of the first failure."""
        for number, text in lines:
            if self.failure and number - self.failure.last > _FAR:
                return
            self._exception(number, text)
            self._read_line(number, text)
            if self._is_complete:
                return

    def _read_line(self, number: int, text: str) -> None:
        """Read a line with at most one event, and any number of details."""
        decided = False
        for needle, message in self._messages:
            decides = message.kind not in ("detail", "ahead")
            if needle in text and not (decides and decided) and (facts := message.read(text)) is not None:
                decided = decided or decides
                self._take(number, text, message, facts)

    def _is_near(self, number: int) -> bool:
        return self.failure is not None and number - self.failure.last < _NEAR

    def _exception(self, number: int, text: str) -> None:
        if self.failure and self._is_near(number) and _EXCEPTION.search(text):
            self.failure.exception = True
        if "BFCAllocator dump" in text and self.failure and self.failure.largest_piece:
            self.failure.is_dump_over = True  # the second dump is of another time

    def _take(self, number: int, text: str, message: Message, facts: dict[str, Any]) -> None:
        failure = self.failure
        if message.kind == "failure":
            self._take_failure(number, text, message, facts)
        elif message.kind == "ahead":
            for name, value in facts.items():
                self._ahead[name] = (number, value)
            if failure and self._is_near(number):
                self._join(failure, number)
        elif message.kind == "detail":
            if failure and self._is_near(number) and not (failure.is_dump_over and "free_piece" in facts):
                failure.add(facts, number)
        elif message.kind == "weak":
            if failure is None:
                self.weak.append(Failure(message.family, message.what, number, number, text, facts))
                del self.weak[100:]
        else:
            if message.kind == "cancel" and failure and failure.what == "bfc" and number - failure.first <= 2:
                self.failure = None
            self.others.append((number, message, text))
            del self.others[:-2000]

    def _take_failure(self, number: int, text: str, message: Message, facts: dict[str, Any]) -> None:
        failure = self.failure
        identity = (message.family, message.what, *map(facts.get, ("requested_bytes", "tensor_shape", "free_bytes")))
        if failure and failure.identity not in (None, identity) and not _is_echo(message, failure):
            self._is_complete = True
            return
        if failure is None:
            failure = self.failure = Failure(message.family, message.what, number, number, text)
        elif _rank(message) > _rank(failure):
            failure.family, failure.what = message.family, message.what
        failure.add(facts, number)
        self._join(failure, number)
        if _EXCEPTION.search(text) or failure.exception:
            failure.identity = identity

    def _join(self, failure: Failure, number: int) -> None:
        for name, (line, value) in list(self._ahead.items()):
            if number - line < _FAR:
                failure.add({name: value}, failure.last)
                if name == "operation":
                    del self._ahead[name]
        if "jax" in failure.facts and failure.family == "xla":
            failure.family = "jax"


def _is_echo(message: Message, failure: Failure) -> bool:
    """Return whether a message after a failure may be a consequence of it."""
    return message.what in ("python", "os", "driver", "slurm", "container") and message.what != failure.what


def _rank(source: Message | Failure) -> tuple[int, int]:
    return _RANKS.get(source.family, 0), _SPECIFIC.get(source.what, 2)
