"""Graph mode on a card that is not here: where operations run, layouts, host memory, and what holds for any model."""

from __future__ import annotations

import keras
import pytest

from kerasmem.compat.tensorflow_runtime import has_gpu_kernel, optimise
from kerasmem.estimation import methods
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.graph.program import COPY, ON_HOST

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers


def on_card(model, batch_size=16, device="t4", **options):
    return estimate(model, method="graph", batch_size=batch_size, device=device, **options)


def convnet():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((32, 32, 3)), layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
         layers.Conv2D(32, 3, activation="relu"), layers.Flatten(), layers.Dense(10, activation="softmax")]
    )  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def dense():
    model = keras.Sequential([keras.Input((64,)), layers.Dense(256, activation="relu"), layers.Dense(8)])
    model.compile("sgd", "mse")
    return model


def recurrent():
    model = keras.Sequential([keras.Input((20, 12)), layers.LSTM(32), layers.Dense(1)])
    model.compile("adam", "mse")
    return model


@pytest.fixture
def program(monkeypatch):
    """The program that an estimate simulates."""
    simulated = []
    whole = methods.build_program

    def record(*arguments):
        answer = whole(*arguments)
        simulated.append(answer[0])
        return answer

    monkeypatch.setattr(methods, "build_program", record)

    def of(model, **options):
        on_card(model, **options)
        return simulated[-1]

    return of


def layouts(program):
    return {
        node.attributes["data_format"].decode() for node in program.nodes if node.type in ("Conv2D", "_FusedConv2D")
    }


def test_channels_come_first_but_for_half_precision(program):
    first = program(convnet())
    assert layouts(first) == {"NCHW"}
    assert any(node.type == "Transpose" and node.outputs[0].shape == (16, 3, 32, 32) for node in first.nodes)
    assert layouts(program(convnet(), dtype_policy="mixed_float16")) == {"NHWC"}


def test_the_batch_comes_from_the_host_and_small_numbers_stay_there(program):
    simulated = program(convnet())
    batch = [simulated.nodes[number] for number in simulated.arguments]
    assert all(ON_HOST in node.attributes and node.outputs[0].on_host for node in batch)
    copied = [node.outputs[0].shape for node in simulated.nodes if node.type == COPY and not node.outputs[0].on_host]
    assert (16, 32, 32, 3) in copied
    convolutions = [node for node in simulated.nodes if "Conv2D" in node.type]
    assert convolutions and not any(ON_HOST in node.attributes for node in convolutions)
    shapes = [node for node in simulated.nodes if node.type == "Const" and node.outputs[0].dtype == "int32"]
    assert shapes and all(node.outputs[0].on_host for node in shapes)


@pytest.mark.parametrize(
    ("operation", "dtypes", "expected"),
    [("Conv2D", {"T": "float32"}, True), ("Conv2D", {"T": "int32"}, True), ("AddV2", {"T": "string"}, False),
     ("DecodePng", {"dtype": "uint8"}, False)],
)  # fmt: skip
def test_a_machine_without_a_gpu_knows_tensorflows_kernels_for_it(operation, dtypes, expected):
    """A canary: kernels for GPUs are in the wheel, with the dtypes that count."""
    import tensorflow as tf

    definition = tf.compat.v1.NodeDef(op=operation)
    for name, dtype in dtypes.items():
        definition.attr[name].type = tf.as_dtype(dtype).as_datatype_enum
    assert has_gpu_kernel(definition) == expected


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        (None, "float32", b"NHWC"), ((7, 5), "float32", b"NCHW"),
        ((7, 5), "float16", b"NHWC"), ((6, 0), "float16", b"NCHW"),
    ],
)  # fmt: skip
def test_grappler_takes_a_card_for_granted_that_is_not_here(capability, dtype, expected):
    """A canary of the virtual cluster: the layout optimizer runs for it, and for it alone."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph, tf.device("/device:GPU:0"):
        image = tf.compat.v1.placeholder(dtype, (2, 8, 8, 3), name="image")
        output = tf.nn.conv2d(image, tf.ones((3, 3, 3, 4), dtype), 1, "SAME", name="made")
        tf.identity(tf.nn.relu(output), name="result")
    simulated = optimise(graph.as_graph_def(), ["result"], capability=capability)
    assert {node.attr["data_format"].s for node in simulated.node if "Conv2D" in node.op} == {expected}


@pytest.fixture(scope="module")
def report():
    return on_card(convnet())


def test_card_report_notes_prediction_and_unmodelled_memory(report):
    assert any("CUDA kernels: predicted, not read off a card yet" in note for note in report.notes)
    assert not report.settings.stands_in, "its kernels are the card's, not a CPU's"
    missing = {entry.what: entry for entry in report.unmodelled}
    assert {"workspace of cuDNN's convolutions", "host memory", "CUDA context and libraries"} <= set(missing)
    assert missing["host memory"].bytes >= 16 * (32 * 32 * 3 + 1) * 4
    assert report.bytes.high >= report.bytes.total + missing["workspace of cuDNN's convolutions"].bytes
    assert report.bytes.total <= report.bytes.most_needed == report.bytes.high - report.bytes.optional_workspace
    assert "; cuDNN may use up to" in report.answer
    sizes = [getattr(report.bytes, name) for name in report.bytes.CATEGORIES]
    assert sum(sizes) == report.bytes.total and report.bytes.low <= report.bytes.total <= report.bytes.high
    assert report.device.name and report.pool.in_use <= report.pool.reserved


def test_dense_layers_need_the_same_on_card_and_cpu():
    """The same buffers but for the batch, which lies on the host until it is copied, and small constants."""
    card, cpu = on_card(dense(), 512), estimate(dense(), method="graph", batch_size=512)
    assert (card.bytes.weights, card.bytes.optimizer) == pytest.approx((cpu.bytes.weights, cpu.bytes.optimizer), abs=64)
    # The order on the card is another one: a result or two of eight numbers for each row are there at the peak, or not.
    assert abs(card.pool.requested - cpu.pool.requested) <= 2 * 512 * 8 * 4 + 256
    assert cpu.bytes.inputs == 512 * (64 + 8) * 4
    assert card.bytes.inputs in (cpu.bytes.inputs, 512 * 64 * 4)  # the targets may be copied after the peak
    assert not any(entry.what.startswith("scratch of") for entry in card.unmodelled)
    assert not any("cuDNN's" in entry.what for entry in card.unmodelled)


def test_a_recurrent_layer_goes_to_cudnn(program):
    simulated = program(recurrent())
    (forward,) = [node for node in simulated.nodes if node.type == "CudnnRNNV3"]
    assert forward.outputs[3].bytes == 5 * 20 * 16 * 32 * 4
    assert any(node.type == "CudnnRNNBackpropV3" for node in simulated.nodes)
