"""What to do when a step runs out: back to a good copy, the steps since once more, the same batch in smaller pieces.

A step that fails may leave weights half updated, in graph mode too: the executor updates the last layers while it
still computes the gradients of the first. So there is always a copy on the host to go back to. It is taken before the
first step of each kind and then from time to time, with the batches since kept beside it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerasmem.devices.host import host_memory
from kerasmem.errors import ModelError, UsageError, warn_user
from kerasmem.records import Record
from kerasmem.training.run_state import ModelState
from kerasmem.training.steps.batches import byte_count, on_host, part, row_count
from kerasmem.training.steps.engine import RanOut
from kerasmem.training.steps.remote import Engine
from kerasmem.training.steps.splitting import (
    GiveUp,
    SplitPolicy,
    cannot_divide,
    division_obstacle,
    no_update_fits,
    nothing_fits,
    uneven_layers,
)
from kerasmem.units import GIB

WHOLE = sys.maxsize
JOURNAL_BYTES = GIB  # of batches kept on the host between two copies, or a twentieth of its free memory
JOURNAL_STEPS = 1000
_MOST_BETWEEN_STEPS = 3


@dataclass(frozen=True)
class Recovery(Record, what="recovery"):
    """One time that a step ran out, or its process ended, and it was repeated.

    Attributes:
        step: number of the step since the run began, from 0.
        kind: "train" or "test"; "state" or "reset" if the process that takes the steps ended between two of them.
        rows: rows of the batch; 0 between two steps.
        micro_batch_rows: rows of the pieces in which it then went through; None if it went through whole.
        replayed: steps since the last good copy that were taken once more.
        summary: what ran out.
    """

    step: int
    kind: str
    rows: int
    micro_batch_rows: int | None
    replayed: int
    summary: str


class _Entry(NamedTuple):
    kind: str  # "train", "test", "reset" or "state"
    batch: Any
    rate: float | None


class Driver:
    """Takes steps on an engine, and repeats those that ran out.

    Args:
        engine: where the steps run.
        model: compiled and built.
        piece_rows: rows of a training piece from the first batch on; None for whole batches until one runs out.
        good: a copy to go back to from the start.

    Attributes:
        good: the last good copy; None if the next step must begin with one.
        recoveries: a `Recovery` for each repeated step.
    """

    def __init__(
        self, engine: Engine, model: Any, *, piece_rows: int | None = None, good: ModelState | None = None
    ) -> None:
        self.engine = engine
        self.good = good
        self.recoveries: list[Recovery] = []
        self._model = model
        self._sizes = {"train": piece_rows or WHOLE, "test": WHOLE}
        self._steps = 0
        self._is_warned = False
        self._room = min(JOURNAL_BYTES, host_memory().available_bytes // 20)
        self._journal: list[_Entry] = []
        self._bytes = 0
        self._proven: set[str] = set()  # kinds of steps that fit
        self._one_row_fits = False
        self._policy = SplitPolicy()

    def step(self, kind: str, batch: Any, rate: float | None = None) -> dict[str, Any]:
        """Train ("train") or evaluate ("test") a batch.

        Args:
            kind: which of them.
            batch: batch of Keras's iterator.
            rate: learning rate, if it was changed since the step before.

        Raises:
            ModelError: If one row at a time runs out too, or the batch cannot be divided.
            UsageError: If it is to be taken in pieces, and cannot.
        """
        if self._sizes[kind] < row_count(batch):
            obstacle = division_obstacle(self._model, kind)
            if obstacle is not None:
                raise UsageError(f"micro_batches: {obstacle}; choose a smaller batch_size")
            self._warn_uneven(kind)
        if kind not in self._proven or self.good is None:
            self.keep()
        entry = _Entry(kind, batch, rate)
        logs = self._run(entry)
        self._proven.add(kind)
        self._note(entry)
        self._steps += 1
        return logs

    def reset_metrics(self, *, has_happened: bool) -> None:
        """Note the reset of the metrics at the beginning of an epoch or an evaluation."""
        if not has_happened:
            self._run(_Entry("reset", None, None))
        self._journal.append(_Entry("reset", None, None))

    @property
    def size(self) -> int | None:
        """Rows of a piece, if batches are trained on in pieces."""
        return None if self._sizes["train"] == WHOLE else self._sizes["train"]

    def keep(self) -> ModelState:
        """Take a copy of the state and return it."""
        if self.good is None or self._journal:
            self.good, self._bytes = self._run(_Entry("state", None, None)), 0
            self._journal.clear()
        return self.good

    def _note(self, entry: _Entry) -> None:
        size = byte_count(entry.batch)
        if self._bytes + size > self._room or len(self._journal) >= JOURNAL_STEPS:
            self._journal.append(entry)  # so that the copy is a new one
            self.keep()
            return
        self._journal.append(entry._replace(batch=on_host(entry.batch)))
        self._bytes += size

    def _run(self, entry: _Entry) -> Any:
        """Run an entry. If it runs out, roll back, ask the policy and try smaller pieces until it succeeds."""
        failures: list[RanOut] = []
        rows = 0 if entry.batch is None else row_count(entry.batch)
        while True:
            try:
                if failures:
                    self._recover(entry, failures)
                done = self._take(entry)
                break
            except RanOut as failure:
                failure.rows = min(self._sizes.get(entry.kind, rows), rows)
                failures.append(failure)
            except StopIteration as error:  # Keras would take it for the end of the data
                raise ModelError(f"the step raised {error!r}") from error
        if failures:
            size = self._sizes.get(entry.kind, rows)
            pieces, summary = size if size < rows else None, failures[0].diagnosis.summary
            self.recoveries.append(Recovery(self._steps, entry.kind, rows, pieces, self._since(), summary))
        return done

    def _take(self, entry: _Entry) -> Any:
        if entry.kind == "state":
            return self.engine.state()
        if entry.kind == "reset":
            return self.engine.reset_metrics()
        if entry.rate is not None:
            self.engine.set_rate(entry.rate)
        return self.engine.step(entry.kind, entry.batch, self._sizes[entry.kind])

    def _recover(self, entry: _Entry, failures: list[RanOut]) -> None:
        """Go back to the copy, choose the next pieces, and take the steps since the copy once more."""
        assert self.good is not None
        is_dead = failures[-1].is_dead
        if not is_dead:
            self.engine.load(self.good)  # before anything is raised or estimated
        tries_one_row = self._choose_pieces(entry, failures)
        if is_dead:
            self.engine.load(self.good)
        self._proven.clear()
        if tries_one_row:
            self._try_one_row(entry)
        for old in self._journal:
            self._take(old)

    def _choose_pieces(self, entry: _Entry, failures: list[RanOut]) -> bool:
        """Choose the pieces of an entry, and return whether one row should be tried before.

        Raises:
            ModelError: If nothing smaller helps, or the batch cannot be divided.
        """
        if entry.batch is None:
            if len(failures) > _MOST_BETWEEN_STEPS:
                raise ModelError("the training process keeps crashing; nothing was lost up to the last copy")
            return False
        last, rows, kind = failures[-1], row_count(entry.batch), entry.kind
        obstacle, summary, since = division_obstacle(self._model, kind), last.diagnosis.summary, self._since()
        size = self._policy.next(failures)
        if isinstance(size, GiveUp):
            message = no_update_fits if size.is_update else nothing_fits
            raise ModelError(message(summary, self._model, since))
        if size == last.rows:  # the process may have ended for another reason than memory
            return False
        if obstacle is not None:
            raise ModelError(cannot_divide(summary, obstacle, since))
        self._sizes[kind] = size
        tries_one_row = not self._one_row_fits
        how = ", if fewer rows help at all: one row is tried first" if tries_one_row else ""
        warn_user(
            f"a {'training' if kind == 'train' else 'validation'} step on {rows} rows ran out of memory "
            f"({summary.rstrip('.')}); it is repeated in micro-batches of {size} rows{how}",
            RuntimeWarning,
        )
        self._warn_uneven(kind)
        return tries_one_row

    def _try_one_row(self, entry: _Entry) -> None:
        """Take a step on two pieces of one row, and undo it: if that runs out, no smaller piece helps."""
        assert self.good is not None
        size, self._sizes[entry.kind] = self._sizes[entry.kind], 1
        self.engine.step(entry.kind, part(entry.batch, 0, 2), 1)
        self.engine.load(self.good)
        self._sizes[entry.kind], self._one_row_fits = size, True

    def _since(self) -> int:
        """Return the number of training steps since the last good copy."""
        return sum(old.kind == "train" for old in self._journal)

    def _warn_uneven(self, kind: str) -> None:
        if kind == "train" and not self._is_warned:
            self._is_warned = True
            text = uneven_layers(self._model)
            if text is not None:
                warn_user(text, RuntimeWarning)
