"""What `kerasmem.advise` found: frozen results in bytes, to and from JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from kerasmem.errors import InputError, check_format
from kerasmem.estimation.report import Bytes, DeviceVerdict, ModelFacts, Settings
from kerasmem.estimation.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Remedy:
    """One change, or several together, and what the estimator says of the changed model and step.

    Attributes:
        name: what is changed, in a few words.
        changes: kinds and values, as `Change.to_dict` gives them.
        result: what becomes of the result: "same training trajectory", "same network, other rounding", "same network,
            other training", "other optimizer" or "other network".
        cost: what it costs in time, hardware or quality, in words.
        compute: the arithmetic of a step against now (1.33: a third more; the number of cards for several), at most.
        total: the predicted peak in bytes.
        low: the least that the estimator claims.
        high: the most; None where it knows no upper end.
        before: the peak without the change, by the same method.
        verdict: on the device: "fits", "does not fit", "too close to call".
        method: of the estimates.
        code: a complete script.
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

    @property
    def saving(self) -> int:
        """Bytes that the peak falls by."""
        return self.before - self.total

    @property
    def saving_percent(self) -> float:
        """The same as a share of the peak without the change, in per cent."""
        return 100 * self.saving / self.before if self.before else 0.0

    @property
    def worth(self) -> float:
        """Bytes saved for each unit of arithmetic that a step then takes: what remedies are ranked by."""
        return self.saving / self.compute

    def to_dict(self) -> dict[str, Any]:
        """Return the remedy as JSON-ready data."""
        data = asdict(self)
        data["changes"] = [dict(each) for each in self.changes]
        return {**data, "saving": self.saving, "saving_percent": round(self.saving_percent, 2)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Remedy:
        """Read what `to_dict` gave."""
        names = ("name", "result", "cost", "compute", "total", "low", "high", "before", "verdict", "method", "code")
        return cls(changes=tuple(dict(each) for each in data["changes"]), **{name: data[name] for name in names})


@dataclass(frozen=True)
class Considered:
    """A remedy that is not offered, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Advice(Sequence[Remedy]):
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
    """

    model: ModelFacts
    settings: Settings
    need: Bytes
    device: DeviceVerdict
    remedies: tuple[Remedy, ...] = ()
    plans: tuple[Remedy, ...] = ()
    considered: tuple[Considered, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether it fits as it is or with what is offered: "fits", "too close to call" or "does not fit"."""
        found = {self.device.verdict, *(each.verdict for each in (*self.remedies, *self.plans))}
        return next(each for each in (FITS, TOO_CLOSE, DOES_NOT_FIT) if each in found)

    @overload
    def __getitem__(self, place: int) -> Remedy: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Remedy, ...]: ...

    def __getitem__(self, place: int | slice) -> Remedy | tuple[Remedy, ...]:
        """Return a remedy by its place."""
        return self.remedies[place]

    def __len__(self) -> int:
        """Return the number of remedies."""
        return len(self.remedies)

    def __iter__(self) -> Iterator[Remedy]:
        """Iterate over the remedies, the best first."""
        return iter(self.remedies)

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as JSON-ready data, sizes in integer bytes."""
        return {
            "format_version": FORMAT_VERSION,
            "model": asdict(self.model),
            "settings": asdict(self.settings),
            "bytes": asdict(self.need),
            "device": asdict(self.device),
            "verdict": self.verdict,
            "remedies": [each.to_dict() for each in self.remedies],
            "plans": [each.to_dict() for each in self.plans],
            "considered": [asdict(each) for each in self.considered],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Advice:
        """Read what `to_dict` gave.

        Raises:
            InputError: it is no such result, or of a later format.
        """
        check_format("advice", data, FORMAT_VERSION)
        try:
            return cls(
                ModelFacts(**data["model"]),
                Settings(**data["settings"]),
                Bytes(**data["bytes"]),
                DeviceVerdict(**data["device"]),
                tuple(Remedy.from_dict(each) for each in data["remedies"]),
                tuple(Remedy.from_dict(each) for each in data["plans"]),
                tuple(Considered(**each) for each in data["considered"]),
                tuple(data["notes"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"advice: not a kerasmem result ({type(error).__name__}: {error})") from error


def ranked(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """Return remedies by bytes saved for each unit of arithmetic, the most first."""
    return tuple(sorted(remedies, key=lambda each: -each.worth))
