"""What to do when a step runs out: back to a good copy, the steps since once more, the same batch in smaller pieces.

A step that fails may leave weights half updated, in graph mode too: the executor updates the last layers while it
still computes the gradients of the first. So there is always a copy on the host to go back to: one taken before
each step of shapes that have not been seen to fit, and one from time to time, with the batches since kept beside it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerasmem.devices.host import host_memory
from kerasmem.errors import ModelError
from kerasmem.records import Record
from kerasmem.training.model_state import ModelState
from kerasmem.training.model_state import byte_count as state_bytes
from kerasmem.training.steps.batches import byte_count, on_host, row_count, signature
from kerasmem.training.steps.engine import RanOut
from kerasmem.training.steps.remote import Engine
from kerasmem.units import GIB, format_size

WHOLE = sys.maxsize
JOURNAL_BYTES = GIB  # of batches kept on the host between two copies, or a twentieth of its free memory
JOURNAL_STEPS = 1000
_MOST_BETWEEN_STEPS = 3
_MOST_DEATHS = 40  # halving a batch of a billion rows takes 30


@dataclass(frozen=True)
class Recovery(Record, what="recovery"):
    """One time that a step ran out and was repeated.

    Attributes:
        step: number of the step since the run began, from 0.
        kind: "train" or "test".
        rows: rows of the batch.
        micro_batch_rows: rows of the pieces in which it then went through; None where it went through whole.
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
    """Takes steps on an engine, and takes them again where they ran out.

    Args:
        engine: where the steps run.
        micro_batches: pieces from the first batch on; None for whole batches until one runs out.
        sizes: rows of a piece in training ("train") and validation ("test"), where an earlier process knows them; for
            training they come before `micro_batches`.
        uneven: what to say, once, of layers for which pieces are not the same as the whole.
        may_stay: whether a failure that costs the process is dealt with here; else it is raised.
        good: a copy to go back to from the start.

    Attributes:
        good: the last good copy.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        micro_batches: int | None = None,
        sizes: Mapping[str, int | None] | None = None,
        uneven: str | None = None,
        may_stay: bool = True,
        good: ModelState | None = None,
    ) -> None:
        self.engine = engine
        known = dict(sizes or {})
        self.sizes = {kind: known.get(kind) or WHOLE for kind in ("train", "test")}
        self.recoveries: list[Recovery] = []
        self.steps = 0
        self._micro_batches = None if known.get("train") else micro_batches
        self._uneven = uneven
        self._may_stay = may_stay
        self.good = good
        self._room = min(JOURNAL_BYTES, host_memory().available_bytes // 20)
        self._journal: list[_Entry] = []
        self._bytes = 0
        self._proven: set[Any] = set()
        self._deaths_here = 0  # without a step in between and without a sign that it was memory

    def step(self, kind: str, batch: Any, rate: float | None = None) -> dict[str, Any]:
        """Train ("train") or evaluate ("test") a batch.

        Args:
            kind: which of them.
            batch: what Keras's iterator gave.
            rate: the learning rate, where it was changed since the step before.

        Raises:
            ModelError: one row at a time runs out too.
        """
        if kind == "train" and self._micro_batches:
            self.sizes[kind] = -(-row_count(batch) // self._micro_batches)
            self._micro_batches = None
        if kind == "train" and self.sizes[kind] < row_count(batch):
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
        """Note that an epoch or an evaluation begins, which resets the metrics."""
        if not has_happened:
            self._safely(_Entry("reset", None, None))
        self._journal.append(_Entry("reset", None, None))

    @property
    def size(self) -> int | None:
        """Rows of a piece, where batches are trained on in pieces."""
        return None if self.sizes["train"] == WHOLE else self.sizes["train"]

    def forget(self) -> None:
        """Have the next step begin with a copy: something else has changed the weights."""
        self.good = None

    def keep(self) -> ModelState:
        """Take a good copy now, and return it."""
        if self.good is None or self._journal:
            self.good, self._bytes = self._safely(_Entry("state", None, None)), 0
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

    def _safely(self, entry: _Entry) -> Any:
        """Do what an entry says; where it runs out go back, and do once more all since, until it goes through."""
        failures: list[RanOut] = []
        while True:
            try:
                if failures:
                    self._split(entry, failures[-1])
                    assert self.good is not None
                    self.engine.load(self.good)
                    self._proven.clear()
                    for old in self._journal:
                        self._take(old)
                done = self._take(entry)
                break
            except RanOut as failure:
                if failure.is_dead and not self._may_stay:
                    raise
                failures.append(failure)
        if failures and entry.batch is not None:
            rows, size = row_count(entry.batch), self.sizes[entry.kind]
            replayed = sum(old.kind == "train" for old in self._journal)
            summary = failures[0].diagnosis.summary
            self.recoveries.append(
                Recovery(self.steps, entry.kind, rows, size if size < rows else None, replayed, summary)
            )
        return done

    def _take(self, entry: _Entry) -> Any:
        if entry.kind == "state":
            return self.engine.state()
        if entry.kind == "reset":
            return self.engine.reset_metrics()
        if entry.rate is not None:
            self.engine.set_rate(entry.rate)
        return self.engine.step(entry.kind, entry.batch, self.sizes[entry.kind])

    def _split(self, entry: _Entry, failure: RanOut) -> None:
        """Choose smaller pieces; the same once more where it is not known that memory was short."""
        self._deaths_here += 1
        if entry.batch is None:  # the process died between two steps
            if self._deaths_here > _MOST_BETWEEN_STEPS:
                raise ModelError("the process that trains ends again and again; nothing was lost up to the last copy")
            return
        if self._deaths_here > _MOST_DEATHS:
            raise ModelError(f"the same step failed {self._deaths_here} times: {_nothing_fits(failure)}")
        if not failure.is_certain and self._deaths_here == 1:
            return
        rows = row_count(entry.batch)
        now = min(self.sizes[entry.kind], rows)
        if now == 1:
            raise ModelError(_nothing_fits(failure))
        self.sizes[entry.kind] = -(-now // 2)
        warnings.warn(
            f"a {'training' if entry.kind == 'train' else 'validation'} step on {rows} rows ran out of memory "
            f"({failure.diagnosis.summary.rstrip('.')}); it is repeated from a copy of the state before it "
            f"({format_size(state_bytes(self.good or {}))}), in micro-batches of {self.sizes[entry.kind]} rows",
            RuntimeWarning,
            stacklevel=2,
        )
        if entry.kind == "train":
            self._warn_uneven()

    def _warn_uneven(self) -> None:
        if self._uneven:
            warnings.warn(self._uneven, RuntimeWarning, stacklevel=2)
        self._uneven = None


def _nothing_fits(failure: RanOut) -> str:
    """Return the message where smaller pieces cannot help any more."""
    found = failure.diagnosis
    ways = "".join(f"\n  - {each.what}: {each.why}" for each in found.suggestions)
    return (
        f"not even one row at a time fits: {found.summary}\nWeights and optimizer alone are too large for what there "
        f"is, or something else holds the memory. The model is as it was before the step.{ways}"
    )
