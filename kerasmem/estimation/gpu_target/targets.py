"""A card as XLA's compiler wants it described: `GpuTargetConfigProto` in text form."""

from __future__ import annotations

from kerasmem.devices.cards import Card
from kerasmem.devices.gpu_specs import (
    BLOCK_LIMITS,
    GRID_LIMITS,
    REGISTERS_PER_SM,
    SHARED_MEMORY_PER_BLOCK,
    THREADS_PER_BLOCK,
    THREADS_PER_WARP,
    capability_specs,
    card_specs,
    has_spec,
)
from kerasmem.errors import UsageError

# What the step would run with; they choose among kernels, and no buffer depends on them that was found to.
_CUDNN = (9, 10, 0)
_CUDA = (12, 8, 0)


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

    Args:
        card: a row of the catalogue.
        memory_bytes: the memory to plan for, in place of the card's own.

    Raises:
        UsageError: the card's hardware figures are not known.
    """
    check_target(card)
    shared, own = capability_specs()[card.compute_capability], card_specs()[card.key]
    major, minor = card.compute_capability
    info: dict[str, object] = {
        "threads_per_block_limit": THREADS_PER_BLOCK,
        "threads_per_warp": THREADS_PER_WARP,
        "shared_memory_per_block": SHARED_MEMORY_PER_BLOCK,
        "shared_memory_per_core": shared.shared_memory_per_sm,
        "shared_memory_per_block_optin": shared.shared_memory_per_block,
        "threads_per_core_limit": shared.threads_per_sm,
        "core_count": own.sms,
        "fpus_per_core": shared.fpus_per_sm,
        **{f"block_dim_limit_{axis}": limit for axis, limit in zip("xyz", GRID_LIMITS, strict=True)},
        **{f"thread_dim_limit_{axis}": limit for axis, limit in zip("xyz", BLOCK_LIMITS, strict=True)},
        "memory_bandwidth": own.bandwidth,
        "l2_cache_size": own.l2_bytes,
        "clock_rate_ghz": own.clock_ghz,
        "device_memory_size": card.memory_bytes if memory_bytes is None else memory_bytes,
        "registers_per_core_limit": REGISTERS_PER_SM,
        "registers_per_block_limit": REGISTERS_PER_SM,
    }
    extension = " feature_extension: ACCELERATED_FEATURES" if shared.is_accelerated else ""
    lines = [f"  {name}: {value}" for name, value in info.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}")
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info {{ major: {} minor: {} patch: {} }}".format(*_CUDNN),
            "runtime_version {{ major: {} minor: {} patch: {} }}".format(*_CUDA),
            f'device_description_str: "{card.name}"',
            "",
        ]
    )
