"""JAX's own words; most of what it reports is XLA's, told apart by the exception's name."""

from __future__ import annotations

import re

from kerasmem.diagnosis.clues import SIZE, Clue, Rule, rule, says, size


@rule("emory allocating", rf"(?<!OutOfMemoryError: )Out of memory allocating {SIZE}")
def _allocating(match: re.Match[str]) -> Clue:
    return Clue("failure", "jax", "program", {"requested_bytes": size(match[1], match[2])})


@rule(
    "allocate request",
    rf"[Ff]ailed to allocate request for {SIZE}(?: \((\d{{1,20}})B\))?(?: on device ordinal (\d{{1,4}}))?",
)
def _request(match: re.Match[str]) -> Clue:
    device = None if match[4] is None else f"GPU:{int(match[4])}"
    return Clue(
        "failure", "jax", "program", {"requested_bytes": size(match[3]) or size(match[1], match[2]), "device": device}
    )


RULES: tuple[Rule, ...] = (
    _allocating,
    _request,
    says("jax", r"\bjaxlib\.|\bjax\.errors\.|/jax/_src/", "ahead", "jax", "jax", jax=True),
)
