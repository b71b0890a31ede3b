"""Writes samples to a file that survives a crash, CSV or JSON lines, and reads them back.

Rows are passed to the operating system at once, in append mode, so they survive an exception, an out-of-memory error
and `kill -9`. Only a power failure can lose rows that the system has not yet written to the disk.

A CSV file has a header line and one line for each sample, with empty cells for unknown sizes, and nothing else, so any
CSV reader can read it. A JSON lines file has objects of several kinds: "run" at each start (format_version, time,
notes so far; "rank" and "ranks" if several processes train together), "note" for later notes, "sample" with the
columns of the CSV and null for unknown sizes, "phase" for peaks of background readings, and "cost" for the time spent
on logging.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from kerasmem import files
from kerasmem.errors import InputError, UsageError, check_format
from kerasmem.monitoring.timeline import (
    COLUMNS,
    FORMAT_VERSION,
    TABLE_ROWS,
    PhasePeaks,
    Sample,
    Table,
    Timeline,
    make_sample,
    pack,
)

Format = Literal["csv", "jsonl"]
_SUFFIXES: dict[str, Format] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_HEADER = ",".join(COLUMNS)
_MOST_NUMBERS = 5  # of damaged lines, in a note


open_logs: dict[Path, Callable[[], None]] = {}  # of this process, with the function that writes waiting rows


def write_waiting(path: str | os.PathLike[str]) -> None:
    """Write the waiting rows of a log, if this process has it open."""
    write = open_logs.get(Path(path).resolve())
    if write is not None:
        write()


@atexit.register
def _before_exit() -> None:
    """Write waiting rows, since a program that ends by an exception in `fit` closes no log."""
    for write in list(open_logs.values()):
        write()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=open_logs.clear)  # the parent writes these rows


def format_of(path: str | os.PathLike[str]) -> Format:
    """Return the format of a log by its suffix.

    Raises:
        UsageError: If the suffix is not .csv or .jsonl.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise UsageError(f"filename: {os.fspath(path)!r} must end in .csv or .jsonl")
    return _SUFFIXES[suffix]


class LogFile:
    """A log of samples, open for appending rows.

    Args:
        path: path of the file, .csv or .jsonl. Missing folders are created.
        append: whether to append to an existing file, after cutting off an incomplete last line, or to overwrite it.

    Attributes:
        next_run: number of the next run, different from those in the file.

    Raises:
        UsageError: If the file cannot be written, or is not such a log.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool) -> None:
        self.path = Path(path)
        self.format = format_of(path)
        self.next_run = 0
        self._file = -1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = files.READ | (os.O_RDWR if append else os.O_WRONLY)
            self._file = os.open(self.path, flags | os.O_CREAT | os.O_APPEND, 0o666)
            if not append and stat.S_ISREG(os.fstat(self._file).st_mode):
                os.ftruncate(self._file, 0)
            is_empty = self._resume() if append else True
            if is_empty and self.format == "csv":
                self._write(_HEADER + "\n")
        except OSError as error:
            self.close()
            raise UsageError(f"filename: {str(self.path)!r} cannot be written: {error.strerror or error}") from error
        except UsageError:
            self.close()
            raise

    def add(self, samples: Sequence[Sample]) -> None:
        """Write samples. Raises OSError if the disk is full."""
        row = _csv_row if self.format == "csv" else _json_row
        self._write("".join([row(sample) for sample in samples]))

    def add_object(self, kind: str, **values: Any) -> None:
        """Write an object of another kind, if the file is JSON lines."""
        if self.format == "jsonl":
            self._write(json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file. May be called again."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def __del__(self) -> None:
        self.close()

    def _write(self, text: str) -> None:
        data = text.encode()
        written = os.write(self._file, data)
        if written != len(data):  # the disk is almost full; writing the rest raises the reason
            os.write(self._file, data[written:])

    def _resume(self) -> bool:
        """Prepare to append to the file. Return whether it is empty."""
        size = os.fstat(self._file).st_size
        if size == 0:
            return True
        start = files.read_bytes(self._file, 4096, 0)
        expected = (_HEADER + "\n").encode() if self.format == "csv" else b'{"kind":'
        if not start.startswith(expected):
            raise UsageError(
                f"filename: {str(self.path)!r} exists and is not a kerasmem log of this version; "
                "if it may be overwritten, pass append=False"
            )
        tail = files.read_bytes(self._file, 65536, max(0, size - 65536))
        cut = len(tail) - (tail.rfind(b"\n") + 1)
        if cut:
            os.ftruncate(self._file, size - cut)
            tail = tail[:-cut]
        runs = [run for line in tail.splitlines()[-200:] if (run := _run_of(line, self.format)) is not None]
        self.next_run = max(runs, default=-1) + 1
        return False


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Read a log of `MemoryLogger`, even if a crash cut it short.

    Args:
        path: path of a CSV or JSON lines file. The format is detected from its content.

    Returns:
        The samples of the log. Damaged lines are left out, with a note.

    Raises:
        InputError: If the file cannot be read, or is not a log.

    Examples:
        >>> import tempfile, pathlib
        >>> log = pathlib.Path(tempfile.mkdtemp()) / "run.csv"
        >>> _ = log.write_text("run,time,phase,batch,device,peak_bytes\\n0,0.5,train,0,GPU:0,900\\n0,0.7,tra")
        >>> read_timeline(log).max("peak_bytes")
        900
    """
    notes: dict[str, None] = {}
    phases: list[PhasePeaks] = []
    tables = [pack(()), *read_tables(path, notes, phases)]
    return Timeline(np.concatenate(tables), notes, phases)


