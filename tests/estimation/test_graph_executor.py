"""The order in which operations run, and who holds which buffer."""

from __future__ import annotations

from dataclasses import replace

import keras
import pytest

from kerasmem.devices.kernels import EIGEN, ONEDNN, CpuKernels
from kerasmem.estimation.allocator import LARGEST_WASTE, Heap
from kerasmem.estimation.graph.build import build_program, merge_bias_gradients
from kerasmem.estimation.graph.executor import EXPENSIVE_SECONDS, Executor
from kerasmem.estimation.graph.memory import HANDLE_BYTES, Memory, recipes_of
from kerasmem.estimation.graph.program import Node, NotModelled, Program, Tensor, Variable
from kerasmem.estimation.graph.rules import TABLES
from kerasmem.estimation.graph.steps import graph_outcome
from kerasmem.models.compiling import TrainingSettings
from kerasmem.models.inputs import model_inputs
from kerasmem.models.op_names import Attribution
from kerasmem.models.opening import open_model
from kerasmem.models.step import prepare_step, trace_step

layers = keras.layers
ONE, TWO = CpuKernels(EIGEN, (), 1), CpuKernels(EIGEN, (), 2)
COST = 10 * EXPENSIVE_SECONDS


def program(*nodes, variables=(), results=(), arguments=()):
    """Write a program: (name, type, inputs ("name" or ("name", output)), bytes, …): outputs are float32 vectors."""
    number = {name: place for place, (name, *_) in enumerate(nodes)}

    def end(item):
        name, output = item if isinstance(item, tuple) else (item, 0)
        return number[name], output

    nodes_of_program = []
    for name, kind, inputs, size, *rest in nodes:
        more = dict(rest[0]) if rest else {}
        sizes = size if isinstance(size, tuple) else (size,)
        nodes_of_program.append(
            Node(
                name, kind, tuple(map(end, inputs)), tuple(number[item] for item in more.pop("after", ())),
                tuple(Tensor(None if item is None else (item // 4,), "float32", item) for item in sizes),
                {}, more.pop("variable", None),
            )
        )  # fmt: skip
    placeholders = tuple(number[name] for name in arguments)
    return Program(tuple(nodes_of_program), tuple(variables), placeholders, tuple(map(end, results)))


def weight(size, kind="weights"):
    return Variable("w", size, kind, "filled", (size // 4,), "float32")


def starts(step, kernels=ONE, costs=None):
    """The names of nodes in the order in which they start."""
    costs = costs or {}
    order = Executor(step, kernels, [costs.get(node.name, 0.0) for node in step.nodes]).order()
    assert sorted(order) == sorted([(n, end) for n in range(len(step.nodes)) for end in (False, True)])
    return [step.nodes[number].name for number, end in order if not end]


class Run:
    """One step or several of a program in a heap, and what was in use at each moment."""

    def __init__(self, step, kernels=ONE):
        self.made, self.heap = step, Heap()
        self.executor = Executor(step, kernels, [0.0] * len(step.nodes))
        self.memory = Memory(step, recipes_of(step, kernels), self.heap)
        self.before = self.heap.allocator.in_use

    def step(self):
        """Return, by name, how many bytes its start added, and assert that nothing is left at the end."""
        added = {}
        order = self.executor.order()
        for number, is_end in order:
            if is_end:
                self.memory.end(number)
            else:
                requested = self.heap.allocator.requested_in_use
                self.memory.start(number)
                added[self.made.nodes[number].name] = self.heap.allocator.requested_in_use - requested
        self.memory.run([])  # drops what the step returned
        return added


# Order


START = ("a", "Placeholder", [], 4)
BRANCHES = tuple((name, "Conv2D", ["a"], 4) for name in "xyz")
ORDERS = {
    "after all that it waits for": (
        [START, ("b", "Relu", ["a"], 4), ("c", "Relu", ["a"], 4, {"after": ["d"]}), ("d", "Relu", ["b"], 4),
         ("e", "AddV2", ["c", "d"], 4)],
        {}, "a b d c e",
    ),
    "inexpensive ones inline, first in, first out": (
        [START, ("b", "Identity", ["a"], 4), ("c", "Identity", ["a"], 4), ("b2", "Identity", ["b"], 4),
         ("c2", "Identity", ["c"], 4)],
        {}, "a b c b2 c2",
    ),
    # z is kept, and what it makes ready goes before what was handed to the queue; there the last handed is first.
    "of expensive ones the last is kept": ([START, *BRANCHES, ("z2", "Conv2D", ["z"], 4)], {}, "a z z2 y x"),
    "expensive ones after inexpensive ones": (
        [START, BRANCHES[0], ("i", "Identity", ["a"], 4), ("i2", "Identity", ["i"], 4)], {}, "a i i2 x",
    ),
    "what waits for nothing before all that takes long": (
        [("a", "Const", [], 4), BRANCHES[0], ("b", "Const", [], 4), ("y", "Conv2D", ["b"], 4)], {}, "a b y x",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "costs", "expected"), ORDERS.values(), ids=ORDERS)
def test_the_order_of_one_thread(nodes, costs, expected):
    long = {name: COST for name, kind, *_ in nodes if kind == "Conv2D"}
    assert starts(program(*nodes), costs={**long, **costs}) == expected.split()


def test_a_kernel_that_takes_no_time_is_expensive_outside_loops_unless_it_says_otherwise():
    assert starts(program(START, *BRANCHES[:2], ("z", "Identity", ["a"], 4))) == ["a", "z", "y", "x"]


def test_the_other_thread_steals_from_the_back():
    # The first thread keeps z; its queue is y, x from the front; the thief takes x.
    assert starts(program(START, *BRANCHES), TWO, dict.fromkeys("xyz", COST)) == ["a", "z", "x", "y"]


def test_onednn_computes_the_gradient_of_a_bias_with_that_of_the_filter():
    apart = program(
        START, ("bias", "BiasAddGrad", ["a"], 8), ("sum", "Neg", ["bias"], 8),
        ("filter", "Conv2DBackpropFilter", ["a", "a", "a"], 16), results=["bias"],
    )  # fmt: skip
    assert merge_bias_gradients(apart, ONE) == apart
    merged = merge_bias_gradients(apart, CpuKernels(ONEDNN, ("float32",)))
    assert [tensor.bytes for tensor in merged.nodes[3].outputs] == [16, 8]
    assert merged.nodes[2].inputs == merged.results == ((3, 1),)
    assert (merged.nodes[1].type, merged.nodes[1].outputs) == ("NoOp", ())


# Buffers


X, A, B = ("x", "Placeholder", [], 0), ("a", "Conv2D", ["x"], 1024), ("b", "Relu", ["a"], 1024)
TAKEN_OVER = {
    "a buffer that nobody else holds": ([X, A, B, ("c", "AddV2", ["x", "b"], 1024)], [0, 1024, 0, 0]),
    "none that somebody still needs": ([X, A, B, ("c", "Mul", ["a", "b"], 1024)], [0, 1024, 1024, 0]),
    "none of another size, nor by an operation that never does": (
        [X, A, ("b", "Relu", ["a"], 2048), ("c", "Transpose", ["b"], 2048)], [0, 1024, 2048, 2048],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "added"), TAKEN_OVER.values(), ids=TAKEN_OVER)
def test_an_output_takes_over(nodes, added):
    assert list(Run(program(*nodes, results=["c"])).step().values()) == added


def test_the_callers_batch_is_never_reused():
    step = program(("x", "Placeholder", [], 1024), ("a", "Relu", ["x"], 1024), arguments=["x"])
    run = Run(step)
    assert run.step()["a"] in (0, 1024)
    held = run.heap.allocator.in_use
    run.step()
    assert run.heap.allocator.in_use == held == run.before


def test_constants_of_shape_functions_stay():
    step = program(X, A)
    assert Run(replace(step, shape_constants=3)).before == Run(step).before + 3 * 256


def test_a_view_holds_the_buffer():
    step = program(
        ("x", "Placeholder", [], 0), ("a", "Conv2D", ["x"], 1024), ("v", "Reshape", ["a"], 1024),
        ("b", "Relu", ["v"], 1024), ("c", "Exp", ["v"], 1024),
    )  # fmt: skip
    added = Run(step).step()
    assert added["v"] == 0
    assert sorted((added["b"], added["c"])) == [0, 1024]  # the second is the only holder


def test_scratch_lives_as_long_as_its_operation(monkeypatch):
    monkeypatch.setitem(TABLES[EIGEN].scratch, "Conv2D", lambda node, inputs, kernels: (4096,))
    step = program(("x", "Placeholder", [], 0), ("a", "Conv2D", ["x"], 1024), ("b", "Transpose", ["a"], 1024))
    run = Run(step)
    assert run.step() == {"x": 0, "a": 1024 + 4096, "b": 1024}
    assert run.heap.peak.requested - run.before < 1024 + 4096 + 1024


def update(read_after):
    """w -= g, while somebody reads w before and, perhaps, still holds it."""
    return program(
        ("h", "VarHandleOp", [], 0, {"variable": 0}), ("x", "Placeholder", [], 0),
        ("r", "ReadVariableOp", ["h"], 1024, {"variable": 0}), ("g", "Conv2D", ["x"], 1024, {"after": ["r"]}),
        ("u", "AssignSubVariableOp", ["h", "g"], 0, {"variable": 0}),
        *([("late", "Transpose", ["r"], 1024, {"after": ["u"]})] if read_after else []),
        variables=[weight(1024)],
    )  # fmt: skip


@pytest.mark.parametrize(("is_read", "added"), [(False, 0), (True, 1024)])
def test_a_variable_is_changed_in_place_unless_it_is_being_read(is_read, added):
    run = Run(update(read_after=is_read))
    old = run.memory.variables[0]
    assert run.step()["u"] == added
    assert (run.memory.variables[0] is old) != is_read
    assert old.holders == (0 if is_read else 1)
    assert run.heap.allocator.in_use == run.before


def test_sum_in_place_holds_one_summand():
    """What Grappler's memory optimizer makes of an AddN."""
    step = program(
        ("x", "Placeholder", [], 0), ("v", "TemporaryVariable", [], 1024), ("zeros", "Const", [], 1024),
        ("start", "Assign", ["v", "zeros"], 1024), ("a", "Conv2D", ["x"], 1024, {"after": ["start"]}),
        ("add_a", "AssignAdd", ["start", "a"], 1024), ("b", "Conv2D", ["x"], 1024, {"after": ["add_a"]}),
        ("add_b", "AssignAdd", ["start", "b"], 1024),
        ("sum", "DestroyTemporaryVariable", ["v"], 1024, {"after": ["add_a", "add_b"]}), results=["sum"],
    )  # fmt: skip
    run = Run(step)
    assert {name: size for name, size in run.step().items() if size} == {"v": 1024, "a": 1024, "b": 1024}
    assert run.heap.peak.in_use == run.before + 2 * 1024


def test_upper_end_includes_waste_in_one_chunk():
    step = program(
        ("x", "Placeholder", [], 0), ("a", "Conv2D", ["x"], 1 << 30), ("b", "Conv2D", ["a"], 4), results=["b"]
    )
    outcome = graph_outcome(step, {}, Attribution({}, (), ()), ONE)
    assert outcome.high == outcome.total + LARGEST_WASTE
    assert not outcome.unmodelled


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [([("x", "Placeholder", [], 4), ("w", "Where", ["x"], None)], r"size of w \(Where\) depends on the data"),
     ([("h", "VarHandleOp", [], 0), ("r", "ReadVariableOp", ["h"], 4)], "variable of r")],
)  # fmt: skip
def test_unknown_sizes_and_variables_are_refused(nodes, reason):
    with pytest.raises(NotModelled, match=reason):
        Run(program(*nodes)).step()


# Conservation, on real steps


def convnet():
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1)), layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization(),
            layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.5), layers.Dense(3, activation="softmax"),
        ]
    )  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def recurrent():
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(20, 4), layers.GRU(6), layers.Dense(1)]
    )
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("build", [convnet, recurrent])
@pytest.mark.parametrize(("workers", "kind"), [(1, ONEDNN), (2, ONEDNN), (2, EIGEN)])
def test_nothing_is_lost_or_freed_twice_in_many_steps(build, workers, kind):
    kernels = CpuKernels(kind, ("float32",), workers)
    with open_model(build) as opened:
        structure, inputs = model_inputs(opened.model, {})
        step, _ = build_program(
            trace_step(prepare_step(opened.model, TrainingSettings(), structure, inputs, 8)), kernels
        )
    heap = Heap()
    executor = Executor(step, kernels, [COST] * len(step.nodes))
    memory = Memory(step, recipes_of(step, kernels), heap)
    after = []
    for _ in range(8):
        memory.run(executor.order(1.0))
        after.append(heap.allocator.requested_in_use)
        assert all(buffer.holders == 1 for buffer in memory.variables) or len(after) == 1
    assert len(set(after[1:])) == 1, after
    values = sum(max(item.bytes, 1) for item in step.variables)
    batch = sum(step.nodes[number].outputs[0].bytes for number in step.arguments)
    constants = {node.name: max(node.outputs[0].bytes, 1) for node in step.nodes if node.type == "Const"}
    handles = HANDLE_BYTES * len(step.variables)
    assert after[-1] - values - batch - sum(constants.values()) == handles + step.shape_constants
