"""JAX's own words; most of what it reports is XLA's, told apart by the exception's name."""

from __future__ import annotations

import re

from kerasmem.diagnosis.rules import Finding, Rule, counted, named_facts, reader, rule, sized

_ALLOCATING = rf"(?<!OutOfMemoryError: )Out of memory allocating {sized('requested_bytes')}"


@reader(
    "allocate request",
    rf"[Ff]ailed to allocate request for {sized('requested_bytes')}(?: \({counted('requested_bytes')}B\))?"
    r"(?: on device ordinal (?P<device>\d{1,4}))?",
)
def _request(match: re.Match[str]) -> Finding:
    facts = named_facts(match)
    if "device" in facts:
        facts["device"] = f"GPU:{int(facts['device'])}"
    return Finding("failure", "jax", "program", facts)


RULES: tuple[Rule, ...] = (
    rule("emory allocating", _ALLOCATING, "failure", "jax", "program"),
    _request,
    rule("jax", r"\bjaxlib\.|\bjax\.errors\.|/jax/_src/", "ahead", "jax", "jax", jax=True),
)
