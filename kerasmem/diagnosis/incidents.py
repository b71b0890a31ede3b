"""From clues, line by line, to failures: what belongs together, which came first, how many follow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kerasmem.diagnosis.clues import Clue, Rule
from kerasmem.diagnosis.families import RULES

_FAR = 500  # lines after which another failure is another one
_NEAR = 130  # lines around a failure in which details belong to it
_OPERATIONS = 8
# a failure told in several voices: the one that says most gives the family
_RANKS = {"cuda": 0, "host": 0, "tensorflow": 1, "theano": 2, "pytorch": 2, "xla": 2, "jax": 3}
_SPECIFIC = {"driver": 0, "bfc": 1, "": 0, "python": 0, "killed": 0}
_EXCEPTION = re.compile(r"^(?:[\w.]{1,120}\.)?\w{0,60}(?:Error|Exception|OutOfMemory)\b(?::|$)")


@dataclass
class Incident:
    """One failure as it is being read; see `Clue` for the fields."""

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
    told: tuple[Any, ...] = ()

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
    """Puts clues together.

    Args:
        rules: how to read lines, in the order in which they are tried.
    """

    def __init__(self, rules: tuple[Rule, ...] = RULES) -> None:
        self.rules = rules
        needles = "|".join(sorted({re.escape(each.needle) for each in rules}))
        self._any = re.compile(needles)
        self.wanted = re.compile(f"{needles}|Error|Exception|BFCAllocator dump".encode())  # lines that `read` can use
        self.failures: list[Incident] = []
        self.weak: list[Incident] = []
        self.others: list[tuple[int, Clue, str]] = []
        self.later = 0
        self._current: Incident | None = None
        self._ahead: dict[str, tuple[int, Any]] = {}
        self._dump_over = False

    def read(self, lines: Iterable[tuple[int, str]]) -> None:
        """Read numbered lines, in order."""
        for number, text in lines:
            self._exception(number, text)
            if self._any.search(text):
                for clue in self._clues(text):
                    self._take(number, text, clue)

    def _clues(self, text: str) -> list[Clue]:
        """Return what a line says: one thing that happened at most, and any details."""
        found: list[Clue] = []
        decided = False
        for each in self.rules:
            if each.needle in text and (match := each.pattern.search(text)):
                clue = each.read(match)
                if clue is None or (decided and clue.kind not in ("detail", "ahead")):
                    continue
                decided = decided or clue.kind not in ("detail", "ahead")
                found.append(clue)
        return found

    def _exception(self, number: int, text: str) -> None:
        current = self._current
        if current and number - current.last < _NEAR and _EXCEPTION.match(text):
            current.exception = True
        if "BFCAllocator dump" in text and current and current.pieces:
            self._dump_over = True  # the second dump is of another moment

    def _take(self, number: int, text: str, clue: Clue) -> None:
        if clue.kind == "failure":
            self._failure(number, text, clue)
        elif clue.kind == "ahead":
            for name, value in clue.facts.items():
                self._ahead[name] = (number, value)
            if self._current and number - self._current.last < _NEAR:
                self._join(self._current, number)
        elif clue.kind == "detail":
            current = self._current
            if current and number - current.last < _NEAR and not (self._dump_over and "free_piece" in clue.facts):
                current.add(clue.facts, current.last if clue.what == "node" else number)
                current.last = max(current.last, number)
        elif clue.kind == "weak":
            if not (self._current and number - self._current.last < _FAR):
                self._weak(number, text, clue)
        elif clue.kind == "cancel":
            self._cancel(number)
            self.others.append((number, Clue("other", clue.family, clue.what), text))
        else:
            self.others.append((number, clue, text))
            del self.others[:-2000]

    def _failure(self, number: int, text: str, clue: Clue) -> None:
        told = (
            clue.family,
            clue.what,
            *(clue.facts.get(key) for key in ("requested_bytes", "tensor_shape", "free_bytes")),
        )
        current = self._current
        if current and clue.facts.get("in_use_bytes") and current.facts.get("in_use_bytes") and clue.family == "host":
            current.closed = True  # the kernel names each process that it kills
            told = (*told, clue.facts["in_use_bytes"])
        if current and (number - current.last > _FAR or (current.closed and told != current.told and self._new(clue))):
            current = None
        if current is None:
            current = Incident("failure", clue.family, clue.what, number, number, text, told=told)
            self._current, self._dump_over = current, False
            if len(self.failures) < 4:
                self.failures.append(current)
            else:
                self.later += 1
        elif (_RANKS.get(clue.family, 0), _SPECIFIC.get(clue.what, 2)) > (
            _RANKS.get(current.family, 0),
            _SPECIFIC.get(current.what, 2),
        ):
            current.family, current.what = clue.family, clue.what
        current.add(clue.facts, number)
        self._join(current, number)
        if _EXCEPTION.match(text) or current.exception:
            current.closed, current.told = True, told

    def _new(self, clue: Clue) -> bool:
        """Whether a failure after a closed one is another: what a dying process adds is not."""
        assert self._current is not None
        return not (clue.what in ("python", "os", "driver", "slurm", "container") and self._current.what != clue.what)

    def _join(self, current: Incident, number: int) -> None:
        for name, (place, value) in list(self._ahead.items()):
            if number - place < _FAR:
                current.add({name: value}, current.last)
                if name == "operation":
                    del self._ahead[name]
        if "jax" in current.facts and current.family == "xla":
            current.family = "jax"

    def _weak(self, number: int, text: str, clue: Clue) -> None:
        if len(self.weak) < 100:
            found = Incident("weak", clue.family, clue.what, number, number, text)
            found.add(clue.facts, number)
            self.weak.append(found)

    def _cancel(self, number: int) -> None:
        current = self._current
        if current and current.what == "bfc" and number - current.first <= 2 and current in self.failures:
            self.failures.remove(current)
            self._current = None
