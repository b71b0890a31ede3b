"""Recovery of a step that ran out: restore a copy, repeat the steps since, and try the batch in smaller pieces.

A failed step may leave weights half updated, in graph mode too: the executor updates the last layers while it still
computes the gradients of the first. So the driver keeps a copy of the state on the host. It takes the copy before the
first step of each kind and then from time to time, and keeps the batches since then.
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
    """One repetition of a step that ran out of memory or ended its process.

    Attributes:
        step: number of the step since the run began, from 0.
        kind: "train" or "test"; "state" or "reset" if the separate process ended between two steps.
        rows: rows of the batch; 0 between two steps.
        micro_batch_rows: rows of the pieces that succeeded; None for the whole batch.
        replayed: training steps since the last good copy, which were repeated.
        summary: summary of the failure.
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
    """Runs steps on an engine, and repeats those that ran out of memory.

    Args:
        engine: engine that runs the steps.
        model: compiled and built.
        piece_rows: rows of a training piece from the first batch on; None for whole batches until one runs out.
        good: copy of the state at the start. Defaults to one taken before the first step.

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
        self._journal_limit = min(JOURNAL_BYTES, host_memory().available_bytes // 20)
        self._journal: list[_Entry] = []
        self._bytes = 0
        self._proven: set[str] = set()  # kinds of steps that have succeeded
        self._one_row_fits = False
        self._policy = SplitPolicy()

    def step(self, kind: str, batch: Any, rate: float | None = None) -> dict[str, Any]:
        """Train ("train") or evaluate ("test") a batch.

        Args:
            kind: "train" or "test".
            batch: batch of Keras's iterator.
            rate: learning rate, if it has changed since the last step.

        Raises:
            ModelError: If one row runs out of memory too, or the batch cannot be divided.
            UsageError: If `piece_rows` is set and the batch cannot be divided.
        """
        if self._sizes[kind] < row_count(batch):
            obstacle = division_obstacle(self._model, kind)
            if obstacle is not None:
                raise UsageError(f"micro_batches: {obstacle}; use a smaller batch_size")
            self._warn_uneven(kind)
        if kind not in self._proven or self.good is None:
            self.copy_state()
        entry = _Entry(kind, batch, rate)
        logs = self._run(entry)
        self._proven.add(kind)
        self._record(entry)
        self._steps += 1
        return logs

    def reset_metrics(self, *, has_happened: bool) -> None:
        """Record the reset of the metrics at the beginning of an epoch or an evaluation."""
        if not has_happened:
            self._run(_Entry("reset", None, None))
        self._journal.append(_Entry("reset", None, None))

    @property
    def piece_rows(self) -> int | None:
        """Rows of a training piece, or None for whole batches."""
        return None if self._sizes["train"] == WHOLE else self._sizes["train"]

    def copy_state(self) -> ModelState:
        """Return a copy of the current state: the last good copy if no step has run since, else a new one."""
        if self.good is None or self._journal:
            self.good, self._bytes = self._run(_Entry("state", None, None)), 0
            self._journal.clear()
        return self.good

    def _record(self, entry: _Entry) -> None:
        size = byte_count(entry.batch)
        if self._bytes + size > self._journal_limit or len(self._journal) >= JOURNAL_STEPS:
            self._journal.append(entry)  # forces a new copy
            self.copy_state()
            return
        self._journal.append(entry._replace(batch=on_host(entry.batch)))
        self._bytes += size

    def _run(self, entry: _Entry) -> Any:
        """Run an entry. While it runs out of memory, roll back, ask the policy and try smaller pieces."""
        failures: list[RanOut] = []
        rows = 0 if entry.batch is None else row_count(entry.batch)
        while True:
            try:
                if failures:
                    self._recover(entry, failures)
                result = self._execute(entry)
                break
            except RanOut as failure:
                failure.rows = min(self._sizes.get(entry.kind, rows), rows)
                failures.append(failure)
            except StopIteration as error:  # to Keras it would mean the end of the data
                raise ModelError(f"the step raised {error!r}") from error
        if failures:
            size = self._sizes.get(entry.kind, rows)
            pieces, summary = size if size < rows else None, failures[0].diagnosis.summary
            self.recoveries.append(Recovery(self._steps, entry.kind, rows, pieces, self._since(), summary))
        return result

    def _execute(self, entry: _Entry) -> Any:
        if entry.kind == "state":
            return self.engine.state()
        if entry.kind == "reset":
            return self.engine.reset_metrics()
        if entry.rate is not None:
            self.engine.set_rate(entry.rate)
        return self.engine.step(entry.kind, entry.batch, self._sizes[entry.kind])

    def _recover(self, entry: _Entry, failures: list[RanOut]) -> None:
        """Restore the copy, choose the next pieces, and repeat the steps since the copy."""
        assert self.good is not None
        is_dead = failures[-1].is_dead
        if not is_dead:
            self.engine.load(self.good)  # before an error is raised
        tries_one_row = self._choose_pieces(entry, failures)
        if is_dead:
            self.engine.load(self.good)
        self._proven.clear()
        if tries_one_row:
            self._try_one_row(entry)
        for old in self._journal:
            self._execute(old)

    def _choose_pieces(self, entry: _Entry, failures: list[RanOut]) -> bool:
        """Choose the pieces of an entry, and return whether to try one row first.

        Raises:
            ModelError: If no smaller piece helps, or the batch cannot be divided.
        """
        if entry.batch is None:
            if len(failures) > _MOST_BETWEEN_STEPS:
                raise ModelError("the training process keeps crashing; the state of the last copy is kept")
            return False
        last, rows, kind = failures[-1], row_count(entry.batch), entry.kind
        obstacle, summary, since = division_obstacle(self._model, kind), last.diagnosis.summary, self._since()
        size = self._policy.next(failures)
        if isinstance(size, GiveUp):
            message = no_update_fits if size.is_update else nothing_fits
            raise ModelError(message(summary, self._model, since))
        if size == last.rows:  # memory may not be the reason why the process ended
            return False
        if obstacle is not None:
            raise ModelError(cannot_divide(summary, obstacle, since))
        self._sizes[kind] = size
        tries_one_row = not self._one_row_fits
        first = " (one row is tried first)" if tries_one_row else ""
        warn_user(
            f"a {'training' if kind == 'train' else 'validation'} step on {rows} rows ran out of memory "
            f"({summary.rstrip('.')}); it is repeated in micro-batches of {size} rows{first}",
            RuntimeWarning,
        )
        self._warn_uneven(kind)
        return tries_one_row

    def _try_one_row(self, entry: _Entry) -> None:
        """Run a step on two pieces of one row, and undo it. If it runs out, no smaller piece helps."""
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
