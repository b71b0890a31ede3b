"""What goes onto a page."""

from __future__ import annotations

from dataclasses import dataclass

from kerasmem.monitoring.digest import LogSummary
from kerasmem.monitoring.merging import Training
from kerasmem.rendering.composition import Composition


@dataclass(frozen=True)
class PageContents:
    """Results for one page.

    Attributes:
        trainings: what was logged, ranks together.
        compositions: estimates and profiles.
        title: of the page.
    """

    trainings: tuple[Training, ...]
    compositions: tuple[Composition, ...]
    title: str = "Memory report"

    @property
    def logs(self) -> tuple[LogSummary, ...]:
        """Every log of every training."""
        return tuple(log for training in self.trainings for log in training.logs)

    @property
    def estimates(self) -> tuple[Composition, ...]:
        """Those that were estimated."""
        return tuple(each for each in self.compositions if not each.is_measured)

    @property
    def profiles(self) -> tuple[Composition, ...]:
        """Those that were measured."""
        return tuple(each for each in self.compositions if each.is_measured)

    def profile_for(self, estimate: Composition) -> Composition | None:
        """Return the profile that shares the most layers with an estimate; None where none shares any."""
        names = {layer.name for layer in estimate.layers if layer.bytes is not None}
        shared = [len(names & {layer.name for layer in p.layers if layer.bytes is not None}) for p in self.profiles]
        most = max(shared, default=0)
        return self.profiles[shared.index(most)] if most else None
