"""Results of `kerasmem.advise`, in bytes, to and from JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerasmem.estimation.report import FITS, VERDICTS, Bytes, DeviceVerdict, ModelFacts, Settings, verdict_on
from kerasmem.estimation.search import Trial
from kerasmem.records import Record
from kerasmem.units import format_size


@dataclass(frozen=True)
class Remedy(Record, what="remedy", also=("saving", "saving_percent")):
    """One change, or several together, and the estimate of the changed step.

    Attributes:
        name: what is changed, in a few words.
        changes: kinds and values, as `Change.to_data` gives them.
        result: what becomes of the result: "same outputs", "same training trajectory", "same network, other
            rounding", "same network, other training", "other optimizer" or "other network".
        cost: what it costs in time, hardware or quality, in words.
        compute: the arithmetic of a step against now (1.33: a third more; the number of cards for several), at most.
        total: the predicted peak in bytes.
        low: the least that the estimator claims.
        high: the most; None where it knows no upper end.
        before: the peak without the change, by the same method.
        verdict: on the device: "fits", "does not fit", "too close to call".
        method: of the estimates.
        code: a complete script.
        stands_in: whether this machine's CPU stands in for the card, as in `Settings`.
        trial: real steps of it, whose verdict then counts; None where none were run.
    """

    name: str
    changes: tuple[Mapping[str, Any], ...]
    result: str
    cost: str
    compute: float
    total: int
    low: int | None
    high: int | None
    before: int
    verdict: str
    method: str
    code: str
    trial: Trial | None = None
    stands_in: bool = False

    @property
    def saving(self) -> int:
        """Bytes that the peak falls by."""
        return self.before - self.total

    @property
    def saving_percent(self) -> float:
        """The same as a share of the peak without the change, in per cent with two digits."""
        return round(100 * self.saving / self.before, 2) if self.before else 0.0


@dataclass(frozen=True)
class Considered:
    """A remedy that is not offered, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Advice(Record, Sequence[Remedy], what="advice", version=1, also=("verdict",), rows="remedies"):
    """What to do so that a model's training fits a device, or takes less: a sequence of remedies, the best first.

    Attributes:
        model: the model.
        settings: how it is trained now.
        need: what that takes, in bytes.
        device: and whether it fits.
        remedies: single changes that save memory, by bytes saved for each unit of arithmetic.
        plans: changes, single or combined, that fit, the least harmful first; where none does, the one that comes
            nearest. Empty where nothing needs to be done.
        considered: what is not offered, and why.
        notes: what else a reader should know.
        data_bytes: arrays that Keras keeps on the device, at most; `device.available_bytes` is the rest of it.
    """

    model: ModelFacts
    settings: Settings
    need: Bytes = field(metadata={"json": "bytes"})
    device: DeviceVerdict
    remedies: tuple[Remedy, ...] = ()
    plans: tuple[Remedy, ...] = ()
    considered: tuple[Considered, ...] = ()
    notes: tuple[str, ...] = ()
    data_bytes: int = 0

    @property
    def verdict(self) -> str:
        """Whether it fits as it is or with what is offered: "fits", "too close to call" or "does not fit"."""
        found = {self.device.verdict, *(each.verdict for each in (*self.remedies, *self.plans))}
        return next(each for each in VERDICTS if each in found)

    @property
    def fits(self) -> bool:
        """Whether it surely fits, as it is or with what is offered."""
        return self.verdict == FITS

    @property
    def peak(self) -> int:
        """The bytes in use at the peak of the step as it is."""
        return self.need.total

    @property
    def answer(self) -> str:
        """The answer: "fits 16GB with 4 micro-batches of 128: needs 9.61 GiB, of 14.9 GiB"."""
        device, chosen = self.device, None if self.device.fits or not self.plans else self.plans[0]
        verdict, how = (device.verdict, "") if chosen is None else (chosen.verdict, f" with {chosen.name}")
        needs = format_size(self.peak if chosen is None else chosen.total)
        on, room = verdict_on(verdict, device.name), format_size(device.available_bytes)
        return f"{self.model.name} {on}{how}: needs {needs}, of {room}"

    def __getitem__(self, index: Any) -> Any:
        """Return a remedy by its index, or several by a slice."""
        return self.remedies[index]

    def __len__(self) -> int:
        """Return the number of remedies."""
        return len(self.remedies)

    def __iter__(self) -> Iterator[Remedy]:
        """Iterate over the remedies, the best first."""
        return iter(self.remedies)
