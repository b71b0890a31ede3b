"""What to do when a step runs out: back to a good copy, the steps since once more, the same batch in smaller pieces.

A step that fails may leave weights half updated, in graph mode too: the executor updates the last layers while it
still computes the gradients of the first. So there is always a copy on the host to go back to: one taken before
each step of shapes that have not been seen to fit, and one from time to time, with the batches since kept beside it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerasmem.compat.keras_training import is_under_strategy
from kerasmem.devices.host import host_memory
from kerasmem.devices.training_device import allocator_limit
from kerasmem.errors import ModelError, UsageError, warn_user
from kerasmem.records import Record
from kerasmem.training.model_state import ModelState
from kerasmem.training.model_state import byte_count as state_bytes
from kerasmem.training.steps.batches import byte_count, first_replica, on_host, part, row_count, signature
from kerasmem.training.steps.checks import INEXACT, division_obstacle, uneven_layers
from kerasmem.training.steps.engine import RanOut
from kerasmem.training.steps.remote import Engine
from kerasmem.training.steps.sizing import (
    Fitting,
    Room,
    cannot_divide,
    estimate_fitting,
    even_rows,
    no_update_fits,
    nothing_fits,
)
from kerasmem.units import GIB

WHOLE = sys.maxsize
JOURNAL_BYTES = GIB  # of batches kept on the host between two copies, or a twentieth of its free memory
JOURNAL_STEPS = 1000
SPREAD_STEPS = 100  # between copies under a strategy, whose batches are not kept: no step is taken again there
_MOST_BETWEEN_STEPS = 3
_MANY_PIECES = 8
_LESS = 4  # what ran out against the estimate is divided by it
_INEXACTLY = f"; choose a smaller batch_size, or micro_batches={INEXACT!r} for pieces as batches: other arithmetic"
_OTHERWISE = "pieces of a batch are batches of their own, each with an update: this is other arithmetic"


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
        piece_rows: rows of a training piece from the first batch on; None for whole batches until one runs out.
        may_differ: whether a batch is divided also if the result is not the same.
        loss_reduction: "mean" or "sum" for a model with its own `compute_loss`.
        model: of which the estimator is asked how many rows fit.
        good: a copy to go back to from the start.

    Attributes:
        good: the last good copy; None if the next step must begin with one.
    """

    def __init__(
        self,
        engine: Engine,
        model: Any,
        *,
        piece_rows: int | None = None,
        may_differ: bool = False,
        loss_reduction: str | None = None,
        good: ModelState | None = None,
    ) -> None:
        self.engine = engine
        self._model = model
        self.sizes = {"train": piece_rows or WHOLE, "test": WHOLE}
        self.recoveries: list[Recovery] = []
        self.steps = 0
        self._may_differ, self._loss_reduction = may_differ, loss_reduction
        self._is_spread = is_under_strategy(model)
        self._is_warned = False
        self.good = good
        self._room = min(JOURNAL_BYTES, host_memory().available_bytes // 20)
        self._journal: list[_Entry] = []
        self._bytes = 0
        self._proven: set[Any] = set()
        self._fitting: Fitting | None = None  # what the estimator said of the batch that ran out last
        self._is_in_doubt = self._one_row_fits = False  # whether smaller pieces help at all
        self._deaths_here = 0  # without a step in between and without a sign that it was memory

    def step(self, kind: str, batch: Any, rate: float | None = None) -> dict[str, Any]:
        """Train ("train") or evaluate ("test") a batch.

        Args:
            kind: which of them.
            batch: what Keras's iterator gave.
            rate: the learning rate, where it was changed since the step before.

        Raises:
            ModelError: one row at a time runs out too, or the batch cannot be divided.
            UsageError: it is to be taken in pieces, and cannot.
        """
        if self.sizes[kind] < row_count(batch):
            obstacle = self._obstacle(kind)
            if obstacle is not None and not self._may_differ:
                raise UsageError(f"micro_batches: {obstacle}{_INEXACTLY}")
            if kind == "train":
                self._warn_uneven()
        shapes = signature(batch)
        if (kind, self.sizes[kind], shapes) not in self._proven or self.good is None:
            self.keep()
        entry = _Entry(kind, batch, rate)
        logs = self._safely(entry)
        self._proven.add((kind, self.sizes[kind], shapes))
        self._deaths_here = 0
        self._note(entry)
        self.steps += 1
        return logs

    def reset_metrics(self, *, has_happened: bool) -> None:
        """Note the reset of the metrics at the beginning of an epoch or an evaluation."""
        if not has_happened:
            self._safely(_Entry("reset", None, None))
        self._journal.append(_Entry("reset", None, None))

    @property
    def size(self) -> int | None:
        """Rows of a piece, if batches are trained on in pieces."""
        return None if self.sizes["train"] == WHOLE else self.sizes["train"]

    def keep(self) -> ModelState:
        """Take a copy of the state and return it."""
        if self.good is None or self._journal:
            self.good, self._bytes = self._safely(_Entry("state", None, None)), 0
            self._journal.clear()
        return self.good

    def _note(self, entry: _Entry) -> None:
        size = byte_count(entry.batch)
        most = SPREAD_STEPS if self._is_spread else JOURNAL_STEPS
        if self._bytes + size > self._room or len(self._journal) >= most:
            self._journal.append(entry)  # so that the copy is a new one
            self.keep()
            return
        self._journal.append(entry._replace(batch=None if self._is_spread else on_host(entry.batch)))
        self._bytes += size

    def _safely(self, entry: _Entry) -> Any:
        """Run an entry; if it runs out, go back to the copy and replay the journal, until it succeeds."""
        failures: list[RanOut] = []
        while True:
            try:
                if failures:
                    assert self.good is not None
                    if not failures[-1].is_dead:
                        self.engine.load(self.good)  # before anything is raised or estimated
                    self._split(entry, failures)
                    if failures[-1].is_dead:
                        self.engine.load(self.good)
                    self._proven.clear()
                    self._try(entry)
                    for old in self._journal:
                        self._take(old)
                done = self._take(entry)
                break
            except RanOut as failure:
                failures.append(failure)
        if failures:
            rows = 0 if entry.batch is None else row_count(entry.batch)
            size = self.sizes.get(entry.kind, rows)
            pieces, summary = size if size < rows else None, failures[0].diagnosis.summary
            self.recoveries.append(Recovery(self.steps, entry.kind, rows, pieces, self._since(), summary))
        return done

    def _take(self, entry: _Entry) -> Any:
        if entry.kind == "state":
            return self.engine.state()
        if entry.kind == "reset":
            return self.engine.reset_metrics()
        if entry.rate is not None:
            self.engine.set_rate(entry.rate)
        return self.engine.step(entry.kind, entry.batch, self.sizes[entry.kind])

    def _try(self, entry: _Entry) -> None:
        """Take a step on two pieces, and undo it: on one row each if it is in doubt whether fewer rows help at all,
        and if there are many pieces, since the update after the last of them may run out, too."""
        if entry.batch is None or self.good is None:
            return
        size = self.sizes[entry.kind]
        if self._is_in_doubt:
            self.sizes[entry.kind] = 1  # if that runs out nothing helps
            self.engine.step(entry.kind, part(entry.batch, 0, 2), 1)
            self.engine.load(self.good)
            self._is_in_doubt, self._one_row_fits = False, True
            self.sizes[entry.kind] = size
        elif row_count(entry.batch) // size >= _MANY_PIECES:
            self.engine.step(entry.kind, part(entry.batch, 0, 2 * size), size)
            self.engine.load(self.good, releases=False)

    def _split(self, entry: _Entry, failures: list[RanOut]) -> None:
        """Choose smaller pieces, or the same ones if it is not certain that memory ran out."""
        failure = failures[-1]
        self._deaths_here += 1
        if entry.batch is None:  # the process died between two steps
            if self._deaths_here > _MOST_BETWEEN_STEPS:
                raise ModelError("the process that trains ends again and again; nothing was lost up to the last copy")
            return
        if not failure.is_certain and self._deaths_here == 1:
            return
        if failure.is_update:
            raise ModelError(no_update_fits(failure.diagnosis.summary, self._model, self._since()))
        kind, rows = entry.kind, row_count(entry.batch)
        now = min(self.sizes[kind], rows)
        if now == 1:
            raise ModelError(nothing_fits(failure.diagnosis.summary, self._model, self._fitting, self._since()))
        obstacle = self._obstacle(kind)
        if len(failures) == 1:
            limit = failure.diagnosis.limit_bytes or allocator_limit()
            most = -(-now // (_LESS if self.recoveries else 2))  # the estimate was wrong before
            self._fitting = None if limit is None else self._ask(kind, entry.batch, most, limit)
        found = self._fitting
        if found is not None and found.is_impossible:  # a trial would take the allocator's ten seconds to say the same
            raise ModelError(nothing_fits(failure.diagnosis.summary, self._model, found, self._since()))
        if obstacle is not None and not self._may_differ:
            summary = failure.diagnosis.summary
            raise ModelError(cannot_divide(summary, obstacle, self._since(), found, is_spread=self._is_spread))
        size, how = self._chosen(rows, now, failures)
        self.sizes[kind] = size
        warn_user(
            f"a {'training' if kind == 'train' else 'validation'} step on {rows} rows ran out of memory "
            f"({failure.diagnosis.summary.rstrip('.')}); it is repeated in micro-batches of {size} rows{how}",
            RuntimeWarning,
        )
        if kind == "train":
            self._warn_uneven()

    def _chosen(self, rows: int, now: int, failures: list[RanOut]) -> tuple[int, str]:
        """Return the rows of the pieces to take next, and in words why.

        Each failure costs ten seconds at least. So one row is tried before anything else if it is in doubt whether
        fewer rows help, and taken if it went through and more rows did not. What ran out against the estimate is not
        just halved.
        """
        found, is_first = self._fitting, len(failures) == 1
        in_doubt = _is_stuck(failures) or (found is not None and found.is_in_doubt)
        self._is_in_doubt = in_doubt and not self._one_row_fits
        how = ", if fewer rows help at all: one row is tried first" if self._is_in_doubt else ""
        if is_first and found is not None and not found.is_hopeless:
            return even_rows(rows, found.rows), how or ", by the estimate"
        if found is not None and found.is_in_doubt and self._one_row_fits:
            return 1, how
        return -(-now // (2 if found is None else _LESS)), how

    def _ask(self, kind: str, batch: Any, most: int, limit: int) -> Fitting | None:
        """Estimate how many rows fit."""
        room = Room(limit, self.engine.other_bytes(state_bytes(self.good or {})))
        batch, replicas = first_replica(batch), self._model.distribute_strategy.num_replicas_in_sync
        accumulates = self._obstacle(kind) is None
        return estimate_fitting(self._model, kind, batch, max(1, most // replicas), room, accumulates=accumulates)

    def _obstacle(self, kind: str) -> str | None:
        return division_obstacle(self._model, kind, self._loss_reduction)

    def _since(self) -> int:
        """Return how many training steps there were since the last good copy."""
        return sum(old.kind == "train" for old in self._journal)

    def _warn_uneven(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            obstacle = self._obstacle("train")
            text = f"{obstacle}; {_OTHERWISE}" if obstacle else uneven_layers(self._model)
            if text is not None:
                warn_user(text, RuntimeWarning)


def _is_stuck(failures: list[RanOut]) -> bool:
    """Return whether the last two failures asked for as many bytes, whatever the rows."""
    asked = [each.diagnosis.requested_bytes for each in failures[-2:] if each.is_certain]
    return len(asked) == 2 and asked[0] is not None and asked[1] is not None and asked[1] >= asked[0]
