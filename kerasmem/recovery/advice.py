"""Results of `kerasmem.advise`, in bytes."""

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
        name: the changes in a few words.
        changes: kinds and values, as from `Change.to_data`.
        result: effect on the result: "same outputs", "same training trajectory", "same network, other rounding", "same
            network, other training", "other optimizer" or "other network".
        cost: cost in time, hardware or quality, in words.
        compute: maximum arithmetic of a step relative to now (1.33: a third more); for several cards their number.
        total: predicted peak in bytes.
        low: lower end of the estimate in bytes.
        high: upper end of the estimate in bytes; None if unknown.
        before: predicted peak without the change, by the same method.
        verdict: verdict on the device: "fits", "does not fit", "too close to call".
        method: method of the estimates.
        code: Python code that makes the changes.
        stands_in: whether this machine's CPU stands in for the card, as in `Settings`.
        trial: result of real steps, which sets the verdict; None if none were run.
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
        """The saving in percent of the peak without the change, with two digits."""
        return round(100 * self.saving / self.before, 2) if self.before else 0.0


@dataclass(frozen=True)
class Considered:
    """A remedy that is not offered, and the reason."""

    name: str
    why: str


@dataclass(frozen=True)
class Advice(Record, Sequence[Remedy], what="advice", version=1, also=("verdict",), rows="remedies"):
    """Remedies that make a model's training fit a device or need less memory, the best first.

    Attributes:
        model: the model.
        settings: settings of the training now.
        need: memory of the training now, in bytes.
        device: the device, and whether the training fits.
        remedies: single changes that save memory, those with the most bytes saved per unit of arithmetic first.
        plans: single or combined changes that fit, the least harmful first; if none fits, the nearest. Empty if the
            training fits.
        considered: remedies that are not offered, with the reason.
        notes: remarks for the reader.
        data_bytes: maximum of arrays that Keras keeps on the device; `device.available_bytes` excludes them.
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
        """The best verdict with or without a remedy: "fits", "too close to call" or "does not fit"."""
        reached = {self.device.verdict, *(remedy.verdict for remedy in (*self.remedies, *self.plans))}
        return next(verdict for verdict in VERDICTS if verdict in reached)

    @property
    def fits(self) -> bool:
        """Whether the verdict is "fits"."""
        return self.verdict == FITS

    @property
    def peak(self) -> int:
        """Bytes in use at the peak of the current step."""
        return self.need.total

    @property
    def answer(self) -> str:
        """The answer: "resnet fits 16GB with 4 micro-batches of 128: needs 9.61 GiB, of 14.9 GiB"."""
        device, plan = self.device, None if self.device.fits or not self.plans else self.plans[0]
        verdict, how = (device.verdict, "") if plan is None else (plan.verdict, f" with {plan.name}")
        needs = format_size(self.peak if plan is None else plan.total)
        on, available = verdict_on(verdict, device.name), format_size(device.available_bytes)
        return f"{self.model.name} {on}{how}: needs {needs}, of {available}"

    def __getitem__(self, index: Any) -> Any:
        """Return a remedy by its index, or several by a slice."""
        return self.remedies[index]

    def __len__(self) -> int:
        """Return the number of remedies."""
        return len(self.remedies)

    def __iter__(self) -> Iterator[Remedy]:
        """Iterate over the remedies, the best first."""
        return iter(self.remedies)
