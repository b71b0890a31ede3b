"""XLA: programs that do not fit, with the buffers at their peak; TPU memory.

The forms are those of XLA's buffer assignment and of the error codes documented at openxla.org/xla/errors.
"""

from __future__ import annotations

import re

from kerasmem.diagnosis.rules import Finding, Rule, counted, named_facts, reader, rule, shaped, sized

_BUFFER = rf"(?P<dtype>[a-z]{{1,4}}\d{{0,3}})\[{shaped('tensor_shape')}\]"
_NO_ROOM = (
    rf"Attempting to (?:allocate|reserve) {sized('requested_bytes')}.{{0,60}}not possible\. "
    rf"There (?:are|is) {sized('free_bytes')} free"
)
_EXCEEDS = (
    rf"Allocation \(size={counted('requested_bytes')}\) would exceed memory \(size={counted('limit_bytes')}\)"
    rf"(?:.{{0,200}}?{_BUFFER})?"
)


@reader(
    "emory space",
    r"Ran out of memory in memory space (?P<space>\w{1,16})"
    rf"(?:\. Used {sized('requested_bytes')} of {sized('limit_bytes')})?",
)
def _space(match: re.Match[str]) -> Finding:
    facts = named_facts(match)
    what = "hbm" if facts.pop("space").lower() == "hbm" else "vmem"
    return Finding("failure", "xla", what, {**facts, "device": "TPU"})


@reader(
    "usage",
    rf"TensorCore Hbm usage: {sized('tensor')}, SparseCore Hbm usage:? {sized('sparse')}, "
    rf"exceeding available bytes: {sized('limit_bytes')}",
)
def _cores(match: re.Match[str]) -> Finding:
    facts = named_facts(match)
    requested = sum(facts.pop(core) or 0 for core in ("tensor", "sparse"))
    return Finding("failure", "xla", "hbm", {**facts, "requested_bytes": requested, "device": "TPU"})


RULES: tuple[Rule, ...] = (
    rule(
        "trying to allocate",
        rf"Out of memory while trying to allocate {sized('requested_bytes')}",
        "failure",
        "xla",
        "program",
    ),
    _space,
    _cores,
    rule("ttempting to", _NO_ROOM, "failure", "xla", "hbm", device="TPU"),
    rule("would exceed memory", _EXCEEDS, "failure", "xla", "hbm", device="TPU"),
    rule("op_name", r"op_name=\"(?P<operation>[^\"]{1,400})\"", "detail", "xla", "buffer"),
    rule("Shape:", rf"^\s*Shape: {_BUFFER}", "detail", "xla", "buffer"),
)
