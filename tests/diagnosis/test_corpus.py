"""Every text of the corpus is read for what it is."""

from __future__ import annotations

import pytest
from corpus import NEGATIVE, POSITIVE

import kerasmem
from kerasmem.diagnosis.diagnosis import Diagnosis


def check(found, expected):
    data = found.to_dict()
    for name, value in expected.items():
        if name == "first":
            assert value in found.suggestions[0].what + found.suggestions[0].why, found.suggestions[0]
        elif name == "code":
            assert any(value in each.code for each in found.suggestions), found.suggestions
        elif name == "without":
            code = " ".join(each.code for each in found.suggestions)
            assert not any(word in code for word in value), code
        elif name == "warned":
            assert bool(found.warnings) is value
        else:
            assert data[name] == value, (name, data[name], found.summary)


@pytest.mark.parametrize(("name", "text", "expected"), POSITIVE, ids=[name for name, _, _ in POSITIVE])
def test_out_of_memory_is_read(name, text, expected):
    found = kerasmem.explain_oom(text)
    assert found.out_of_memory, found.summary
    check(found, expected)
    assert 2 <= len(found.suggestions) <= 3
    assert found.cause in ("capacity", "fragmentation", "other process", "unknown")
    assert found.summary.endswith(".") and found.lines and found.evidence
    assert Diagnosis.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(("name", "text", "family"), NEGATIVE, ids=[name for name, _, _ in NEGATIVE])
def test_what_is_not_out_of_memory_is_not_called_so(name, text, family):
    found = kerasmem.explain_oom(text)
    assert not found.out_of_memory, found.summary
    assert found.family == family
    assert found.summary and not found.suggestions and found.cause is None
    assert Diagnosis.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(("name", "text", "expected"), POSITIVE, ids=[name for name, _, _ in POSITIVE])
def test_it_is_found_deep_in_a_log(name, text, expected):
    plain = "Epoch 4/9  100/500 [==>...] - ETA: 12s - loss: 0.25\n" * 2_000
    found = kerasmem.explain_oom(plain + text + "\n" + plain)
    check(found, expected)
    assert found.out_of_memory and found.lines[0] > 2_000 and found.lines[1] <= 2_001 + text.count("\n")


PREFIXES = {
    "rank": lambda line: f"[rank7]: {line}",
    "pod": lambda line: f"[pod/train-0/main] {line}",
    "compose": lambda line: f"trainer-1  | {line}",
    "container": lambda line: f"2025-03-04T05:06:07.123456789Z stderr F {line}",
    "ansi": lambda line: f"\x1b[36m(Worker pid=71)\x1b[0m {line}",
    "progress": lambda line: f" 10/99 [=>..] loss: 0.1\r 11/99 [=>..] loss: 0.2\r{line}",
    "windows": lambda line: line + "\r",
}


@pytest.mark.parametrize("kind", PREFIXES)
def test_what_loggers_put_before_a_line_does_not_matter(kind):
    for _, text, expected in POSITIVE:
        marked = "\n".join(PREFIXES[kind](line) for line in text.split("\n"))
        found = kerasmem.explain_oom(marked)
        assert found.out_of_memory, text
        check(found, expected)
