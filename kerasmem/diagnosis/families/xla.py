"""XLA: programs that do not fit, with the buffers at their peak; TPU memory.

The forms are those of XLA's buffer assignment and of the error codes documented at openxla.org/xla/errors.
"""

from __future__ import annotations

import re

from kerasmem.diagnosis.clues import SIZE, Clue, Rule, rule, shape, size


@rule("trying to allocate", rf"Out of memory while trying to allocate {SIZE}")
def _allocation(match: re.Match[str]) -> Clue:
    return Clue("failure", "xla", "program", {"requested_bytes": size(match[1], match[2])})


@rule("emory space", rf"Ran out of memory in memory space (\w{{1,16}})(?:\. Used {SIZE} of {SIZE})?")
def _tpu(match: re.Match[str]) -> Clue:
    space = match[1].lower()
    facts = {"requested_bytes": size(match[2], match[3]), "limit_bytes": size(match[4], match[5]), "device": "TPU"}
    return Clue("failure", "xla", "hbm" if space == "hbm" else "vmem", facts)


@rule("usage", rf"TensorCore Hbm usage: {SIZE}, SparseCore Hbm usage:? {SIZE}, exceeding available bytes: {SIZE}")
def _cores(match: re.Match[str]) -> Clue:
    parts = (size(match[1], match[2]), size(match[3], match[4]))
    facts = {"requested_bytes": sum(each or 0 for each in parts), "limit_bytes": size(match[5], match[6])}
    return Clue("failure", "xla", "hbm", {**facts, "device": "TPU"})


@rule("ttempting to", rf"Attempting to (?:allocate|reserve) {SIZE}.{{0,60}}not possible\. There (?:are|is) {SIZE} free")
def _no_room(match: re.Match[str]) -> Clue:
    facts = {"requested_bytes": size(match[1], match[2]), "free_bytes": size(match[3], match[4]), "device": "TPU"}
    return Clue("failure", "xla", "hbm", facts)


@rule("would exceed memory", r"Allocation \(size=(\d{1,20})\) would exceed memory \(size=(\d{1,20})\)(.{0,200})")
def _exceeds(match: re.Match[str]) -> Clue:
    facts = {"requested_bytes": size(match[1]), "limit_bytes": size(match[2]), "device": "TPU", **_shaped(match[3])}
    return Clue("failure", "xla", "hbm", facts)


@rule("op_name", r"op_name=\"([^\"]{1,400})\"")
def _operator(match: re.Match[str]) -> Clue:
    return Clue("detail", "xla", "buffer", {"operation": match[1]})


@rule("Shape:", r"^\s*Shape: (\w{1,8}\[[\d,]{1,200}\])")
def _buffer_shape(match: re.Match[str]) -> Clue:
    return Clue("detail", "xla", "buffer", _shaped(match[1]))


def _shaped(text: str) -> dict[str, object]:
    found = re.search(r"([a-z]{1,4}\d{0,3})\[([\d,]{1,200})\]", text)
    return {"tensor_shape": shape(found[2]), "dtype": found[1]} if found else {}


RULES: tuple[Rule, ...] = (_allocation, _tpu, _cores, _no_room, _exceeds, _operator, _buffer_shape)
