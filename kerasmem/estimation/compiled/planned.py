"""A plan of XLA's as requests to the allocator, and what lives at its peak by category and layer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.compiled.hlo import BACKWARD, OPTIMIZER, LiveBuffer
from kerasmem.models.op_names import CATEGORIES, Instant
from kerasmem.units import GIB

Weights = Mapping[str, Sequence[tuple[int, str | None]]]  # by group: each weight's bytes and the row that counts it

DEFAULT_TIMEOUT = 600.0
DEFAULT_MEMORY_LIMIT = 8 * GIB
# A process that compiles must reach no GPU, no other backend, and no settings meant for the program that the user
# trains with.
ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


def requests(arguments: Mapping[str, Sequence[int]], returned: int, temporary: int) -> list[tuple[int, int]]:
    """Return what is asked of the allocator, one after another: a number and bytes.

    Args:
        arguments: sizes of the step's arguments, by group.
        returned: bytes of what it returns and no argument lends it.
        temporary: bytes of everything in between.
    """
    groups = ("trainable", "non_trainable", "metrics", "optimizer", "inputs")
    sizes = [size for group in groups for size in arguments.get(group, ())]
    sizes += [size for size in (returned, temporary) if size > 0]
    return list(enumerate(sizes))


def allocated(asked: Sequence[tuple[int, int]]) -> BFCAllocator:
    """Return the allocator after all of this was asked of it."""
    allocator = BFCAllocator()
    for _, size in asked:
        allocator.allocate(size)
    return allocator


def row_of(path: str | None, rows: frozenset[str]) -> str | None:
    """Return the deepest row that a path of layers leads through; the path itself where no rows are known."""
    if path is None or not rows:
        return path
    parts = path.split("/")
    return next((row for end in range(len(parts), 0, -1) if (row := "/".join(parts[:end])) in rows), None)


def divide(
    arguments: Mapping[str, Sequence[int]], live: Sequence[LiveBuffer], within: int, rows: frozenset[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes at the peak by category, and by layer without its weights.

    Args:
        arguments: sizes of the step's arguments, by group.
        live: what has memory at the peak, the largest first.
        within: bytes of the plan beside the arguments; what is not known of them is workspace.
        rows: names of the layers in the report.
    """
    groups = {name: sum(sizes) for name, sizes in arguments.items()}
    categories = {
        "weights": groups.get("trainable", 0) + groups.get("non_trainable", 0) + groups.get("metrics", 0),
        "optimizer": groups.get("optimizer", 0),
        "gradients": 0,
        "activations": 0,
        "inputs": groups.get("inputs", 0),
        "workspace": 0,
    }
    layers: Counter[str] = Counter()
    known = 0
    for each in live:
        if each.phase is None:  # an argument, counted above
            continue
        if known + each.bytes > within:
            break
        known += each.bytes
        categories[CATEGORIES[each.phase]] += each.bytes
        if (row := row_of(each.layer, rows)) is not None:
            layers[row] += each.bytes
    categories["workspace"] += within - known
    return categories, dict(layers)


def add_weights(
    layers: dict[str, int], weights: Weights, whole: Mapping[str, Sequence[int]], held: Mapping[str, Sequence[int]]
) -> None:
    """Add to the layers what a device has of their weights, where the plan has the same ones.

    Args:
        layers: bytes by layer; changed.
        weights: of the model, in its order.
        whole: by group the bytes of the plan's weights.
        held: and what the device has of each.
    """
    for group, known in weights.items():
        if [size for size, _ in known] != list(whole.get(group, ())):
            continue
        for (_, row), size in zip(known, held[group], strict=True):
            if row is not None:
                layers[row] = layers.get(row, 0) + size


def with_row(instant: Instant | None, rows: frozenset[str]) -> Instant | None:
    """Return an instant whose layer is a row of the report."""
    if instant is None or row_of(instant.layer, rows) == instant.layer:
        return instant
    return instant_of(instant.operation, row_of(instant.layer, rows), instant.phase)


def instant_of(operation: str, layer: str | None, phase: str | None) -> Instant:
    """Return the moment at which an operation runs, with its words for people."""
    what = layer or operation.rpartition("/")[2]
    text = f"while computing the gradient of {what}" if phase == BACKWARD else f"while computing {what}"
    if phase == OPTIMIZER:
        text = "while the optimizer updates the weights"
    return Instant(text, operation, layer, phase)
