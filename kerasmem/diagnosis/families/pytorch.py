"""PyTorch's texts, from THC to today's, on CUDA, HIP, XPU, MPS and the host.

Five generations: "cuda runtime error (2)"; "(GPU 0; … total capacity; … already allocated; … free; … cached)"; the
same with "reserved in total by PyTorch"; the same with a hint; and sentences with the processes on the card.
"""

from __future__ import annotations

import re

from kerasmem.diagnosis.rules import Finding, Rule, counted, named_facts, reader, rule, sized

_OLD = re.compile(
    rf"\((?:GPU|NPU|XPU) ?(?P<device>\d{{1,4}}); {sized('limit_bytes')} total capacity; "
    rf"{sized('in_use_bytes')} already allocated; {sized('free_bytes')} free; "
    rf"{sized('reserved_bytes')} (?:cached|reserved)"
)
# What sentences of a message say, whichever of them there are.
_SENTENCES = [
    re.compile(pattern)
    for pattern in (
        rf"GPU (?P<device>\d{{1,4}}) has a total capaci?ty of {sized('limit_bytes')} "
        rf"of which {sized('free_bytes')} is free",
        rf"[.;] {sized('allowed')} allowed;",
        rf"allocated memory {sized('in_use_bytes')} is allocated by PyTorch",
        rf"and {sized('unallocated')} is reserved by PyTorch but unallocated",
        rf"this process has {sized('own_process')} memory in use",
    )
]
_PROCESS = re.compile(rf"Process (?P<number>\d{{1,12}}) has {sized('held')} memory in use")


@reader(
    "out of memory. Tried",
    rf"(?P<platform>CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate "
    rf"{sized('requested_bytes')}(.{{0,2000}})",
)
def _tried(match: re.Match[str]) -> Finding:
    rest = match[match.re.groups]
    return Finding("failure", "pytorch", "cuda", {"device": "GPU", **named_facts(match), **_figures(rest)})


def _continued(match: re.Match[str]) -> Finding | None:
    """Read the rest of a message that was wrapped after its first sentence."""
    facts = _figures(match[0])
    return Finding("detail", "pytorch", "", facts) if facts else None


def _figures(text: str) -> dict[str, object]:
    facts: dict[str, object] = {}
    if old := _OLD.search(text):
        facts = named_facts(old)
        used, reserved = facts["in_use_bytes"], facts["reserved_bytes"]
        if "cached" in old[0] and isinstance(used, int) and isinstance(reserved, int):
            facts["reserved_bytes"] = used + reserved  # before 1.4 it told the cache alone
    for sentence in _SENTENCES:
        if found := sentence.search(text):
            facts |= named_facts(found)
    if "device" in facts:
        facts["device"] = f"GPU:{int(str(facts['device']))}"
    held = (named_facts(each) for each in _PROCESS.finditer(text))
    if processes := [(int(each["number"]), each["held"] or 0) for each in held][:64]:
        facts["processes"] = processes
    return facts


@reader(
    "MPS",
    rf"MPS backend out of memory \(MPS allocated: {sized('in_use_bytes')}, other allocations: {sized('others')}, "
    rf"max allowed: {sized('limit_bytes')}\)\. Tried to allocate {sized('requested_bytes')}",
)
def _mps(match: re.Match[str]) -> Finding:
    facts = named_facts(match)
    used, others = facts["in_use_bytes"], facts.pop("others")
    free = None if None in (used, others) else max(0, (facts["limit_bytes"] or 0) - (used or 0) - (others or 0))
    return Finding("failure", "pytorch", "mps", {**facts, "free_bytes": free, "device": "MPS"})


_CPU = rf"DefaultCPUAllocator: .{{0,40}}memory: you tried to allocate {counted('requested_bytes')} bytes"
_BARE = r"CUDA error: out of memory|[Cc]uda runtime error \(2\) ?: out of memory"
RULES: tuple[Rule, ...] = (
    _tried,
    _mps,
    rule("DefaultCPUAllocator", _CPU, "failure", "pytorch", "host", device="host"),
    *(rule(needle, _BARE, "failure", "pytorch", "cuda", device="GPU", platform="CUDA") for needle in ("CUDA", "cuda")),
    reader("total capac", r"(?:GPU|NPU|XPU) ?\d{1,4}(?:;| has a) .{0,1000}")(_continued),
    reader("by PyTorch", r".{0,1000}(?:by PyTorch).{0,300}")(_continued),
)
