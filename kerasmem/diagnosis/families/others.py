"""What is not out of memory, though it looks like it, or is what ended the run instead."""

from __future__ import annotations

from kerasmem.diagnosis.rules import Rule, rule


def _other(needle: str, pattern: str, family: str, what: str = "") -> Rule:
    return rule(needle, pattern, "other", family, what)


RULES: tuple[Rule, ...] = (
    # TensorFlow could do with less and goes on; in pasted logs the sentence may stand on a line of its own
    rule("not a failure", r"[Tt]he caller indicates that this is not a failure", "cancel", "notice", "optional"),
    _other("free system", r"Allocation of \d{1,20} exceeds \d{1,3}% of free system memory", "notice", "large"),
    _other("large alloc", r"tcmalloc: large alloc \d", "notice", "large"),
    _other("rematerialization", r"Can't reduce memory use below .{0,80}rematerialization", "notice", "large"),
    _other("etry", r"(?i)(?:will|going to) retry|retrying(?! memory)", "notice", "retry"),
    _other("at some point", r"Exceeded (?:job|step) memory limit at some point", "notice", "swap"),
    _other("No space left", r"No space left on device", "disk", "full"),
    _other("uota exceeded", r"Disk quota exceeded|EDQUOT", "disk", "quota"),
    _other("shared memory", r"insufficient shared memory", "disk", "shm"),
    _other("larger than max", r"[Mm]essage larger than max", "limit", "message"),
    _other(
        "uota",
        r"(?i)(?:quota|rate limit) (?:exceeded|exhausted)|exceeded .{0,40}quota|insufficient .{0,20}quota",
        "limit",
        "quota",
    ),
    _other("temporarily unavailable", r"Resource temporarily unavailable", "limit", "processes"),
    _other("open files", r"Too many open files", "limit", "files"),
    _other("start new thread", r"can't start new thread", "limit", "processes"),
    _other("dynamic library", r"Could not (?:load|find) dynamic library|Cannot dlopen some GPU", "library", "missing"),
    _other("dlopen", r"Cannot dlopen some GPU", "library", "missing"),
    _other("TIME LIMIT", r"DUE TO TIME LIMIT", "stopped", "time"),
    _other("DUE TO", r"CANCELLED AT \S{1,40} DUE TO (?!MEMORY)", "stopped", "cancelled"),
    _other("PREEMPT", r"PREEMPTED", "stopped", "cancelled"),
    _other("illegal memory", r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS", "crash", "access"),
    _other("egmentation fault", r"Segmentation fault", "crash", "access"),
    _other("KeyboardInterrupt", r"^KeyboardInterrupt\b", "stopped", "keyboard"),
    _other(
        "ncompatible", r"[Ii]ncompatible shapes|is incompatible with the layer|shapes? .{0,80}are incompatible", "shape"
    ),
    _other("shape mismatch", r"shape mismatch", "shape"),
    _other("nan", r"(?i)\bloss: nan\b|\bloss=nan\b|invalid loss, terminating|: Tensor had NaN", "nan"),
    _other("NaN", r"(?i)\bloss: nan\b|\bloss=nan\b|invalid loss, terminating|: Tensor had NaN|(?i:has) NaN", "nan"),
)
