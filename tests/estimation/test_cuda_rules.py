"""The rules of TensorFlow's CUDA kernels against sizes worked out by hand, and where operations are put."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from kerasmem.devices.catalogue import resolve_device
from kerasmem.devices.kernels import CUDA, EIGEN, CardKernels, CpuKernels, kernels_on
from kerasmem.estimation.allocator import Heap
from kerasmem.estimation.graph.build import on_card
from kerasmem.estimation.graph.cuda import rnn_reserve
from kerasmem.estimation.graph.executor import Executor
from kerasmem.estimation.graph.memory import Memory, recipes_of
from kerasmem.estimation.graph.program import COPY, Node, Program, Tensor
from kerasmem.estimation.graph.rules import TABLES
from kerasmem.estimation.graph.steps import graph_outcome
from kerasmem.estimation.unmodelled import REDZONES, TENSORFLOW_WORKSPACE_LIMIT
from kerasmem.models.op_names import Attribution

BYTES = {"float32": 4, "float16": 2, "int32": 4}
BESIDE = CpuKernels(EIGEN, (), 2, 2)
T4 = CardKernels((7, 5), 14 << 30, BESIDE)
A100 = CardKernels((8, 0), 38 << 30, BESIDE)


def tensor(*shape, dtype="float32", on_host=False):
    return Tensor(shape, dtype, prod(shape) * BYTES[dtype], on_host)


def needs(kind, inputs, output, card=T4, workspace=0, **attributes):
    """The bytes that an operation works in."""
    node = Node("node", kind, tuple((0, 0) for _ in inputs), (), (output,), attributes)
    return list(TABLES[CUDA].scratch[kind](node, tuple(inputs), replace(card, workspace=workspace)))


IMAGE, FIRST, FILTERS = tensor(2, 8, 8, 3), tensor(2, 3, 8, 8), tensor(3, 3, 3, 16)
FILTER_BYTES = 3 * 3 * 3 * 16 * 4
PADDED = 2 * 3 * 9 * 9 * 4  # eight pixels, stride 2 and a window of 3: one more on the far side alone


def convolved(kind, is_last, stride=1, **more):
    side = 8 // stride
    result = tensor(2, side, side, 16) if is_last else tensor(2, 16, side, side)
    image = IMAGE if is_last else FIRST
    shape = tensor(4, dtype="int32")
    inputs, output = {
        "Conv2D": ((image, FILTERS), result),
        "Conv2DBackpropInput": ((shape, FILTERS, result), image),
        "Conv2DBackpropFilter": ((image, shape, result), FILTERS),
    }[kind]
    strides = [1, stride, stride, 1] if is_last else [1, 1, stride, stride]
    layout = b"NHWC" if is_last else b"NCHW"
    return needs(kind, inputs, output, strides=strides, padding=b"SAME", data_format=layout, **more)


@pytest.mark.parametrize(
    ("kind", "is_last", "stride", "card", "expected"),
    [
        ("Conv2D", False, 1, T4, [FILTER_BYTES]),
        ("Conv2D", False, 2, T4, [FILTER_BYTES, PADDED]),
        ("Conv2D", True, 1, T4, [FILTER_BYTES, 2 * 8 * 8 * 3 * 4, 2 * 8 * 8 * 16 * 4]),
        ("Conv2D", True, 1, A100, [FILTER_BYTES]),  # TF32 is computed with the channels last
        ("Conv2DBackpropInput", False, 1, T4, [FILTER_BYTES, 2 * 8 * 8 * 3 * 4]),
        ("Conv2DBackpropInput", False, 2, T4, [FILTER_BYTES, PADDED, 2 * 8 * 8 * 3 * 4]),
        ("Conv2DBackpropInput", True, 1, T4, [FILTER_BYTES, 2 * 8 * 8 * 3 * 4, 2 * 8 * 8 * 16 * 4]),
        ("Conv2DBackpropFilter", False, 1, T4, [FILTER_BYTES]),
        ("Conv2DBackpropFilter", False, 2, T4, [FILTER_BYTES, PADDED]),
        ("Conv2DBackpropFilter", True, 1, T4, [FILTER_BYTES, 2 * 8 * 8 * 16 * 4, 2 * 8 * 8 * 3 * 4]),
    ],
)
def test_convolution_scratch_has_copies_in_cudnns_layout(kind, is_last, stride, card, expected):
    assert convolved(kind, is_last, stride, card=card) == expected


def test_convolution_as_matrix_product_needs_no_scratch():
    point, filters = tensor(2, 8, 8, 16), tensor(1, 1, 3, 16)
    assert needs("Conv2D", (IMAGE, filters), point, data_format=b"NHWC", padding=b"SAME") == []
    whole = tensor(8, 8, 3, 10)
    assert needs("Conv2D", (IMAGE, whole), tensor(2, 1, 1, 10), data_format=b"NHWC", padding=b"VALID") == []
    # With the channels first it goes to cuDNN all the same.
    operands = needs("Conv2D", (FIRST, filters), tensor(2, 16, 8, 8), data_format=b"NCHW", padding=b"SAME")
    assert operands == [filters.bytes]


def test_the_upper_end_of_the_workspace_is_the_largest_algorithm_s():
    inputs, result = (tensor(1, 2, 6, 6), tensor(3, 3, 2, 4)), tensor(1, 4, 6, 6)
    attributes = {"padding": b"SAME", "data_format": b"NCHW"}
    # FFT of 8×8 planes: two of the input, eight of the filter and four of the result, in two layouts. GEMM's matrix
    # takes 36 × 9 × 2 × 4 = 2592.
    transformed = (2 + 8 + 4) * 8 * 5 * 8 * 2
    tried = needs("Conv2D", inputs, result, workspace=TENSORFLOW_WORKSPACE_LIMIT, **attributes)[1:]
    assert tried == [result.bytes + REDZONES, transformed + REDZONES]
    assert needs("Conv2D", inputs, result, workspace=4000, **attributes)[-1] == 4000 + REDZONES
    assert len(needs("Conv2D", inputs, result, workspace=0, **attributes)) == 1
    # Steps of two: no transform serves, and the matrix of patches is the largest.
    smaller = needs("Conv2D", inputs, tensor(1, 4, 3, 3), workspace=1 << 30, strides=[1, 1, 2, 2], **attributes)
    assert smaller[-1] - REDZONES == (2 * 36 + 9 * 2 * 4 + 4 * 9) * 4 > 9 * 9 * 2 * 4
    # The filter's gradient forms no such matrix.
    operands = (inputs[0], tensor(4, dtype="int32"), result)
    tried = needs("Conv2DBackpropFilter", operands, inputs[1], workspace=1 << 30, **attributes)[-2:]
    assert tried == [inputs[1].bytes + REDZONES, transformed + REDZONES]


def test_planes_too_large_for_a_transform_are_divided_into_tiles():
    inputs, result = (tensor(1, 2, 300, 300), tensor(5, 5, 2, 4)), tensor(1, 4, 300, 300)
    attributes = {"padding": b"SAME", "data_format": b"NCHW"}
    tiles = 11 * 11  # of 32 × 32, which overlap by 4
    transformed = (2 * tiles + 2 * 4 + 4 * tiles) * 32 * 17 * 8 * 2
    matrix = 300 * 300 * 25 * 2 * 4
    tried = needs("Conv2D", inputs, result, workspace=1 << 33, **attributes)
    assert tried[-1] - REDZONES == max(transformed, matrix)


@pytest.mark.parametrize(
    ("kind", "operands", "output", "attributes", "expected"),
    [
        ("Softmax", tensor(4, 10), tensor(4, 10), {}, [160, 160]),
        ("Softmax", tensor(4, 10, dtype="float16"), tensor(4, 10, dtype="float16"), {}, [80, 160]),
        ("FusedBatchNormV3", tensor(2, 4, 4, 8), tensor(2, 4, 4, 8), {"data_format": b"NHWC"}, [1024, 1024]),
        ("FusedBatchNormGradV3", tensor(2, 4, 4, 8), tensor(2, 4, 4, 8), {"data_format": b"NHWC"}, [1024] * 3),
        ("FusedBatchNormV3", tensor(2, 8, 4, 4), tensor(2, 8, 4, 4), {"data_format": b"NCHW"}, []),
        (
            "FusedBatchNormV3", tensor(2, 4, 4, 8), tensor(2, 4, 4, 8),
            {"data_format": b"NHWC", "is_training": False}, [],
        ),
    ],
)  # fmt: skip
def test_other_kernels(kind, operands, output, attributes, expected):
    assert needs(kind, (operands,), output, **attributes) == expected


def test_a_card_s_kernels_are_chosen_by_the_device():
    card = kernels_on(resolve_device("t4"))
    assert (card.capability, card.available_bytes) == ((7, 5), resolve_device("t4").available_bytes)
    assert isinstance(kernels_on(resolve_device("16GB")), CpuKernels) and isinstance(kernels_on(None), CpuKernels)


def node(name, kind, inputs, *outputs):
    return Node(name, kind, inputs, (), outputs, {})


def test_on_card_copies_each_tensor_once():
    program = Program(
        (
            node("batch", "Placeholder", (), tensor(64)),
            node("first", "Relu", ((0, 0),), tensor(64)),
            node("second", "Exp", ((0, 0),), tensor(64)),
            node("third", "Unique", ((2, 0),), tensor(8)),
        ),
        (), (0,), ((1, 0), (3, 0)),
    )  # fmt: skip
    placed = on_card(program, {"batch", "third"})
    copies = [part for part in placed.nodes if part.type == COPY]
    assert [(part.name, part.outputs[0].on_host) for part in copies] == [("batch", False), ("second", True)]
    assert placed.nodes[1].inputs == placed.nodes[2].inputs == ((4, 0),)
    assert sum(part.bytes for node in placed.nodes for part in node.outputs if part.on_host) == 256 + 256 + 32
    heap = Heap()
    memory = Memory(placed, recipes_of(placed, T4), heap)
    memory.run(Executor(placed, T4, [1e-6] * len(placed.nodes)).order())
    # On the card: the batch's copy, which both take, and one new result beside it. What is on the host is not there.
    assert heap.peak.in_use == 512


@pytest.mark.parametrize(("mode", "total"), [(b"lstm", 736_000_000), (b"gru", 864_000_000)])
def test_rnn_reserve_equals_cudnns_report(mode, total):
    """pytorch/pytorch#2895: four layers of 320 units; 25,000 is what samples and steps come to in both figures."""
    made = tensor(500, 50, 320)
    layer = Node(
        "rnn", "CudnnRNNV3", (), (), (made, made, made, Tensor(None, "float32", None), tensor()), {"rnn_mode": mode}
    )
    reserve = rnn_reserve(layer)[3]
    assert 4 * reserve.bytes + 3 * made.bytes == total


