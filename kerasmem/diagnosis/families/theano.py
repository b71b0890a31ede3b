"""Theano: its device allocator, CNMEM, and gpuarray."""

from __future__ import annotations

import re

from kerasmem.diagnosis.clues import Clue, Rule, rule, says, shape, size


@rule(
    "of device memory",
    r"Error allocating (\d{1,20}|%li) bytes of device memory \(([^)]{1,60})\)"
    r"(?:\. Driver report (\d{1,20}) bytes free and (\d{1,20}) bytes total)?",
)
def _allocation(match: re.Match[str]) -> Clue:
    free, total = size(match[3]), size(match[4])
    used = None if free is None or total is None or free > total else total - free
    facts = {
        "requested_bytes": size(match[1]) if match[1].isdigit() else None,
        "free_bytes": free,
        "limit_bytes": total,
        "in_use_bytes": used,
        "device": "GPU",
    }
    return Clue("failure", "theano", "cnmem" if "CNMEM" in match[2] else "device", facts)


@rule("nputs shapes", r"Inputs shapes: \[\(([\d, ]{1,120})\)")
def _inputs(match: re.Match[str]) -> Clue:
    return Clue("detail", "theano", "shape", {"tensor_shape": shape(match[1])})


RULES: tuple[Rule, ...] = (
    _allocation,
    _inputs,
    says(
        "GpuArrayException",
        r"GpuArrayException.{0,80}(?:out of memory|OUT_OF_MEMORY)",
        "failure",
        "theano",
        "device",
        device="GPU",
    ),
    says("CNMEM_STATUS", r"CNMEM_STATUS_OUT_OF_MEMORY", "failure", "theano", "cnmem", device="GPU"),
)
