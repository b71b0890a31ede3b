"""The best-fit-with-coalescing allocator of TensorFlow and JAX: its warning, its dump, its statistics.

The forms are those of bfc_allocator.cc and allocator.cc, with sizes in bytes up to TensorFlow 2.20 ("Limit:
15703311680") and with units after it ("Limit: 64.00MiB").
"""

from __future__ import annotations

import re

from kerasmem.diagnosis.families.tensorflow import device_name
from kerasmem.diagnosis.rules import Finding, Rule, counted, named_facts, reader, rule, sized


@reader(
    "ran out of",
    r"Allocator \((?P<allocator>[\w.\-]{1,80})\) ran out of memory trying to allocate "
    rf"{sized('requested_bytes')}(?: ?\(rounded to {counted('rounded')}\))?"
    r"(?: ?requested by op (?P<operation>[\w.\-/>]{1,400}))?",
)
def _warning(match: re.Match[str]) -> Finding:
    facts = named_facts(match)
    return Finding("failure", "tensorflow", "bfc", {**facts, "device": device_name(facts["allocator"])})


_STATISTICS = {
    "Limit": "limit_bytes",
    "InUse": "in_use_bytes",
    "Reserved": "reserved_stat",
    "LargestFreeBlock": "largest_stat",
}


def _statistic(match: re.Match[str]) -> Finding | None:
    facts = {name: value for name, value in named_facts(match).items() if value}
    return Finding("detail", "tensorflow", "statistic", facts) if facts else None


_IN_USE = rf"Sum Total of in-use chunks: {sized('in_use_bytes')}"
_POOL = rf"(?:total_region_allocated_bytes_|Total size in pool): {sized('pool')} memory_limit_: {sized('limit_bytes')}"
_FREE = rf"Free  ?at (?:0x)?[0-9a-f]{{1,16}} of size {counted('free_piece')}"
RULES: tuple[Rule, ...] = (
    _warning,
    *(
        reader(name + ":", rf"(?:^|\s){name}: {{1,60}}{sized(fact)}\s*$")(_statistic)
        for name, fact in _STATISTICS.items()
    ),
    rule("Sum Total", _IN_USE, "detail", "tensorflow", "statistic"),
    rule("in pool", _POOL, "detail", "tensorflow", "statistic"),
    rule("total_region", _POOL, "detail", "tensorflow", "statistic"),
    rule("Free ", _FREE, "detail", "tensorflow", "chunk"),
    # lines that say only that the dump goes on
    *(
        rule(text, "^(?:\\d{1,9} )?" + re.escape(text), "detail", "tensorflow", "chunk")
        for text in ("InUse at", "Chunk at", "Bin (", "Next region of", "Chunks of size")
    ),
)
