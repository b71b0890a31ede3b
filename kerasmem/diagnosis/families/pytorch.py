"""PyTorch's texts, from THC to today's, on CUDA, HIP, XPU, MPS and the host.

Five generations: "cuda runtime error (2)"; "(GPU 0; … total capacity; … already allocated; … free; … cached)"; the
same with "reserved in total by PyTorch"; the same with a hint; and sentences with the processes on the card.
"""

from __future__ import annotations

import re

from kerasmem.diagnosis.clues import SIZE, Clue, Rule, rule, size

_OLD = re.compile(
    rf"\((?:GPU|NPU|XPU) ?(\d{{1,4}}); {SIZE} total capacity; {SIZE} already allocated; {SIZE} free; "
    rf"{SIZE} (?:cached|reserved)"
)
_CAPACITY = re.compile(rf"GPU (\d{{1,4}}) has a total capaci?ty of {SIZE} of which {SIZE} is free")
_ALLOCATED = re.compile(rf"allocated memory {SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"and {SIZE} is reserved by PyTorch but unallocated")
_PROCESS = re.compile(rf"Process (\d{{1,12}}) has {SIZE} memory in use")
_OWN = re.compile(rf"this process has {SIZE} memory in use")
_ALLOWED = re.compile(rf"[.;] {SIZE} allowed;")


@rule("out of memory. Tried", rf"(CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate {SIZE}(.{{0,2000}})")
def _tried(match: re.Match[str]) -> Clue:
    facts = {"requested_bytes": size(match[2], match[3]), "device": "GPU", "platform": match[1]}
    return Clue("failure", "pytorch", "cuda", facts | _figures(match[4]))


@rule("total capac", r"(?:GPU|NPU|XPU) ?\d{1,4}(?:;| has a) .{0,1000}")
def _continued(match: re.Match[str]) -> Clue | None:
    """Read the rest of a message that was wrapped after its first sentence."""
    facts = _figures(match[0])
    return Clue("detail", "pytorch", "", facts) if facts else None


@rule("by PyTorch", r".{0,1000}(?:by PyTorch).{0,300}")
def _continued_again(match: re.Match[str]) -> Clue | None:
    facts = _figures(match[0])
    return Clue("detail", "pytorch", "", facts) if facts else None


def _figures(text: str) -> dict[str, object]:
    facts: dict[str, object] = {}
    if old := _OLD.search(text):
        values = [size(old[place], old[place + 1]) for place in (2, 4, 6, 8)]
        names = ("limit_bytes", "in_use_bytes", "free_bytes", "reserved_bytes")
        facts |= {"device": f"GPU:{int(old[1])}", **dict(zip(names, values, strict=True))}
        used, reserved = facts["in_use_bytes"], facts["reserved_bytes"]
        if "cached" in old[0] and isinstance(used, int) and isinstance(reserved, int):
            facts["reserved_bytes"] = used + reserved  # before 1.4 it told the cache alone
    if new := _CAPACITY.search(text):
        facts |= {
            "device": f"GPU:{int(new[1])}",
            "limit_bytes": size(new[2], new[3]),
            "free_bytes": size(new[4], new[5]),
        }
    if allowed := _ALLOWED.search(text):
        facts["allowed"] = size(allowed[1], allowed[2])
    if used := _ALLOCATED.search(text):
        facts["in_use_bytes"] = size(used[1], used[2])
    if spare := _UNALLOCATED.search(text):
        facts["unallocated"] = size(spare[1], spare[2])
    if own := _OWN.search(text):
        facts["own_process"] = size(own[1], own[2])
    if processes := [(int(each[1]), size(each[2], each[3]) or 0) for each in _PROCESS.finditer(text)][:64]:
        facts["processes"] = processes
    return facts


@rule("CUDA", r"CUDA error: out of memory|[Cc]uda runtime error \(2\) ?: out of memory")
def _bare(match: re.Match[str]) -> Clue:
    return Clue("failure", "pytorch", "cuda", {"device": "GPU", "platform": "CUDA"})


@rule("cuda", r"[Cc]uda runtime error \(2\) ?: out of memory")
def _oldest(match: re.Match[str]) -> Clue:
    return _bare.read(match)  # type: ignore[return-value]


@rule(
    "MPS",
    rf"MPS backend out of memory \(MPS allocated: {SIZE}, other allocations: {SIZE}, max allowed: {SIZE}\)\."
    rf" Tried to allocate {SIZE}",
)
def _mps(match: re.Match[str]) -> Clue:
    used, others = size(match[1], match[2]), size(match[3], match[4])
    facts = {"requested_bytes": size(match[7], match[8]), "limit_bytes": size(match[5], match[6]), "in_use_bytes": used}
    free = None if None in (used, others) else max(0, (facts["limit_bytes"] or 0) - (used or 0) - (others or 0))
    return Clue("failure", "pytorch", "mps", facts | {"free_bytes": free, "device": "MPS"})


@rule("DefaultCPUAllocator", r"DefaultCPUAllocator: .{0,40}memory: you tried to allocate (\d{1,20}) bytes")
def _cpu(match: re.Match[str]) -> Clue:
    return Clue("failure", "pytorch", "host", {"requested_bytes": size(match[1]), "device": "host"})


RULES: tuple[Rule, ...] = (_tried, _mps, _cpu, _bare, _oldest, _continued, _continued_again)
