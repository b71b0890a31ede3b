"""What the user says of the targets of a training step, where the loss does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.models.inputs import GivenShape, check_dtype, normalise_shapes

NO_TARGETS = "none"
_OPTION = "--target-shape"


@dataclass(frozen=True)
class GivenTargets:
    """What the user says of the targets.

    Attributes:
        shapes: name of the target ("" for the only one) → its shape without the batch; empty: as the loss takes them.
        dtype: of those that do not say it themselves; None: as the loss takes them.
        are_none: the step takes no targets.
    """

    shapes: Mapping[str, GivenShape] = field(default_factory=dict)
    dtype: str | None = None
    are_none: bool = False

    def options(self) -> dict[str, Any]:
        """Return the arguments of `given_targets` that say the same."""
        return {"target_shape": NO_TARGETS if self.are_none else self.shapes or None, "target_dtype": self.dtype}


BY_THE_LOSS = GivenTargets()


def given_targets(target_shape: Any = None, target_dtype: str | None = None) -> GivenTargets:
    """Return what `target_shape` and `target_dtype` say.

    Args:
        target_shape: None, a shape, a text, a list of texts or a dict from name to shape, without the batch; "none"
            where the step takes no targets.
        target_dtype: such as "int32".

    Raises:
        UsageError: they do not say that.
    """
    dtype = None if target_dtype is None else check_dtype(target_dtype, "--target-dtype")
    if target_shape in (NO_TARGETS, [NO_TARGETS], (NO_TARGETS,)):
        if dtype is not None:
            raise UsageError(f"{_OPTION} {NO_TARGETS} and --target-dtype: choose one")
        return GivenTargets(are_none=True)
    return GivenTargets(normalise_shapes(target_shape, _OPTION), dtype)
