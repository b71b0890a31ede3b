"""Host memory: Python, NumPy and C++, the kernel's OOM killer old and new, Slurm and its kin, containers."""

from __future__ import annotations

import re

from kerasmem.diagnosis.rules import Finding, Rule, kilobytes, named_facts, reader, rule, shaped, sized

_ARRAY = (
    rf"Unable to allocate (?:{sized('requested_bytes')} for an )?array with shape "
    rf"\({shaped('tensor_shape')}\) and data type [<>]*(?P<dtype>[|<>]?\w{{1,20}})"
)
_RESIDENT = rf"anon-rss:{kilobytes('in_use_bytes')}kB"
_GROUP = rf"memory: usage {kilobytes('group_usage')}kB, limit {kilobytes('limit_bytes')}kB"
_SLURM = rf"exceeded memory limit \({kilobytes('in_use_bytes')} > {kilobytes('limit_bytes')}\)"
_PBS = rf"mem {kilobytes('in_use_bytes')}kb exceeded limit {kilobytes('limit_bytes')}kb"
_CODE_137 = (
    r"(?i)\bexit(?:ed)?(?:[ _-]?(?:with|code|status|value|of)){0,3}[\"'\s:=(]{0,12}137\b"
    r"|\b(?:return(?:ed)?(?: ?code)?|rc|status)[\"'\s:=]{1,6}137\b"
)


def _killed(match: re.Match[str]) -> Finding:
    what = "cgroup" if match["who"].startswith(("Memory cgroup", "MEMCG")) else "kernel"
    facts = {name: value for name, value in named_facts(match).items() if name != "who"}
    return Finding("failure", "host", what, {**facts, "device": "host"})


def _host(needle: str, pattern: str, what: str, kind: str = "failure", **facts: str) -> Rule:
    return rule(needle, pattern, kind, "host", what, device="host", **facts)


_WHO = r"(?P<who>Memory cgroup out of memory|[Oo]ut of memory)"
_NAME = r"process \d{1,12} \((?P<note>.{1,40}?)\)"
RULES: tuple[Rule, ...] = (
    _host("Unable to allocate", _ARRAY, "array"),
    reader("illed process", rf"{_WHO}[^:]{{0,30}}: Killed {_NAME},?.{{0,40}}total-vm:\d{{1,18}}kB, {_RESIDENT}")(
        _killed
    ),
    reader("Kill process", rf"{_WHO}: Kill {_NAME}")(_killed),
    _host("anon-rss", rf"Killed {_NAME}.{{0,60}}{_RESIDENT}", "kernel"),
    _host("oom-killer", r"\S{1,40} invoked oom-killer:", "kernel"),
    rule("memory: usage", _GROUP, "detail", "host", "cgroup"),
    reader("oom-kill:", r"oom-kill:constraint=CONSTRAINT_(?P<who>MEMCG|NONE|CPUSET|MEMORY_POLICY)")(_killed),
    _host("exceeded memory limit", rf"(?:Job|Step) \S{{1,40}} {_SLURM}", "slurm"),
    _host("exceeded limit", _PBS, "job"),
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
    _host("137", _CODE_137, "killed", "weak", note="exit code 137"),
    _host("SIGKILL", r"(?:[Kk]illed|died|[Tt]erminated|interrupted|received)\b.{0,60}SIGKILL", "killed", "weak"),
    _host("by signal", r"killed by signal: (?:Killed|9\b)", "killed", "weak"),
    _host(
        "Killed",
        r"^(?:.{0,120}: line \d{1,7}: +)?(?:\[\d{1,3}\][+-]? +)?(?:\d{1,9} )?Killed\b(?: {2,}.{0,400}|\s*)$",
        "killed",
        "weak",
    ),
)
