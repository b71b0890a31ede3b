"""Theano: its device allocator, CNMEM, and gpuarray."""

from __future__ import annotations

import re

from kerasmem.diagnosis.rules import Finding, Rule, counted, named_facts, reader, rule, shaped


@reader(
    "of device memory",
    rf"Error allocating (?:{counted('requested_bytes')}|%li) bytes of device memory \((?P<reason>[^)]{{1,60}})\)"
    rf"(?:\. Driver report {counted('free_bytes')} bytes free and {counted('limit_bytes')} bytes total)?",
)
def _allocation(match: re.Match[str]) -> Finding:
    facts = named_facts(match)
    what = "cnmem" if "CNMEM" in facts.pop("reason") else "device"
    free, total = facts.get("free_bytes"), facts.get("limit_bytes")
    if free is not None and total is not None and free <= total:
        facts["in_use_bytes"] = total - free
    return Finding("failure", "theano", what, {**facts, "device": "GPU"})


_SHAPES = rf"Inputs shapes: \[\({shaped('tensor_shape')}\)"
_ARRAY = r"GpuArrayException.{0,80}(?:out of memory|OUT_OF_MEMORY)"
RULES: tuple[Rule, ...] = (
    _allocation,
    rule("nputs shapes", _SHAPES, "detail", "theano", "shape"),
    rule("GpuArrayException", _ARRAY, "failure", "theano", "device", device="GPU"),
    rule("CNMEM_STATUS", r"CNMEM_STATUS_OUT_OF_MEMORY", "failure", "theano", "cnmem", device="GPU"),
)