def read_tables(path: str | os.PathLike[str], notes: dict[str, None], phases: list[PhasePeaks]) -> Iterator[Table]:
    """Read a log in tables of some thousand rows. Raises the errors of `read_timeline`.

    Args:
        path: path of the log.
        notes: collects the notes in the log.
        phases: collects the peaks of phases.
    """
    write_waiting(path)
    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            samples = _samples(file, name, notes, phases)
            while len(table := pack(itertools.islice(samples, TABLE_ROWS))):
                yield table
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from error


def _samples(file: TextIO, name: str, notes: dict[str, None], phases: list[PhasePeaks]) -> Iterator[Sample]:
    """Yield the samples of a log, and keep the notes and phases in it."""
    is_json = file.read(1) == "{"
    file.seek(0)
    parse = files.read_json if is_json else _csv_parser(file.readline(), name)
    damaged: list[int] = []  # the first few
    damaged_count = valid_count = 0
    for number, line in enumerate(file, start=1 if is_json else 2):
        try:
            data = parse(line)
            sample = _take(data, notes, phases)
        except (InputError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
            damaged_count += 1
            damaged += [number] if damaged_count <= _MOST_NUMBERS else []
            continue
        valid_count += 1
        if sample is not None:
            yield sample
        elif data["kind"] == "run":
            check_format(name, data, FORMAT_VERSION)
    if is_json and not valid_count:
        raise InputError(f"{name}: not a kerasmem log: no line is a valid sample")
    if damaged:
        numbers = ", ".join(map(str, damaged)) + (", …" if damaged_count > len(damaged) else "")
        notes[f"file: {damaged_count} damaged line(s) were left out (line {numbers})"] = None


def _take(data: Any, notes: dict[str, None], phases: list[PhasePeaks]) -> Sample | None:
    """Return the sample in a line, or keep its note or phase and return None."""
    kind = data["kind"]
    if kind == "sample":
        return make_sample(data)
    if kind == "run":
        notes.update(dict.fromkeys(data.get("notes", ())))
    elif kind == "phase":
        phases.append(PhasePeaks.from_dict(data))
    elif kind == "note":
        notes[str(data["text"])] = None
    return None


def _csv_parser(header: str, name: str) -> Callable[[str], dict[str, Any]]:
    """Return a function that parses a line of a CSV file into the object of a JSON line.

    It raises ValueError if the line is damaged. A line without a line end is, as the last digits of its last number may
    be missing.

    Raises:
        InputError: If the header does not name the columns of a log.
    """
    columns = _cells(header)
    missing = [column for column in ("run", "time", "phase") if column not in columns]
    if missing:
        raise InputError(f"{name}: not a kerasmem log: its first line has no {', '.join(missing)}")

    def parse(line: str) -> dict[str, Any]:
        if not line.endswith("\n"):
            raise ValueError("it has no line end")
        return {**dict(zip(columns, _cells(line), strict=True)), "kind": "sample"}

    return parse


def _cells(line: str) -> list[Any]:
    try:
        return [cell or None for cell in next(csv.reader([line.rstrip("\r\n")]), [])]
    except csv.Error:  # NUL bytes (before Python 3.11) and endless cells
        return []


def _csv_row(sample: Sample) -> str:
    return ",".join(["" if value is None else str(value) for value in sample]) + "\n"


def _json_row(sample: Sample) -> str:
    return json.dumps({"kind": "sample", **sample._asdict()}, separators=(",", ":")) + "\n"


def _run_of(line: bytes, format: Format) -> int | None:
    try:
        return int(line.split(b",", 1)[0]) if format == "csv" else int(files.read_json(line)["run"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
