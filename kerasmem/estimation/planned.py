"""A plan of XLA's as requests to the allocator, and what lives at its peak by category and layer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kerasmem.estimation.gpu_target.hlo import LiveBuffer
from kerasmem.models.op_names import CATEGORIES


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
