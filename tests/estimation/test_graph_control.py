"""Control flow laid out straight: by hand, and as TensorFlow lowers it."""

from __future__ import annotations

import keras
import measuring
import numpy as np
import pytest

from kerasmem.devices.kernels import EIGEN, CpuKernels, cpu_kernels
from kerasmem.estimation.graph.build import build_program
from kerasmem.estimation.graph.control import CONTROL, unroll
from kerasmem.estimation.graph.executor import Executor
from kerasmem.estimation.graph.program import Node, NotModelled, Program, Tensor
from kerasmem.models.compiling import TrainingSettings
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import open_model
from kerasmem.models.step import prepare_step, trace_step

layers = keras.layers


class Sketch:
    """A program written down node by node; an input is "name" or ("name", output)."""

    def __init__(self):
        self.nodes, self.number = [], {}

    def add(self, name, kind, inputs=(), controls=(), size=4, outputs=1, **attributes):
        self.number[name] = len(self.nodes)
        self.nodes.append(
            [name, kind, inputs, controls, (Tensor((size // 4,), "float32", size),) * outputs, attributes]
        )
        return name

    def constant(self, name, value, controls=()):
        return self.add(name, "Const", controls=controls, value=np.array(value))

    def program(self, *results):
        def end(item):
            name, output = item if isinstance(item, tuple) else (item, 0)
            return self.number[name], output

        nodes = tuple(
            Node(
                name, kind, tuple(map(end, inputs)), tuple(self.number[item] for item in controls), outputs, attributes
            )
            for name, kind, inputs, controls, outputs, attributes in self.nodes
        )
        return Program(nodes, (), (), tuple(map(end, results)))

    def loop(self, name, times, body, carried, frame=None, **attributes):
        """while i < times: i += 1; x = body(x). The trip count is a constant, or an input where `times` is a name."""
        frame = frame or name
        attributes = {"parallel_iterations": 10, **attributes}
        if isinstance(times, int):
            times = self.constant(f"{name}/times", times)
        zero, one = self.constant(f"{name}/zero", 0), self.constant(f"{name}/one", 1)
        self.add(f"{name}/enter_i", "Enter", [zero], frame_name=frame, **attributes)
        self.add(f"{name}/enter_x", "Enter", [carried], frame_name=frame, **attributes)
        for constant in (times, one):
            self.add(f"{name}/enter_{constant}", "Enter", [constant], frame_name=frame, is_constant=True, **attributes)
        for var in "ix":
            self.add(f"{name}/merge_{var}", "Merge", [f"{name}/enter_{var}", f"{name}/next_{var}"], outputs=2)
        self.add(f"{name}/less", "Less", [f"{name}/merge_i", f"{name}/enter_{times}"])
        self.add(f"{name}/cond", "LoopCond", [f"{name}/less"])
        for var in "ix":
            self.add(f"{name}/switch_{var}", "Switch", [f"{name}/merge_{var}", f"{name}/cond"], outputs=2)
            self.add(f"{name}/exit_{var}", "Exit", [(f"{name}/switch_{var}", 0)])
        self.add(f"{name}/add", "AddV2", [(f"{name}/switch_i", 1), f"{name}/enter_{one}"])
        self.add(f"{name}/next_i", "NextIteration", [f"{name}/add"])
        self.add(f"{name}/next_x", "NextIteration", [body((f"{name}/switch_x", 1))])
        return f"{name}/exit_x"

    def inner_loop(self, kind, x):
        """Run a node of a kind twice in a loop inside a loop, after one of the outer; return both results."""
        start = self.add("outer_body", "Square", [x])
        # Constants made inside a frame must come from it: they hang on what enters each iteration.
        for name, value in (("inner/times", 2), ("inner/zero", 0), ("inner/one", 1)):
            self.constant(name, value, controls=["outer_body"])
        self.constant = lambda name, value, controls=(): name
        return start, self.loop("inner", 2, lambda y: self.add("inner_body", kind, [y]), start)


def count(program, name):
    return sum(node.name == name for node in program.nodes)


def chain(program, end):
    """The names from a result back along first inputs."""
    names = []
    while True:
        node = program.nodes[end[0]]
        names.append(node.name)
        if not node.inputs:
            return names
        end = node.inputs[0]


def executor_of(program, slow):
    """An executor of two threads for which the nodes of one name take long."""
    return Executor(program, CpuKernels(EIGEN), [1.0 if node.name == slow else 1e-6 for node in program.nodes])


def test_unroll_returns_a_straight_program_unchanged():
    sketch = Sketch()
    sketch.add("x", "Placeholder")
    program = sketch.program(sketch.add("y", "Relu", ["x"]))
    assert unroll(program) == (program, ())


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_loop_is_spelled_out(times):
    sketch = Sketch()
    sketch.add("x", "Placeholder")
    out = sketch.loop("loop", times, lambda x: sketch.add("body", "Square", [x]), "x")
    straight, notes = unroll(sketch.program(out))
    assert notes == ()
    assert not {node.type for node in straight.nodes} & CONTROL
    assert count(straight, "body") == times
    assert count(straight, "loop/add") == times
    assert count(straight, "loop/less") == times + 1
    assert chain(straight, straight.results[0]) == ["body"] * times + ["x"]
    for number, node in enumerate(straight.nodes):
        assert all(source < number for source in (*node.controls, *(source for source, _ in node.inputs)))


def test_a_loop_in_a_loop():
    sketch = Sketch()
    sketch.add("x", "Placeholder")
    out = sketch.loop("outer", 3, lambda x: sketch.inner_loop("Exp", x)[1], "x")
    straight, _ = unroll(sketch.program(out))
    assert count(straight, "outer_body") == 3
    assert count(straight, "inner_body") == 6
    assert chain(straight, straight.results[0]) == ["inner_body", "inner_body", "outer_body"] * 3 + ["x"]


def ancestors(program, number):
    """The nodes that a node waits for, directly or not."""
    found, pending = set(), [number]
    while pending:
        node = program.nodes[pending.pop()]
        new = {*node.controls, *(source for source, _ in node.inputs)} - found
        found |= new
        pending += new
    return found


@pytest.mark.parametrize("most", [1, 3])
def test_an_iteration_waits_for_the_one_that_must_end_before(most):
    """Also if the loop's counter runs ahead, while a constant of the loop is still computed by another loop."""
    sketch = Sketch()
    sketch.add("x", "Placeholder")
    late = sketch.loop("first", 8, lambda x: sketch.add("before", "Square", [x]), "x", parallel_iterations=most)
    sketch.add("loop/enter_late", "Enter", [late], frame_name="loop", is_constant=True, parallel_iterations=most)

    def body(x):
        sketch.add("work", "Exp", [x, "loop/enter_late"])
        return sketch.add("body", "Square", [x])

    program, _ = unroll(sketch.program(sketch.loop("loop", 8, body, "x", parallel_iterations=most)))
    runs = {name: [at for at, node in enumerate(program.nodes) if node.name == name] for name in ("work", "body")}
    assert [len(numbers) for numbers in runs.values()] == [8, 8]
    for iteration, number in enumerate(runs["body"]):
        awaited = [other for other, work in enumerate(runs["work"]) if work in ancestors(program, number)]
        assert awaited == [*range(iteration - most + 1)]


def test_next_iteration_waits_only_for_the_counter():
    """Grappler has the constants of a loop's condition wait for all its variables, TensorFlow's runtime does not."""
    sketch = Sketch()
    sketch.add("x", "Placeholder")
    out = sketch.loop("loop", 6, lambda x: sketch.add("body", "Conv2D", [x]), "x")
    sketch.nodes[sketch.number["loop/less"]][3] = ["loop/merge_x", "loop/merge_i"]
    straight, _ = unroll(sketch.program(out))
    order = executor_of(straight, "body").order()
    names = [straight.nodes[number].name for number, _ in order]
    assert "body" not in names[: names.index("loop/less")]
    last = len(names) - 1 - names[::-1].index("loop/less")
    assert names[:last].count("body") <= 2  # the first one's start, and that of its neighbour or its end


@pytest.mark.parametrize(
    ("times", "reason"),
    [("n", "number of iterations of loop/cond depends on the data"), (10**9, "at most 100 operations")],
)
def test_a_loop_must_end_after_a_known_number_of_times(monkeypatch, times, reason):
    monkeypatch.setattr("kerasmem.estimation.graph.control.LONGEST", 100)
    sketch = Sketch()
    sketch.add("x", "Placeholder")
    sketch.add("n", "Placeholder")
    out = sketch.loop("loop", times, lambda x: sketch.add("body", "Square", [x]), "x")
    with pytest.raises(NotModelled, match=reason):
        unroll(sketch.program(out))


@pytest.mark.parametrize(
    ("value", "sizes", "of_yes", "taken"),
    [(None, (4, 4000), "Log", "yes"), (None, (4000, 4), "Log", "no"), (None, (4, 4000), "Where", "no"),
     (True, (4, 4000), "Log", "yes"), (False, (4, 4000), "Log", "no")],
)  # fmt: skip
def test_larger_branch_runs_if_the_condition_is_unknown(value, sizes, of_yes, taken):
    sketch = Sketch()
    sketch.add("x", "Placeholder")
    if value is None:
        sketch.add("maybe", "Placeholder")
    else:
        sketch.constant("maybe", value)
    sketch.add("switch", "Switch", ["x", "maybe"], outputs=2)
    sketch.add("no", "Exp", [("switch", 0)], size=sizes[0])
    sketch.add("yes", of_yes, [("switch", 1)], size=sizes[1])
    sketch.add("merge", "Merge", ["no", "yes"], outputs=2)
    straight, notes = unroll(sketch.program(sketch.add("y", "Relu", ["merge"])))
    assert {node.name for node in straight.nodes} & {"yes", "no"} == {taken}
    others = [{node.name for node in other.nodes} & {"yes", "no"} for other in straight.alternatives]
    assert others == [{"yes", "no"} - {taken}] * (value is None)
    assert straight.is_usual and all(other.is_usual for other in straight.alternatives)
    assert chain(straight, straight.results[0]) == ["y", taken, "x"]
    assert [("maybe" in note, "the larger one" in note) for note in notes] == [(True, True)] * (value is None)


def branch(sketch, name, condition, source):
    """A branch with an operation of its own for each value of a condition."""
    sketch.add(f"{name}/switch", "Switch", [source, condition], outputs=2)
    sketch.add(f"{name}/no", "Exp", [(f"{name}/switch", 0)])
    sketch.add(f"{name}/yes", "Log", [(f"{name}/switch", 1)])
    return sketch.add(f"{name}/merge", "Merge", [f"{name}/no", f"{name}/yes"], outputs=2)


def branches(program):
    return {node.name for node in program.nodes if node.type in ("Exp", "Log")}


@pytest.mark.parametrize("kind", ["each", "other", "finite", "not", "second"])
def test_branch_of_most_steps_is_counted_if_it_is_known(kind):
    sketch = Sketch()
    sketch.add("x", "Placeholder")
    sketch.add("step", "Placeholder")
    sketch.constant("zero", 0)
    sketch.constant("n", 2 if kind == "second" else 100)
    if kind in ("each", "second", "not"):
        sketch.add("rest", "FloorMod", ["step", "n"])
        sketch.add("at", "Equal", ["rest", "zero"])
        sketch.add("maybe", "LogicalNot" if kind == "not" else "Identity", ["at"])
    elif kind == "finite":
        sketch.add("a", "IsFinite", ["x"])
        sketch.add("b", "IsFinite", ["step"])
        sketch.add("both", "Pack", ["a", "b"])
        sketch.constant("axis", 0)
        sketch.add("maybe", "All", ["both", "axis"])
    else:
        sketch.add("maybe", "Equal", ["step", "zero"])
    program, notes = unroll(sketch.program(branch(sketch, "if", "maybe", "x")))
    (other,) = program.alternatives
    assert branches(other) == {"if/yes", "if/no"} - branches(program)
    is_known = kind not in ("other", "second")
    assert (program.is_usual, other.is_usual) == (True, not is_known)
    assert ("of most steps" in notes[0]) == is_known
    if is_known:
        assert branches(program) == ({"if/no"} if kind == "each" else {"if/yes"})


def test_alternatives_are_all_combinations_up_to_a_limit(monkeypatch):
    sketch = Sketch()
    end = sketch.add("x", "Placeholder")
    for number in range(3):
        end = branch(sketch, f"if{number}", sketch.add(f"maybe{number}", "Placeholder"), end)
    program, notes = unroll(sketch.program(end))
    combinations = {frozenset(branches(each)) for each in (program, *program.alternatives)}
    assert len(combinations) == 1 + len(program.alternatives) == 8
    assert len(notes) == 3
    monkeypatch.setattr("kerasmem.estimation.graph.control.MOST_ALTERNATIVES", 3)
    program, notes = unroll(sketch.program(end))
    assert len(program.alternatives) == 3
    assert "only 4 combinations" in notes[-1]


def program_of(model, batch_size, mode="train"):
    with open_model(model) as opened:
        structure, inputs = model_inputs(opened.model, {})
        traced = trace_step(prepare_step(opened.model, TrainingSettings(), structure, inputs, batch_size, mode))
        return build_program(traced, cpu_kernels())


def products(program):
    return sum(node.type in ("MatMul", "_FusedMatMul") for node in program.nodes)


def large_constants(program):
    constants = [node.outputs[0].bytes for node in program.nodes if node.type == "Const"]
    return [size for size in constants if size > 100 << 10]


def test_constants_are_folded_up_to_10_mib(program):
    assert large_constants(program_of(measuring.maps(), 128)[0]) == []
    simulated, _ = program_of(measuring.maps(), 64)
    folded = 64 * 32 * 32 * 24 * 4
    assert large_constants(simulated) == [folded]
    batch = sum(simulated.nodes[number].outputs[0].bytes for number in simulated.arguments)
    before = measuring.measure(program, "maps", 64, "fixed")["before"]
    held_constants = before - batch - sum(variable.bytes for variable in simulated.variables)
    assert folded <= held_constants < folded + batch  # its chunks may be nearly twice as large


def test_a_real_lstm():
    times = 5
    model = keras.Sequential([keras.Input((times, 5)), layers.LSTM(6)])
    program, notes = program_of(model, 4, "inference")
    assert notes == ()
    assert not {node.type for node in program.nodes} & CONTROL
    assert products(program) == 2 * times  # the input's and the state's, once a time step
    model.compile("sgd", "mse")
    trained, _ = program_of(model, 4)
    # Backward: for each of the two the gradients of both factors, but for the input's own.
    assert products(trained) in (2 * times + 3 * times, 2 * times + 4 * times)
    assert all(
        tensor.bytes is not None for node in trained.nodes for tensor in node.outputs if tensor.dtype != "variant"
    )


def test_a_real_loop_in_a_loop_is_trained():
    """How often the inner loop runs backward, and on what, is on lists that are on a list of the outer one."""
    import tensorflow as tf

    class Refined(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 3))

        def call(self, x):
            def turn(j, z):
                return j + 1, tf.matmul(z, self.kernel)

            def refine(i, y):
                return i + 1, tf.while_loop(lambda j, _: j < 2, turn, (0, y))[1]

            return tf.while_loop(lambda i, _: i < 3, refine, (0, x))[1]

    inputs = keras.Input((3,))
    model = keras.Model(inputs, Refined()(inputs))
    model.compile("sgd", "mse")
    program, _ = program_of(model, 4)
    assert products(program) in (3 * 6 - 1, 3 * 6)


def test_a_loop_that_a_kernel_runs_as_a_whole():
    import tensorflow as tf

    class Scores(layers.Layer):  # the loop of TensorFlow's CTC loss is not made to be spelled out
        def call(self, x):
            labels, lengths = tf.ones((4, 2), tf.int32), tf.fill((4,), 2)
            return tf.nn.ctc_loss(labels, x, lengths, tf.fill((4,), 6), logits_time_major=False)

    inputs = keras.Input((6, 5))
    program, _ = program_of(keras.Model(inputs, Scores()(inputs)), 4, "inference")
    assert not {node.type for node in program.nodes} & {"While", "StatelessWhile"}


def test_a_size_that_follows_from_a_scan_over_constants():
    """A loss that makes sparse labels from their lengths, as Keras's `ctc_batch_cost` does."""
    import tensorflow as tf

    def within(_, length):
        return tf.range(6) < length

    class Scores(layers.Layer):
        def call(self, x):
            places = tf.where(
                tf.scan(within, tf.fill((4,), 6), initializer=tf.fill((6,), False), parallel_iterations=1)
            )
            labels = tf.SparseTensor(places, tf.ones(tf.shape(places)[:1], tf.int32), (4, 6))
            time_first = tf.transpose(x, (1, 0, 2))
            return tf.compat.v1.nn.ctc_loss(labels, time_first, tf.fill((4,), 12))

    inputs = keras.Input((12, 5))
    model = keras.Model(inputs, Scores()(inputs))
    program, _ = program_of(model, 4, "inference")
    assert [node.outputs[0].shape for node in program.nodes if node.type == "Where"] in ([], [(24, 2)])
    assert [node.outputs[1].shape for node in program.nodes if node.type == "CTCLoss"] == [(12, 4, 5)]


def test_a_size_between_two_ends_that_are_the_same():
    kinds = keras.Input((3,), dtype="int32")
    model = keras.Model(kinds, layers.CategoryEncoding(7, output_mode="multi_hot")(kinds))
    program, _ = program_of(model, 4, "inference")
    assert [node.outputs[0].shape for node in program.nodes if node.type == "DenseBincount"] == [(4, 7)]
