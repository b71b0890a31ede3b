"""Where a model stands among networks that people know, all by the formula. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from kerasmem.estimation.report import MemoryReport
from kerasmem.files import package_data


@dataclass(frozen=True)
class Reference:
    """The known networks next to a model.

    Attributes:
        below: (name, bytes) of the largest that takes no more; None where all take more.
        above: (name, bytes) of the smallest that takes more; None where none does.
        batch_size: at which all of them are counted.
    """

    below: tuple[str, int] | None
    above: tuple[str, int] | None
    batch_size: int


def known_networks() -> tuple[tuple[str, int, int], ...]:
    """Return networks that people know: name, parameters, activation elements for one sample.

    Images of 224 × 224 × 3, 1000 classes; AlexNet as one tower, GoogLeNet without its auxiliary outputs.
    `scripts/known_networks.py` writes the file.
    """
    found = package_data("kerasmem.estimation", "known_networks")
    return tuple((name, parameters, elements) for name, parameters, elements in found)


def place(report: MemoryReport) -> Reference:
    """Return the known networks that take a little less and a little more than a model, at its batch and mode.

    Examples:
        >>> known_networks()[0][0]
        'AlexNet'
    """
    batch, size = report.settings.batch_size, report.formula.copies * 4
    known = sorted(((name, size * (parameters + batch * elements)) for name, parameters, elements in known_networks()),
                   key=lambda each: each[1])  # fmt: skip
    total = report.formula.total_bytes
    return Reference(
        below=next((each for each in reversed(known) if each[1] <= total), None),
        above=next((each for each in known if each[1] > total), None),
        batch_size=batch,
    )
