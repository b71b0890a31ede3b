"""In which order operations that become ready together come, on either kind of CPU kernels."""

from __future__ import annotations

import json
import random

import pytest

from kerasmem.devices.kernels import EIGEN, ONEDNN, CpuKernels
from kerasmem.estimation.graph.build import _with_absorbed
from kerasmem.estimation.graph.executor import KEPT_IN_ORDER, consumers_in_order
from kerasmem.estimation.graph.program import Node, Program, Tensor
from kerasmem.estimation.graph.rules import rules_of

OWN, OTHERS = rules_of(CpuKernels(EIGEN)), rules_of(CpuKernels(ONEDNN, ("float32",)))


def written(*nodes):
    """Write a program: (name, type, inputs, nodes that it comes after)."""
    number = {name: place for place, (name, *_) in enumerate(nodes)}
    made = Tensor((64,), "float32", 256)
    return Program(
        tuple(
            Node(
                name, kind, tuple((number[each], 0) for each in inputs),
                tuple(number[each] for each in (after[0] if after else ())), (made,), {},
            )
            for name, kind, inputs, *after in nodes
        ),
        (), (), (),
    )  # fmt: skip


def consumers(made, of, rules, process=0):
    names = [node.name for node in made.nodes]
    return [names[each] for each in consumers_in_order(made, rules, random.Random(process))[names.index(of)]]


GRADIENTS = (
    ("x", "Placeholder", []), ("g", "ReluGrad", ["x"]), ("filter", "Conv2DBackpropFilter", ["g", "g", "g"]),
    ("input", "Conv2DBackpropInput", ["g"]), ("other", "Neg", ["g"]), ("end", "NoOp", [], ["g"]),
)  # fmt: skip


def test_tensorflows_own_kernels_come_in_the_definitions_order():
    made = written(*GRADIENTS[:2], GRADIENTS[5], *GRADIENTS[2:5])
    assert consumers(made, "g", OWN) == ["filter", "filter", "filter", "input", "other", "end"]


def test_what_onednn_rewrites_comes_behind_the_others():
    assert consumers(written(*GRADIENTS), "g", OTHERS) == ["other", "filter", "filter", "filter", "input", "end"]


def test_where_the_search_begins_decides_and_differs_between_processes():
    """Found from the kernel, the gradient of the input is done before that of the filter; found from `x`, behind it."""
    made = written(
        ("x", "Placeholder", []), ("kernel", "Placeholder", []), ("conv", "Conv2D", ["x", "kernel"]),
        ("g", "ReluGrad", ["conv"]), ("input", "Conv2DBackpropInput", ["g", "kernel"]),
        ("filter", "Conv2DBackpropFilter", ["g"]),
    )  # fmt: skip
    found = {tuple(consumers(made, "g", OTHERS, process)) for process in range(20)}
    assert found == {("filter", "input"), ("input", "filter")}
    assert {tuple(consumers(made, "g", OWN, process)) for process in range(20)} == {("input", "filter")}


def test_many_consumers_come_in_no_order():
    few, many = (
        written(("x", "Placeholder", []), *((f"c{number}", "Neg", ["x"]) for number in range(count)))
        for count in (KEPT_IN_ORDER, KEPT_IN_ORDER + 1)
    )
    assert consumers(few, "x", OWN) == [f"c{number}" for number in range(KEPT_IN_ORDER)]
    assert len({tuple(consumers(many, "x", OWN, process)) for process in range(5)}) == 5


def test_the_gradient_of_a_filter_takes_over_that_of_the_bias():
    made = written(
        *GRADIENTS[:3], ("bias", "BiasAddGrad", ["g"]), GRADIENTS[3], ("sum", "Neg", ["bias"]),
        ("end", "NoOp", [], ["bias"]),
    )  # fmt: skip
    assert _with_absorbed(list(made.nodes), OWN) == list(made.nodes)
    nodes = _with_absorbed(list(made.nodes), OTHERS)
    by_name = {node.name: node for node in nodes}
    assert (by_name["bias"].type, by_name["bias"].inputs) == ("NoOp", ())
    assert len(by_name["filter"].outputs) == 2
    assert by_name["sum"].inputs == ((2, 1),) and by_name["end"].controls == (2,)
    merged = Program(tuple(nodes), (), (), ())
    # It was added last, and the gradient of the input came into the place of the bias's.
    assert consumers(merged, "g", OTHERS) == ["input", "filter", "filter", "filter"]


_STEP = """
import json, sys, tempfile
from pathlib import Path
import keras, tensorflow as tf
from kerasmem.devices.kernels import cpu_kernels
from kerasmem.estimation.graph import steps
from kerasmem.estimation.graph.build import build_program
from kerasmem.estimation.graph.executor import Executor
from kerasmem.estimation.graph.rules import rules_of
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import open_model
from kerasmem.models.step import prepare_step, trace_step
from tensorflow.tsl.profiler.protobuf import xplane_pb2
import random

layers = keras.layers
def build():
    image = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    y = layers.MaxPooling2D()(layers.Conv2D(16, 3, padding="same", activation="relu")(x))
    y = layers.UpSampling2D()(layers.Conv2D(16, 3, padding="same", activation="relu")(y))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(layers.Concatenate()([x, y]))
    model = keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model

kernels = cpu_kernels()
with open_model(build) as opened:
    structure, inputs = model_inputs(opened.model, {})
    traced = trace_step(prepare_step(opened.model, opened.training, structure, inputs, 8))
made, _ = build_program(traced, rules_of(kernels))
large = {node.name for node in made.nodes if sum(each.bytes or 0 for each in node.outputs) > 30_000}
keras.utils.clear_session()  # the same names again
model, x, y = build(), tf.zeros((8, 32, 32, 3)), tf.zeros((8,), tf.int32)
model.train_on_batch(x, y)
with tempfile.TemporaryDirectory() as folder:
    tf.profiler.experimental.start(folder)
    model.train_on_batch(x, y)
    tf.profiler.experimental.stop()
    space = xplane_pb2.XSpace.FromString(next(Path(folder).rglob("*.xplane.pb")).read_bytes())
ran = []
for plane in space.planes:
    names = {key: value.name.rpartition(":")[0] for key, value in plane.event_metadata.items()}
    for line in plane.lines:
        at = [(line.timestamp_ns * 1000 + event.offset_ps, names[event.metadata_id]) for event in line.events]
        ran += [each for each in at if each[1] in large]
ran = [name for _, name in sorted(ran)]
agree = []
for process in range(20):
    executor = Executor(made, rules_of(kernels), lambda node: 1e-5, process=random.Random(process))
    place = {made.nodes[number].name: place for place, (number, end) in enumerate(executor.order()) if not end}
    order = [place[name] for name in ran]
    pairs = [one < other for at, one in enumerate(order) for other in order[at + 1:]]
    agree.append(sum(pairs) / len(pairs))
print(json.dumps({"kind": kernels.kind, "workers": kernels.inter_op_threads, "ran": len(ran), "agree": agree}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ONEDNN, EIGEN])
def test_one_thread_runs_a_real_step_in_the_order_of_one_of_the_processes(program, x86_kernels, kind):
    made = program(
        "-c",
        _STEP,
        env={
            "TF_ENABLE_ONEDNN_OPTS": str(int(kind == ONEDNN)),
            "TF_NUM_INTEROP_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
        },
    )
    assert made.code == 0, made.err[-2000:]
    found = json.loads(made.out.splitlines()[-1])
    assert (found["kind"], found["workers"]) == (kind, 1) and found["ran"] >= 15
    assert max(found["agree"]) >= 0.99, found
