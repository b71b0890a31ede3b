"""Keras's published examples, rebuilt: which get an answer before anything is trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kerasmem.models.names import public_names

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"


@pytest.fixture
def examples(monkeypatch):
    """The bench's module, which is a script and no part of a package."""
    monkeypatch.syspath_prepend(str(BENCH))
    import example_answers

    yield example_answers
    for name in ("example_answers", "zoo_vision", "zoo_language", "zoo_steps", "zoo_loops"):
        sys.modules.pop(name, None)


def test_the_results_are_of_these_examples_and_add_up(examples):
    kept = json.loads((BENCH / "results" / "example_answers.json").read_text())
    assert len(kept["rows"]) >= 140
    assert kept["kinds"]["examples"] >= 40
    assert kept["kinds"]["hub"] >= 25
    assert set(kept["rows"]) <= set(examples.EXAMPLES)
    assert examples.summary(kept["rows"]) == {key: value for key, value in kept.items() if key != "rows"}
    assert kept["share"] >= 0.97
    assert all(row["why"] for row in kept["rows"].values())


def test_all_of_keras_applications_are_asked(examples):
    named = {each.function for each in examples.EXAMPLES.values() if each.kind == "applications"}
    assert named == {name for name in public_names("keras.applications") if name[0].isupper()}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_the_examples_get_an_answer(examples, part):
    names = [name for name, each in examples.EXAMPLES.items() if each.kind in ("examples", "loops")]
    rows = {name: examples.answer(name) for name in names[part::4]}
    assert examples.summary(rows)["share"] >= 0.97, examples.summary(rows)["unanswered"]