def test_the_upper_end_is_no_more_than_the_card_has():
    """Where there is no room to work in, TensorFlow takes an algorithm that needs none."""
    image, filters = tensor(64, 8, 64, 64), tensor(3, 3, 8, 8)
    made = Node("made", "Conv2D", ((0, 0), (1, 0)), (), (image,), {"data_format": b"NCHW", "padding": b"SAME"})
    program = Program(
        (node("image", "Fill", (), image), node("filters", "Const", (), filters), made), (), (), ((2, 0),)
    )

    def upper(available):
        return graph_outcome(program, {}, Attribution({}, (), ()), CardKernels((7, 5), available, BESIDE))

    roomy, tight = upper(1 << 40), upper(96 << 20)
    assert roomy.total == tight.total >= 2 * image.bytes
    matrix = 64 * 64 * 64 * 9 * 8 * 4
    assert roomy.high >= 3 * image.bytes + matrix + 2 * REDZONES > tight.high >= 96 << 20
    assert roomy.most_needed == tight.most_needed < 80 << 20
    assert roomy.optional_workspace == roomy.high - roomy.most_needed > matrix > tight.optional_workspace
    assert [part.bytes for part in roomy.unmodelled if part.what.startswith("workspace")] == [roomy.high - roomy.total]


def test_card_interval_varies_only_by_cudnns_workspace():
    """One thread starts all operations, so threads that race on a CPU change nothing."""
    filled = [node(f"c{number}", "Fill", (), tensor(1 << 18)) for number in range(4)]
    taken = [node(f"e{number}", "Transpose", ((number, 0),), tensor(1 << 18)) for number in range(4)]
    program = Program((*filled, *taken), (), (), tuple((4 + number, 0) for number in range(4)))
    outcome = graph_outcome(program, {}, Attribution({}, (), ()), T4)
    assert outcome.low == outcome.total
    assert "in 1 processes, 1 at once" in outcome.notes[0]
    on_cpu = graph_outcome(program, {}, Attribution({}, (), ()), BESIDE)
    assert on_cpu.low < on_cpu.total
