"""The best-fit-with-coalescing allocator of TensorFlow and JAX: its warning, its dump, its statistics.

The forms are those of bfc_allocator.cc and allocator.cc, with sizes in bytes up to TensorFlow 2.20 ("Limit:
15703311680") and with units after it ("Limit: 64.00MiB").
"""

from __future__ import annotations

import re

from kerasmem.diagnosis.clues import SIZE, Clue, Rule, rule, says, size
from kerasmem.diagnosis.families.tensorflow import device_name


@rule(
    "ran out of",
    rf"Allocator \(([\w.\-]{{1,80}})\) ran out of memory trying to allocate {SIZE}"
    r"(?: ?\(rounded to (\d{1,20})\))?(?: ?requested by op ([\w.\-/>]{1,400}))?",
)
def _warning(match: re.Match[str]) -> Clue:
    return Clue(
        "failure",
        "tensorflow",
        "bfc",
        {
            "requested_bytes": size(match[2], match[3]),
            "rounded": size(match[4]),
            "operation": match[5],
            "device": device_name(match[1]),
            "allocator": match[1],
        },
    )


_FIELDS = {
    "Limit": "limit_bytes",
    "InUse": "in_use_bytes",
    "Reserved": "reserved_stat",
    "LargestFreeBlock": "largest_stat",
}


def _statistic(match: re.Match[str]) -> Clue | None:
    value = size(match[2], match[3])
    return Clue("detail", "tensorflow", "statistic", {_FIELDS[match[1]]: value}) if value else None


@rule("Sum Total", rf"Sum Total of in-use chunks: {SIZE}")
def _in_use(match: re.Match[str]) -> Clue:
    return Clue("detail", "tensorflow", "statistic", {"in_use_bytes": size(match[1], match[2])})


@rule("in pool", rf"(?:total_region_allocated_bytes_|Total size in pool): {SIZE} memory_limit_: {SIZE}")
def _pool(match: re.Match[str]) -> Clue:
    facts = {"pool": size(match[1], match[2]), "limit_bytes": size(match[3], match[4])}
    return Clue("detail", "tensorflow", "statistic", facts)


@rule("total_region", _pool.pattern.pattern)
def _old_pool(match: re.Match[str]) -> Clue | None:
    return _pool.read(match)


@rule("Free ", r"Free  ?at (?:0x)?[0-9a-f]{1,16} of size (\d{1,20})")
def _free_piece(match: re.Match[str]) -> Clue:
    return Clue("detail", "tensorflow", "chunk", {"free_piece": size(match[1])})


RULES: tuple[Rule, ...] = (
    _warning,
    *(rule(name + ":", rf"(?:^|\s)({name}): {{1,60}}{SIZE}\s*$")(_statistic) for name in _FIELDS),
    _in_use,
    _pool,
    _old_pool,
    _free_piece,
    # lines that say only that the dump goes on
    *(
        says(text, "^(?:\\d{1,9} )?" + re.escape(text), "detail", "tensorflow", "chunk")
        for text in ("InUse at", "Chunk at", "Bin (", "Next region of", "Chunks of size")
    ),
)
