"""Host memory: Python, NumPy and C++, the kernel's OOM killer old and new, Slurm and its kin, containers."""

from __future__ import annotations

import re

from kerasmem.diagnosis.clues import SIZE, Clue, Rule, rule, says, shape, size


@rule(
    "Unable to allocate",
    rf"Unable to allocate (?:{SIZE} for an )?array with shape \(([\d, ]{{1,200}})\) and data type ([|<>]?\w{{1,20}})",
)
def _numpy(match: re.Match[str]) -> Clue:
    facts = {
        "requested_bytes": size(match[1], match[2]),
        "tensor_shape": shape(match[3]),
        "dtype": match[4].lstrip("<>"),
    }
    return Clue("failure", "host", "array", facts | {"device": "host"})


@rule(
    "illed process",
    r"(Memory cgroup out of memory|[Oo]ut of memory)[^:]{0,30}: Killed process (\d{1,12}) \((.{1,40}?)\),?"
    r".{0,40}total-vm:(\d{1,18})kB, anon-rss:(\d{1,18})kB",
)
def _killed(match: re.Match[str]) -> Clue:
    group = match[1].startswith("Memory cgroup")
    facts = {"in_use_bytes": size(match[5], "k"), "device": "host", "note": match[3]}
    return Clue("failure", "host", "cgroup" if group else "kernel", facts)


@rule("Kill process", r"(Memory cgroup out of memory|[Oo]ut of memory): Kill process \d{1,12} \((.{1,40}?)\)")
def _old_kernel(match: re.Match[str]) -> Clue:
    group = match[1].startswith("Memory cgroup")
    return Clue("failure", "host", "cgroup" if group else "kernel", {"device": "host", "note": match[2]})


@rule("anon-rss", r"Killed process \d{1,12} \((.{1,40}?)\).{0,60}anon-rss:(\d{1,18})kB")
def _old_killed(match: re.Match[str]) -> Clue:
    return Clue("failure", "host", "kernel", {"in_use_bytes": size(match[2], "k"), "device": "host", "note": match[1]})


@rule("oom-killer", r"(\S{1,40}) invoked oom-killer:")
def _invoked(match: re.Match[str]) -> Clue:
    return Clue("failure", "host", "kernel", {"device": "host"})


@rule("memory: usage", r"memory: usage (\d{1,18})kB, limit (\d{1,18})kB")
def _group_usage(match: re.Match[str]) -> Clue:
    return Clue("detail", "host", "cgroup", {"group_usage": size(match[1], "k"), "limit_bytes": size(match[2], "k")})


@rule("oom-kill:", r"oom-kill:constraint=CONSTRAINT_(MEMCG|NONE|CPUSET|MEMORY_POLICY)")
def _constraint(match: re.Match[str]) -> Clue:
    what = "cgroup" if match[1] == "MEMCG" else "kernel"
    return Clue("failure", "host", what, {"device": "host"})


@rule("exceeded memory limit", r"(?:Job|Step) \S{1,40} exceeded memory limit \((\d{1,18}) > (\d{1,18})\)")
def _slurm_figures(match: re.Match[str]) -> Clue:
    facts = {"in_use_bytes": size(match[1], "k"), "limit_bytes": size(match[2], "k"), "device": "host"}
    return Clue("failure", "host", "slurm", facts)


@rule("exceeded limit", r"mem (\d{1,18})kb exceeded limit (\d{1,18})kb")
def _pbs(match: re.Match[str]) -> Clue:
    facts = {"in_use_bytes": size(match[1], "k"), "limit_bytes": size(match[2], "k"), "device": "host"}
    return Clue("failure", "host", "job", facts)


@rule(
    "137",
    r"(?i)\bexit(?:ed)?(?:[ _-]?(?:with|code|status|value|of)){0,3}[\"'\s:=(]{0,12}137\b"
    r"|\b(?:return(?:ed)?(?: ?code)?|rc|status)[\"'\s:=]{1,6}137\b",
)
def _code_137(match: re.Match[str]) -> Clue:
    return Clue("weak", "host", "killed", {"device": "host", "note": "exit code 137"})


def _host(needle: str, pattern: str, what: str, kind: str = "failure") -> Rule:
    return says(needle, pattern, kind, "host", what, device="host")


RULES: tuple[Rule, ...] = (
    _numpy,
    _killed,
    _old_kernel,
    _old_killed,
    _invoked,
    _group_usage,
    _constraint,
    _slurm_figures,
    _pbs,
    _host("oom", r"Detected \d{1,9} oom[-_]kill event", "slurm"),
    _host("job memory limit", r"Exceeded (?:job|step) memory limit", "slurm"),
    _host("step memory limit", r"Exceeded (?:job|step) memory limit", "slurm"),
    _host("OUT_OF_MEMORY", r"(?:State|JobState)[=:\s]{1,4}OUT_OF_MEMORY|slurm.{0,200}OUT_OF_MEMORY", "slurm"),
    _host("Out Of Memory", r"task \d{1,9}: Out Of Memory", "slurm"),
    _host("TERM_MEMLIMIT", r"TERM_MEMLIMIT", "job"),
    _host("OOMKilled", r"OOMKilled(?!\W{1,6}false)", "container"),
    _host("OOM killer", r"killed by the OOM killer", "kernel"),
    _host("oom-kill", r"Failed with result 'oom-kill'", "kernel"),
    _host("bad_alloc", r"std::bad_alloc", "cpp"),
    _host("Cannot allocate memory", r"Cannot allocate memory", "os"),
    # not where source text catches or names it
    _host(
        "emoryError",
        r"^(?!.{0,80}\bexcept\b)(?:.{0,200}[:.\-]\s{0,4}|E?\s{0,12})_?(?:Array)?MemoryError(?::|\s*$)",
        "python",
    ),
    _host("java", r"java\.lang\.OutOfMemoryError", "java"),
    _code_137,
    _host("SIGKILL", r"(?:[Kk]illed|died|[Tt]erminated|interrupted|received)\b.{0,60}SIGKILL", "killed", "weak"),
    _host("by signal", r"killed by signal: (?:Killed|9\b)", "killed", "weak"),
    _host(
        "Killed",
        r"^(?:.{0,120}: line \d{1,7}: +)?(?:\[\d{1,3}\][+-]? +)?(?:\d{1,9} )?Killed\b(?: {2,}.{0,400}|\s*)$",
        "killed",
        "weak",
    ),
)
