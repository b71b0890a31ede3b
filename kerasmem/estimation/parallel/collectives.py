"""What a compiled step sends between devices, read from XLA's own text of it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kerasmem.estimation.compiled.hlo import shape_bytes

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast")
_COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (\([^=]*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/")  # long tuples number their elements: /*index=5*/


@dataclass(frozen=True)
class Collective:
    """One kind of exchange: how many operations, the bytes that they put out on a device, and the largest's."""

    kind: str
    count: int
    bytes: int
    largest: int

    def __str__(self) -> str:
        largest = f", the largest {self.largest:,} B" if self.count > 1 else ""
        return f"{self.count} {self.kind} ({self.bytes:,} B{largest})"


def collectives(module: str) -> tuple[Collective, ...]:
    """Return the exchanges of an optimised module, those that move most first.

    An operation inside a loop counts once. An operation that only starts (`all-gather-start`) puts out its inputs
    beside its outputs; of those that is the larger part that counts.

    Example:
        >>> collectives("  %all-reduce.1 = f32[4,8]{1,0} all-reduce(%a), replica_groups={{0,1}}")
        (Collective(kind='all-reduce', count=1, bytes=128, largest=128),)
    """
    sizes: dict[str, list[int]] = {}
    for shape, kind, start in _COLLECTIVE.findall(_COMMENT.sub("", module)):
        sizes.setdefault(kind, []).append(_started(shape, kind) if start else shape_bytes(shape))
    found = (Collective(kind, len(each), sum(each), max(each)) for kind, each in sizes.items())
    return tuple(sorted(found, key=lambda each: -each.bytes))


def _started(shape: str, kind: str) -> int:
    """Return the bytes that come out of an operation whose shape lists what went in as well."""
    if kind == "all-reduce":  # done in place: the shape is the result's
        return shape_bytes(shape)
    parts = re.findall(r"[a-z]+\d*[a-z0-9]*\[[\d,]*\]", shape)
    half = len(parts) // 2
    return max(sum(map(shape_bytes, parts[:half])), sum(map(shape_bytes, parts[half : 2 * half])))
