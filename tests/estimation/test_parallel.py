"""Past one device: what may be asked, which dimension is divided, what XLA's text says, one device's peak. Pure."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kerasmem.errors import InputError, MissingExtraError, UsageError
from kerasmem.estimation import choice
from kerasmem.estimation.arguments import EstimateArguments
from kerasmem.estimation.compiled.hlo import Collective, collectives
from kerasmem.estimation.parallel import plan as planning
from kerasmem.estimation.parallel.parallelism import (
    Parallelism,
    Placed,
    by_rule,
    check_method,
    not_divided,
    parallelism,
    parse_layout,
    place,
    unused_layout,
    weight_of,
)
from kerasmem.estimation.parallel.plan import DevicePlan, device_outcome, device_plan
from kerasmem.estimation.report import Outcome, Pool
from kerasmem.estimation.tracing import Step
from kerasmem.models.request import ModelRequest

pytestmark = pytest.mark.usefixtures("loaded_python")

# What may be asked


def test_one_device_is_nothing_special():
    assert parallelism(1) is None
    assert parallelism(2) == Parallelism(2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((0,), "replicas: 0 is too small; it must be 1 or more"),
        ((True,), "replicas: True is not a whole number"),
        ((2.0,), r"replicas: 2.0 is not a whole number"),
        ((2, "pipeline"), "choose from data, model"),
        ((1, "model"), "nothing to divide"),
        ((1, "data", True), "--shard-optimizer needs --replicas"),
        ((2, "model", True), "divided as their weights are"),
        ((2, "data", False, ["kernel=,model"]), "needs --parallel model"),
    ],
)
def test_what_contradicts_itself_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        parallelism(*given)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (["kernel"], "write 'REGEX=,model'"),
        (["=,model"], "write 'REGEX=,model'"),
        (["kernel=,rows"], "axis 'rows'"),
        (["kernel=model,model"], "not two"),
        (["(=,model"], "not a regular expression"),
        (["kernel=,model", "kernel=model,"], "given twice"),
        ({"kernel": "model"}, "no list of axes"),
        ({"kernel": (None, 3)}, "axis 3"),
        (7, "give texts"),
    ],
)
def test_a_layout_that_cannot_be_read_is_named(layout, words):
    with pytest.raises(UsageError, match=words):
        parse_layout(layout)


def test_texts_and_mappings_say_the_same():
    assert parse_layout(["a.*=,model", "b=model,None"]) == parse_layout({"a.*": (None, "model"), "b": ["model", ""]})
    asked = parallelism(4, "model", layout="a=b=,model")
    assert asked.layout == (("a=b", (None, "model")),)
    assert Parallelism.from_dict(asked.to_dict()) == asked


@pytest.mark.parametrize("asked", [Parallelism(2, "model"), Parallelism(2, shard_optimizer=True)])
def test_only_xla_knows_shards(asked):
    for method in ("graph", "gpu-target", "probe", "formula"):
        with pytest.raises(UsageError, match="JAX alone"):
            check_method(method, asked)
    check_method("xla", asked)
    check_method("graph", Parallelism(2))


def test_a_method_that_looks_at_one_device_says_what_it_leaves_out(monkeypatch):
    found = Outcome("probe", "graph", 100, 90, 110, Pool(100, 100, None))
    asked = Parallelism(2)
    monkeypatch.setattr(choice, "_on_one_device", lambda *arguments: found)

    def ask(method, mode):
        shapes = SimpleNamespace(split=asked)
        return choice.outcome_of(method, Step(EstimateArguments("m.keras", mode=mode), None, shapes), None)

    assert [each.what for each in ask("probe", "train").unmodelled] == ["exchange of gradients"]
    assert ask("graph", "inference") == found


# Which dimension is divided


def weight(path, *shape, group="trainable"):
    size = 4
    for each in shape:
        size *= each
    return Placed(path, shape, (None,) * len(shape), size, group)


KERNEL, BIAS = weight("dense/kernel", 128, 512), weight("dense/bias", 512)
SLOT = weight("adam/dense_kernel_momentum", 128, 512, group="optimizer")
STEPS = weight("adam/iteration", group="optimizer")


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((512, 128), ("model", None)),
        ((3, 3, 64, 64), (None, None, None, "model")),
        ((7, 9), (None, None)),
        ((0, 6), (None, "model")),
        ((), ()),
    ],
)
def test_the_largest_dimension_that_comes_out_even_is_divided(shape, axes):
    assert by_rule(shape, 2) == axes


def test_slots_follow_their_weight():
    placed = place([KERNEL, BIAS, SLOT, STEPS], Parallelism(4, "model"), lambda path: None)
    assert [each.axes for each in placed] == [(None, "model"), (None,), (None, "model"), ()]
    assert [each.on_device(4) for each in placed] == [65536, 2048, 65536, 4]
    assert not_divided(placed) == (1, 2048)


def test_a_slot_is_the_longest_named_weights_of_its_shape():
    inner = weight("block/dense/kernel", 4, 4)
    outer = weight("block/dense", 4, 4)
    slot = weight("adam/block_dense_kernel_velocity", 4, 4, group="optimizer")
    assert weight_of(slot, [outer, inner]) == inner
    assert weight_of(replace(slot, shape=(4,)), [outer, inner]) is None  # Adafactor's rows
    assert weight_of(STEPS, [inner]) is None


def test_a_sharded_optimizer_leaves_weights_whole():
    placed = place([KERNEL, SLOT, STEPS], Parallelism(4, shard_optimizer=True), lambda path: None)
    assert [each.axes for each in placed] == [(None, None), ("batch", None), ()]


def test_a_layout_places_what_it_names():
    asked = parallelism(4, "model", layout=["dense/kernel=model,"])
    placed = place([KERNEL, BIAS, SLOT], asked, dict(asked.layout).get)
    assert [each.axes for each in placed] == [("model", None), (None,), ("model", None)]


@pytest.mark.parametrize(("axes", "words"), [("model", r"1 of the 2 dimensions .*\(128, 512\)"), (",model", "512")])
def test_a_layout_that_does_not_fit_names_path_and_shape(axes, words):
    asked = parallelism(5, "model", layout=[f"dense/kernel={axes}"])
    with pytest.raises(UsageError, match=rf"dense/kernel.*{words}"):
        place([KERNEL], asked, dict(asked.layout).get)


def test_a_layout_that_matches_nothing_gets_the_nearest_paths():
    error = unused_layout(["dens/kernel"], ["embedding/embeddings", "dense/bias", "dense/kernel"])
    assert "'dens/kernel'" in str(error) and "the model has dense/kernel" in str(error)


# XLA's text

MODULE = """
  %all-reduce.1 = (f32[2048]{0}, f32[1024,2048]{1,0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, /*index=5*/f32[8]{0}) \
all-reduce(%a, %b), replica_groups={{0,1}}
  %ag = (f32[2,8]{1,0}, f32[4,8]{1,0}) all-gather-start(f32[2,8]{1,0} %c), dimensions={0}
  %done = f32[4,8]{1,0} all-gather-done(%ag)
  ROOT %all-gather.2 = bf16[4,8]{1,0} all-gather(%d), dimensions={0}
  %fusion = f32[8]{0} fusion(%all-reduce.1), kind=kLoop
"""


def test_exchanges_are_counted_and_added_up():
    whole = 4 * (2048 + 1024 * 2048 + 4 * 8)
    assert collectives(MODULE) == (Collective("all-reduce", 1, whole, whole), Collective("all-gather", 2, 192, 128))
    assert str(collectives(MODULE)[1]) == "2 all-gather (192 B, the largest 128 B)"
    assert collectives("nothing") == ()


# One device's peak

ANSWER = {
    "argument": 1000, "output": 600, "alias": 500, "temp": 400,
    "arguments": {"trainable": [300, 100], "optimizer": [400], "inputs": [200]},
    "placed": [
        {"path": "a/kernel", "shape": [10, 15], "axes": [None, "model"], "bytes": 600, "group": "trainable"},
        {"path": "a/bias", "shape": [25], "axes": [None], "bytes": 100, "group": "trainable"},
        {"path": "adam/a_kernel_m", "shape": [10, 20], "axes": [None, "model"], "bytes": 800, "group": "optimizer"},
    ],
    "collectives": [{"kind": "all-reduce", "count": 1, "bytes": 80, "largest": 80}],
    "live": [{"bytes": 250, "operation": "x", "layer": "a", "phase": "backward"}],
    "instant": {"text": "while computing a", "operation": "jit(train_step)/a/dot", "layer": "a", "phase": "forward"},
    "notes": ["assumed"],
}  # fmt: skip


def test_a_devices_share_is_divided_and_named():
    asked = Parallelism(2, "model")
    weights = {"trainable": [(600, "a"), (100, "a")]}
    found = device_outcome(DevicePlan.from_dict(ANSWER), asked, ["a"], weights)
    assert (found.method, found.execution) == ("xla", "xla")
    assert found.total == 512 + 256 + 512 + 256 + 256 + 512  # each rounded up to 256
    assert found.low < found.total <= found.high
    assert found.categories["gradients"] == 250 and found.categories["workspace"] == 400 + 100 - 250
    assert sum(found.categories.values()) == found.total
    assert found.layers == {"a": 250 + 300 + 100}
    notes = "; ".join(found.notes)
    assert "weights: 400 B of 700 B on a device, by rule" in notes
    assert "all of 1 weights (100 B)" in notes
    assert "optimizer: 400 B of 800 B" in notes
    assert "1 all-reduce (80 B)" in notes and "assumed" in notes
    assert found.unmodelled[0].what.startswith("buffers of the communication library")


def test_an_answer_of_another_kind_is_refused():
    with pytest.raises(InputError, match="device plan"):
        DevicePlan.from_dict({"argument": 1})


def test_the_child_gets_as_many_devices_as_asked_for(monkeypatch):
    asked = {}

    def child(module, data, **options):
        asked.update(options, module=module, data=data)
        return ANSWER

    monkeypatch.setattr(planning, "run_child", child)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    device_plan(ModelRequest("m:f", batch_size=8), Parallelism(4, "model"))
    assert asked["module"] == planning.WORKER
    assert asked["env"]["XLA_FLAGS"].endswith("device_count=4")
    assert (asked["env"]["KERAS_BACKEND"], asked["env"]["JAX_PLATFORMS"]) == ("jax", "cpu")
    assert asked["data"]["parallelism"]["replicas"] == 4


def test_a_batch_that_does_not_come_out_even_is_refused():
    for size, way_out in ((10, "take 8 or 12"), (3, "take 4")):
        with pytest.raises(UsageError, match=way_out):
            device_plan(ModelRequest("m:f", batch_size=size), Parallelism(4, shard_optimizer=True))


def test_without_jax_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"kerasmem\[jax\]"):
        device_plan(ModelRequest("m:f", batch_size=8), Parallelism(4, "model"))
