"""Two reports side by side: pairs of layers, changes that add up, limits with intervals."""

from __future__ import annotations

import json
from dataclasses import replace

import keras
import pytest

from kerasmem import compare
from kerasmem.errors import UsageError
from kerasmem.estimation.comparing import EXCEEDED, TOO_CLOSE, WITHIN
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.report import Bytes


def report(units=8, extra=False, **names):
    layers = [keras.Input((4,), name="input"), keras.layers.Dense(units, name=names.get("first", "dense"))]
    layers += [keras.layers.Dense(5, name="extra")] if extra else []
    layers.append(keras.layers.Dense(2, name=names.get("last", "dense_1")))
    return estimate(keras.Sequential(layers, name="model"), method="formula", batch_size=4)


def with_bytes(base, total, low=None, high=None):
    return replace(base, bytes=Bytes(total, low, high, *[None] * 7))


def test_changes_by_layer_add_up_to_the_total():
    before, after = report(), report(16, extra=True)
    comparison = compare(before, after)
    assert sum(row.change for row in comparison.layers) == after.bytes.total - before.bytes.total
    assert sum(row.change for row in comparison.categories[:-1]) == comparison.categories[-1].change
    by_name = {row.name: row for row in comparison.layers}
    assert by_name["extra"].is_in == "second"
    assert by_name["extra"].before is None
    assert by_name["extra"].change == by_name["extra"].after > 0
    changes = [abs(row.change) for row in comparison.layers]
    assert changes == sorted(changes, reverse=True)


def test_numbers_of_keras_do_not_part_layers():
    comparison = compare(report(), report(first="dense_7", last="dense_8"))
    pairs = {row.name: row for row in comparison.layers if "→" in row.name}
    assert set(pairs) == {"dense → dense_7", "dense_1 → dense_8"}
    assert all(row.is_in == "both" and row.change == 0 for row in pairs.values())
    # A name that both have is not given to another.
    comparison = compare(report(), report(first="dense_1", last="dense"))
    assert {row.name for row in comparison.layers} >= {"dense", "dense_1"}
    # Nor are layers of other names, or other classes, the same.
    comparison = compare(report(), report(first="other"))
    assert {row.name: row.is_in for row in comparison.layers}["other"] == "second"


def test_many_layers_of_one_name_stem_are_paired_in_order():
    base = report()
    row = base.layers[1]
    many = tuple(replace(row, name=f"dense_{number}", bytes=number) for number in range(5000))
    moved = tuple(replace(row, name=f"dense_{number + 10_000}", bytes=number) for number in range(5000))
    comparison = compare(replace(base, layers=many), replace(base, layers=moved))
    assert len(comparison.layers) == 5000
    assert all(row.change == 0 for row in comparison.layers)


@pytest.mark.parametrize(
    ("low", "high", "budget", "verdict"),
    [(90, 110, 110, WITHIN), (90, 110, 89, EXCEEDED), (90, None, 200, TOO_CLOSE), (None, None, 100, WITHIN)],
)
def test_a_budget(low, high, budget, verdict):
    base = report()
    (limit,) = compare(base, with_bytes(base, 100, low, high), budget=budget).limits
    assert (limit.what, limit.verdict) == ("budget", verdict)


@pytest.mark.parametrize(
    ("after", "increase", "verdict"),
    [((100, 90, 120), 0, WITHIN), ((105, 94, 125), 5, WITHIN), ((105, 94, 126), 5, TOO_CLOSE),
     ((120, 110, 140), 10, EXCEEDED), ((120, 110, None), 30, TOO_CLOSE), ((80, 70, 90), 0, WITHIN)],
)  # fmt: skip
def test_an_increase_compares_like_ends(after, increase, verdict):
    base = report()
    before = with_bytes(base, 100, 90, 120)
    (limit,) = compare(before, with_bytes(base, *after), max_increase=increase).limits
    assert (limit.what, limit.verdict) == ("increase", verdict)
    (share,) = compare(before, with_bytes(base, *after), max_increase=f"{increase}%").limits
    assert share == limit


def test_a_model_is_compared_with_a_report_by_the_settings_of_the_report(tmp_path):
    before = report()
    path = tmp_path / "before.json"
    path.write_text(json.dumps(before.to_dict()))
    model = keras.Sequential([keras.Input((4,), name="input"), keras.layers.Dense(16)], name="model")
    comparison = compare(path, model, max_increase="5%")
    assert comparison.before == before
    assert (comparison.after.settings.batch_size, comparison.after.settings.method) == (4, "formula")
    assert comparison == compare(before, comparison.after, max_increase="5%")
    assert [limit.what for limit in comparison.limits] == ["increase"]


def test_reports_of_other_settings_are_compared_only_on_request():
    before = report()
    after = replace(before, settings=replace(before.settings, batch_size=8, method="graph"))
    with pytest.raises(UsageError, match="batch sizes differ: 4 and 8"):
        compare(before, after)
    comparison = compare(before, after, allow_different_settings=True)
    assert comparison.notes == ("the methods differ: formula and graph", "the batch sizes differ: 4 and 8")
    assert compare(before, before).notes == ()
