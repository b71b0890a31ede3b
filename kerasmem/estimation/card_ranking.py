"""`kerasmem.rank_cards`: the cards that a training step fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Unpack

from kerasmem.devices.catalogue import all_cards, find_card
from kerasmem.errors import UsageError
from kerasmem.estimation.estimating import EstimateSession
from kerasmem.estimation.methods import METHODS
from kerasmem.estimation.report import FITS, VERDICTS, MemoryReport, verdict
from kerasmem.models.spec import StepSettings, StepSpec, shows_settings
from kerasmem.records import Record

_FIRST = "t4"  # with a card named, `auto` plans for a GPU


@dataclass(frozen=True)
class RankedCard:
    """A card, and the memory that a step needs on it.

    Attributes:
        key: the card's name for `--device`.
        name: the card's full name.
        available_bytes: bytes available to TensorFlow's allocator.
        needs: bytes at the peak.
        high: upper end of the bytes, or None if unknown.
        verdict: "fits", "too close to call" or "does not fit".
    """

    key: str
    name: str
    available_bytes: int
    needs: int
    high: int | None
    verdict: str


@dataclass(frozen=True)
class CardRanking(Record, what="card ranking", version=1, rows="cards"):
    """The cards of the catalogue for one training step.

    Attributes:
        report: the first estimate, without a device.
        cards: all cards, those that fit first, then by available memory.
    """

    report: MemoryReport
    cards: tuple[RankedCard, ...]

    @property
    def best(self) -> RankedCard | None:
        """The smallest card that fits, or None."""
        return self.cards[0] if self.cards and self.cards[0].verdict == FITS else None

    @property
    def fits(self) -> bool:
        """Whether the step surely fits a card."""
        return self.best is not None

    @property
    def peak(self) -> int:
        """The bytes in use at the step's peak, by the first estimate."""
        return self.report.peak

    @property
    def answer(self) -> str:
        """A summary: "fits 31 of 38 known cards, first Tesla T4"."""
        fitting = sum(card.verdict == FITS for card in self.cards)
        first = "" if self.best is None else f", first {self.best.name}"
        return f"{self.report.model.name} fits {fitting} of {len(self.cards)} known cards{first}"


@shows_settings("device")
def rank_cards(model: Any, **settings: Unpack[StepSettings]) -> CardRanking:
    """Rank the catalogue's cards by whether a training step fits.

    One estimate serves all cards. If the method depends on the card (`gpu-target`, `graph`), one serves each kind of
    card.

    Args:
        model: as for `kerasmem.estimate`.
        **settings: as for `kerasmem.estimate`, except `device`.

    Returns:
        A `CardRanking`; sizes in bytes.

    Raises:
        UsageError: If an argument is wrong.
        KerasmemError: As `kerasmem.estimate`.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> kerasmem.rank_cards(model, method="formula").best.verdict
        'fits'
    """
    spec = StepSpec(model, **settings)
    if spec.device is not None:
        raise UsageError("device: rank_cards estimates for all cards; kerasmem.estimate takes a device")
    spec = replace(spec, device=_FIRST)
    with EstimateSession(spec) as session:
        first = session.estimate()
        kind_of = METHODS[first.settings.method].card_part
        kinds = {kind_of(card.compute_capability): card.key for card in reversed(all_cards())}
        # XLA's compiler does not know every card of the catalogue. For the others "auto" chooses another method.
        method = spec.method if first.settings.method == "gpu-target" else first.settings.method
        planned = {kind_of(find_card(_FIRST).compute_capability): first}
        ranked = []
        for card in all_cards():
            kind = kind_of(card.compute_capability)
            if kind not in planned:
                planned[kind] = session.estimate(method=method, device=kinds[kind])
            need, available = planned[kind].bytes, card.available_bytes
            fits = verdict(need, *card.limits)
            ranked.append(RankedCard(card.key, card.name, available, need.total, need.most_needed, fits))
    ranked.sort(key=lambda card: (VERDICTS.index(card.verdict), card.available_bytes))
    return CardRanking(replace(first, device=None), tuple(ranked))
