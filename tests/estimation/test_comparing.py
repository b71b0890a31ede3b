"""Two reports side by side: pairs of layers, changes that add up, limits with intervals."""

from __future__ import annotations

import json
from dataclasses import replace

import keras
import pytest

from kerasmem import compare
from kerasmem.devices.kernels import cpu_kernels
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


def convnet(filters=8):
    layers = [keras.Input((24, 24, 3)), keras.layers.Conv2D(filters, 3, name="conv"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(4, name="head")], name="model")
    model.compile("sgd", "mse")
    return model


def graph_report(**settings):
    return estimate(convnet(), batch_size=8, method="graph", **settings)


def test_a_saved_report_keeps_its_kernels_and_threads():
    settings = graph_report(kernels="eigen", threads=3).settings
    assert (settings.kernels, settings.threads, settings.intra_op_threads) == ("eigen", 3, None)
    assert report().settings.kernels is None  # the formula does not depend on them


def test_a_model_is_estimated_with_the_profile_of_the_report():
    other = {"onednn": "eigen", "eigen": "onednn"}[cpu_kernels().kind]
    before = graph_report(kernels=other, threads=7)
    comparison = compare(before, convnet(), max_increase="0%")
    after = comparison.after.settings
    assert (after.kernels, after.threads) == (other, 7)
    assert any("this process has" in note for note in comparison.after.notes)
    assert comparison.categories[-1].change == 0
    assert compare(convnet(), before).before.settings.kernels == other
    with pytest.raises(UsageError, match=r"numbers of threads differ: 7 and 2; .*--threads 7"):
        compare(before, convnet(), threads=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 2}, r"numbers of replicas differ: 2 and 1; .*\(b with --batch-size 16 --replicas 2\)"),
        ({"mode": "inference"}, "modes differ: inference and train; .*--mode inference"),
        (
            {"kernels": "onednn", "threads": 1},
            "kernels differ: onednn and eigen; the numbers of threads .*--kernels onednn",
        ),
        ({"device": "t4"}, "devices differ: Tesla T4 16GB and none; .*--device 'Tesla T4 16GB'"),
    ],
)
def test_reports_of_other_profiles_devices_or_replicas_are_refused(changes, message):
    batch = 8 * changes.get("replicas", 1)
    after = graph_report(kernels="eigen", threads=2)
    before = estimate(convnet(), **{"batch_size": batch, "method": "graph", "kernels": "eigen", "threads": 2} | changes)
    with pytest.raises(UsageError, match=message):
        compare(before, after, max_increase="5%")
    assert compare(before, after, allow_different_settings=True).notes


def test_a_model_is_estimated_for_the_replicas_and_the_device_of_the_report():
    before = estimate(convnet(), batch_size=8, method="graph", replicas=2, device="16GB")
    comparison = compare(before, convnet(), max_increase="0%")
    assert comparison.after.settings == before.settings
    assert compare(before, before, batch_size=8).notes == ()
    with pytest.raises(UsageError, match="batch_size must be 8"):
        compare(before, before, batch_size=4)
    assert comparison.limits[0].verdict == WITHIN and comparison.after.device.verdict == "fits"


def test_a_saved_report_is_judged_on_another_size_but_not_on_another_card():
    before = graph_report()
    comparison = compare(before, convnet(), device="16GB")
    assert comparison.before.settings.device == comparison.after.settings.device == "16GB"
    with pytest.raises(UsageError, match="devices differ: none and Tesla T4 16GB"):
        compare(before, convnet(), device="t4")
