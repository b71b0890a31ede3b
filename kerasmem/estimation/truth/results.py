"""What a check of rows found, and what a machine measured: frozen results, to and from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kerasmem.estimation.truth.rows import Errors
from kerasmem.records import Record


@dataclass(frozen=True)
class Problem:
    """What is wrong with a line, and the way out.

    Attributes:
        line: its number, from 1.
        field: of the row, such as "truth.runs[0].peak_bytes[3]"; empty where the line is no row.
        what: is wrong.
        way_out: what to do.
    """

    line: int
    field: str
    what: str
    way_out: str


@dataclass(frozen=True)
class CheckedRows(Record, what="check of rows", version=1, also=("is_valid",), rows="problems"):
    """A file of rows, looked at.

    Attributes:
        rows: lines without a problem.
        networks: that those rows are of.
        measured: rows of those with a measured peak.
        problems: the first of them.
        more_problems: beside those.
        errors: of the estimates in the rows without a problem, by method and kernels.
    """

    rows: int
    networks: int
    measured: int
    problems: tuple[Problem, ...]
    more_problems: int
    errors: tuple[Errors, ...]

    @property
    def is_valid(self) -> bool:
        """Whether no line has a problem."""
        return not self.problems

    @property
    def answer(self) -> str:
        """The answer in one line."""
        count = len(self.problems) + self.more_problems
        if count:
            return f"{count:,} problem{'s' if count > 1 else ''}; {self.rows:,} lines have none"
        return f"{self.rows:,} rows of {self.networks:,} networks, {self.measured:,} of them measured: all are valid"


@dataclass(frozen=True)
class ContributedRow:
    """One step that was measured here, or why it was not.

    Attributes:
        key: the row's name.
        measured: the median peak of its steps in bytes.
        predicted: the estimate's peak in bytes.
        method: of the estimate.
        failed: why there is no measurement, or no estimate.
        is_new: whether it was measured in this run.
    """

    key: str
    measured: int | None
    predicted: int | None
    method: str | None
    failed: str | None = None
    is_new: bool = True


@dataclass(frozen=True)
class Contribution(Record, what="contribution", version=1, rows="rows"):
    """Rows that a machine measured for the data set; they lie in a file, and nothing was sent.

    Attributes:
        output: the file.
        versions: that every row names.
        machine: what every row says of the machine.
        rows: of the file that were asked for.
    """

    output: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    rows: tuple[ContributedRow, ...]

    @property
    def answer(self) -> str:
        """The answer in one line."""
        known = sum(each.measured is not None for each in self.rows)
        return f"{known} of {len(self.rows)} rows measured, in {self.output}; nothing was sent"
