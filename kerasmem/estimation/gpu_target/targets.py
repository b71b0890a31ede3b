"""A card as XLA's compiler wants it described: `GpuTargetConfigProto` in text form."""

from __future__ import annotations

from importlib import resources
from string import Template

from kerasmem.devices.cards import Card
from kerasmem.devices.gpu_specs import capability_specs, card_specs, has_spec
from kerasmem.errors import UsageError


def check_target(card: Card) -> None:
    """Raise UsageError, with the way out, unless XLA's compiler can be told of the card."""
    if not has_spec(card):
        raise UsageError(
            f"gpu-target does not know {card.name} (compute capability {'{}.{}'.format(*card.compute_capability)}): "
            "its hardware figures are not in kerasmem's catalogue, which begins at compute capability 7.0; "
            "use method='xla' or 'graph'"
        )


def target_text(card: Card, memory_bytes: int | None = None) -> str:
    """Return the target configuration of a card.

    What stands as a number in `data/gpu_target.txtpb` is the same on every card since compute capability 7.0
    (`devices.gpu_specs.CAPABILITIES_ADDRESS`), but the versions of cuDNN and CUDA: those that the step would run with,
    which choose among kernels, and no buffer depends on them that was found to.

    Args:
        card: a row of the catalogue.
        memory_bytes: the memory to plan for, in place of the card's own.

    Raises:
        UsageError: the card's hardware figures are not known.
    """
    check_target(card)
    shared = capability_specs()[card.compute_capability]
    major, minor = card.compute_capability
    text = resources.files("kerasmem.estimation").joinpath("data/gpu_target.txtpb").read_text("utf-8")
    return Template(text).substitute(
        {**vars(shared), **vars(card_specs()[card.key])},
        memory_bytes=card.memory_bytes if memory_bytes is None else memory_bytes,
        major=major,
        minor=minor,
        extension=" feature_extension: ACCELERATED_FEATURES" if shared.is_accelerated else "",
        name=card.name,
    )
