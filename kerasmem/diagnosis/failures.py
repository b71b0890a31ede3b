"""From findings, line by line, to failures: what belongs together, which came first, how many follow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kerasmem.diagnosis.messages import Finding, all_messages

_FAR = 500  # lines after which another failure is another one
_NEAR = 130  # lines around a failure in which details belong to it
_OPERATIONS = 8
# a failure told in several voices: the one that says most gives the family
_RANKS = {"cuda": 0, "host": 0, "tensorflow": 1, "theano": 2, "pytorch": 2, "xla": 2, "jax": 3}
_SPECIFIC = {"driver": 0, "bfc": 1, "": 0, "python": 0, "killed": 0}
_EXCEPTION = re.compile(r"^(?:[\w.]{1,120}\.)?\w{0,60}(?:Error|Exception|OutOfMemory)\b(?::|$)")


@dataclass
class Failure:
    """One failure as it is being read; see `Finding` for the fields."""

    kind: str
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
        """Take over what is not yet known; the first word counts."""
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
    """Puts findings together."""

    def __init__(self) -> None:
        self._messages = [(needle, each) for each in all_messages() for needle in each.needles]
        needles = "|".join(sorted({re.escape(needle) for needle, _ in self._messages}))
        self._any = re.compile(needles)
        self.wanted = re.compile(f"{needles}|Error|Exception|BFCAllocator dump".encode())  # lines that `read` can use
        self.failures: list[Failure] = []
        self.weak: list[Failure] = []
        self.others: list[tuple[int, Finding, str]] = []
        self.later = 0
        self._current: Failure | None = None
        self._ahead: dict[str, tuple[int, Any]] = {}
        self._dump_over = False

    def read(self, lines: Iterable[tuple[int, str]]) -> None:
        """Read numbered lines, in order."""
        for number, text in lines:
            self._exception(number, text)
            if self._any.search(text):
                for finding in self._findings(text):
                    self._take(number, text, finding)

    def _findings(self, text: str) -> list[Finding]:
        """Return what a line says: one thing that happened at most, and any details."""
        found: list[Finding] = []
        decided = False
        for needle, message in self._messages:
            if needle in text and (finding := message.read(text)) is not None:
                decides = message.kind not in ("detail", "ahead")
                if decides and decided:
                    continue
                decided = decided or decides
                found.append(finding)
        return found

    def _exception(self, number: int, text: str) -> None:
        current = self._current
        if current and number - current.last < _NEAR and _EXCEPTION.match(text):
            current.exception = True
        if "BFCAllocator dump" in text and current and current.pieces:
            self._dump_over = True  # the second dump is of another moment

    def _take(self, number: int, text: str, finding: Finding) -> None:
        if finding.kind == "failure":
            self._failure(number, text, finding)
        elif finding.kind == "ahead":
            for name, value in finding.facts.items():
                self._ahead[name] = (number, value)
            if self._current and number - self._current.last < _NEAR:
                self._join(self._current, number)
        elif finding.kind == "detail":
            current = self._current or self._cut_off(number)
            if current and number - current.last < _NEAR and not (self._dump_over and "free_piece" in finding.facts):
                current.add(finding.facts, current.last if finding.what == "node" else number)
                current.last = max(current.last, number)
        elif finding.kind == "weak":
            if not (self._current and number - self._current.last < _FAR):
                self._weak(number, text, finding)
        elif finding.kind == "cancel":
            self._cancel(number)
            self.others.append((number, Finding("other", finding.family, finding.what), text))
        else:
            self.others.append((number, finding, text))
            del self.others[:-2000]

    def _failure(self, number: int, text: str, finding: Finding) -> None:
        facts, current = finding.facts, self._current
        identity = (finding.family, finding.what, *map(facts.get, ("requested_bytes", "tensor_shape", "free_bytes")))
        if current and finding.family == "host" and facts.get("in_use_bytes") and current.facts.get("in_use_bytes"):
            current.closed = True  # the kernel names each process that it kills
            identity = (*identity, facts["in_use_bytes"])
        if current:
            is_other = current.closed and identity != current.identity and self._is_another(finding)
            if is_other or number - current.last > _FAR:
                current = None
        if current is None:
            current = Failure("failure", finding.family, finding.what, number, number, text, identity=identity)
            self._current, self._dump_over = current, False
            if len(self.failures) < 4:
                self.failures.append(current)
            else:
                self.later += 1
        elif _rank(finding) > _rank(current):
            current.family, current.what = finding.family, finding.what
        current.add(facts, number)
        self._join(current, number)
        if _EXCEPTION.match(text) or current.exception:
            current.closed, current.identity = True, identity

    def _is_another(self, finding: Finding) -> bool:
        """Whether a failure after a closed one is another: what a dying process adds is not."""
        assert self._current is not None
        return not (
            finding.what in ("python", "os", "driver", "slurm", "container") and self._current.what != finding.what
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
        """Return the allocator's statistics just before, where the log begins within them."""
        last = self.weak[-1] if self.weak else None
        return last if last and last.what == "bfc" and number - last.last < _NEAR else None

    def _weak(self, number: int, text: str, finding: Finding) -> None:
        if finding.what == "bfc" and (cut_off := self._cut_off(number)):
            cut_off.add(finding.facts, number)
        elif len(self.weak) < 100:
            found = Failure("weak", finding.family, finding.what, number, number, text)
            found.add(finding.facts, number)
            self.weak.append(found)

    def _cancel(self, number: int) -> None:
        current = self._current
        if current and current.what == "bfc" and number - current.first <= 2 and current in self.failures:
            self.failures.remove(current)
            self._current = None


def _rank(found: Finding | Failure) -> tuple[int, int]:
    return _RANKS.get(found.family, 0), _SPECIFIC.get(found.what, 2)
