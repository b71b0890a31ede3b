"""The graph method against real training, and over settings that change memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import keras
import measuring
import numpy as np
import onednn
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from kerasmem import measure
from kerasmem.compat.tensorflow_runtime import optimise
from kerasmem.devices.kernels import cpu_kernels
from kerasmem.errors import KerasmemError
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.graph import rewriting
from kerasmem.estimation.report import MemoryReport

pytestmark = pytest.mark.usefixtures("loaded_python")

layers = keras.layers
DECODER = Path(__file__).parents[1] / "support" / "big_decoder.py"


def graph(source, batch_size=16, **options):
    return estimate(source, method="graph", batch_size=batch_size, **options)


def check(report):
    """What holds for every report of the graph method."""
    sizes = {name: getattr(report.bytes, name) for name in report.bytes.CATEGORIES}
    assert sum(sizes.values()) == report.bytes.total, sizes
    assert all(size >= 0 for name, size in sizes.items() if name != "allocator"), sizes
    assert all(0 <= row.bytes_at_peak <= report.bytes.total for row in report.layers)
    assert sum(row.bytes_at_peak for row in report.layers) <= report.bytes.total
    assert report.bytes.low <= report.bytes.total <= report.bytes.high
    assert report.pool.in_use == report.bytes.total <= report.pool.reserved
    assert (report.settings.method, report.settings.execution) == ("graph", "graph")
    assert MemoryReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    return report


@pytest.mark.parametrize(("build", "batch_size"), [(measuring.transformer, 32), (measuring.recurrent, 128)])
@pytest.mark.usefixtures("x86_kernels")
def test_total_is_near_the_measured_peak(program, build, batch_size):
    measured = measuring.measure(program, build.__name__, batch_size)
    report = check(graph(build, batch_size))
    assert 0.8 < report.bytes.total / measured["peak"] < 1.2, (report.bytes, measured)
    inside = [report.bytes.low * 0.8 <= peak <= report.bytes.high * 1.2 for peak in measured["peaks"]]
    # On Eigen's kernels a step in which two gradients' scratch does not overlap may take less than the interval says.
    assert all(inside) or cpu_kernels().kind == "eigen", (report.bytes, measured)
    assert report.bytes.weights + report.bytes.optimizer <= measured["before"]
    assert report.instant.phase in ("forward", "backward", "optimizer") and report.instant.operation


@pytest.mark.usefixtures("x86_kernels")
@pytest.mark.parametrize("onednn_flag", ["0", pytest.param("1", marks=onednn.needed)], ids=["eigen", "onednn"])
@pytest.mark.parametrize(
    ("build", "batch_size"),
    [
        (measuring.convnet, 64),
        pytest.param(measuring.frames, 32, marks=pytest.mark.slow),
        pytest.param(measuring.nested, 64, marks=pytest.mark.slow),
    ],
)
def test_either_kind_of_kernels(program, build, batch_size, onednn_flag):
    measured = measuring.measure(program, build.__name__, batch_size, "estimate", TF_ENABLE_ONEDNN_OPTS=onednn_flag)
    estimated = measured["estimate"]
    assert any(("oneDNN" if onednn_flag == "1" else "Eigen") in note for note in estimated["notes"]), estimated["notes"]
    assert 0.8 < estimated["bytes"]["total"] / measured["peak"] < 1.2, (estimated["bytes"], measured)
    assert measured["kernels"] == ("onednn" if onednn_flag == "1" else "eigen")


def test_fit_knows_the_batch_size_only_if_no_batch_is_smaller(program, x86_kernels):
    """Else shapes are not constants in the step, and an LSTM holds more: 6.6 MB in place of 5.5."""

    def rows(number):
        tensors = measuring.batch_of(measuring.recurrent(), number)
        return tuple(np.zeros(tensor.shape, tensor.dtype.name) for tensor in tensors)

    with_data = {number: {"data": rows(number), "batch_size": 128} for number in (256, 300)}
    dataset = {"data": tf.data.Dataset.from_tensors(rows(128))}
    fixed, same, of_fit, smaller = (
        estimate(measuring.recurrent, method="graph", **settings).bytes.total
        for settings in (dataset, with_data[256], {"batch_size": 128}, with_data[300])
    )
    assert (fixed, of_fit) == (same, smaller) and of_fit > 1.05 * fixed
    peaks = [measuring.measure(program, "recurrent", 128, more)["peak"] for more in ("", "fixed")]
    assert [of_fit, fixed] == [pytest.approx(peak, rel=0.1) for peak in peaks]


@pytest.mark.parametrize("name", ["accumulated", "averaged"])
def test_interval_covers_steps_with_either_branch(program, x86_kernels, name):
    measured = measuring.measure(program, name, 64, "estimate")
    need = measured["estimate"]["bytes"]
    assert need["low"] <= min(measured["peaks"])
    assert max(measured["peaks"]) <= need["high"]
    if name == "averaged":
        assert need["total"] == pytest.approx(measured["peak"], rel=0.12)


def test_gradients_are_in_the_order_of_the_graph_that_tensorflow_runs(monkeypatch):
    model = measuring.convnet()
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    context.enable_run_metadata()
    step(*measuring.batch_of(model, 4))
    graphs = context.export_run_metadata().function_graphs
    context.disable_run_metadata()
    run = max((graph.post_optimization_graph for graph in graphs), key=lambda graph: len(graph.node))
    rewritten = []
    monkeypatch.setattr(rewriting, "optimise", lambda *args: rewritten.append(optimise(*args)) or rewritten[-1])
    graph(measuring.convnet, 4)
    orders = [
        [node.op for node in definition.node if "Grad" in node.op or "Backprop" in node.op]
        for definition in (run, rewritten[-1])
    ]
    assert len(orders[0]) > 8 and orders[0] == orders[1]


@pytest.mark.usefixtures("x86_kernels")
def test_total_of_one_thread_equals_the_measured_peak(program):
    alone = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_NUM_INTEROP_THREADS": "1"}
    measured = measuring.measure(program, "thumbnails", 64, "estimate", **alone)
    assert measured["estimate"]["bytes"]["total"] == pytest.approx(measured["peak"], rel=0.02)


def dense(optimizer="adam"):
    model = keras.Sequential([keras.Input((64,)), layers.Dense(256, activation="relu"), layers.Dense(8)])
    model.compile(optimizer, "mse")
    return model


PARAMETERS = 64 * 256 + 256 + 256 * 8 + 8


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [("sgd", 0), (keras.optimizers.SGD(gradient_accumulation_steps=4), 1),
     (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(global_clipnorm=1.0)), 2)],
    ids=["sgd", "accumulation", "scaled and clipped"],
)  # fmt: skip
def test_weights_and_slots_of_optimizers(optimizer, slots):
    report = check(graph(dense(optimizer)))
    assert PARAMETERS * 4 <= report.bytes.weights < PARAMETERS * 4 + 100  # and the loss's two numbers
    assert 4 * slots * PARAMETERS <= report.bytes.optimizer < 4 * slots * PARAMETERS + 100


def image_net():
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)), layers.Conv2D(32, 3, activation="relu"), layers.BatchNormalization(),
            layers.Conv2D(32, 3, activation="relu"), layers.GlobalAveragePooling2D(),
            layers.Dense(4, activation="softmax"),
        ]
    )  # fmt: skip
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def test_mixed_precision_takes_less():
    full = check(graph(measuring.convnet, 32))
    for policy in ("mixed_float16", "mixed_bfloat16"):
        half = check(graph(measuring.convnet, 32, dtype_policy=policy))
        assert half.settings.dtype_policy == policy
        assert half.bytes.activations < 0.95 * full.bytes.activations
        # Where oneDNN leaves float16 to TensorFlow's own kernels, these need scratch: a real step took 40.3 MB, three
        # times that of float32. Where those run for all dtypes, all need it: real steps took 41.2 MB in float32,
        # 40.2 in float16 and 38.9 in bfloat16.
        is_onednns = policy.removeprefix("mixed_") in cpu_kernels().dtypes
        assert (half.bytes.total < 0.9 * full.bytes.total) == is_onednns
        assert half.bytes.weights == full.bytes.weights
    live = check(graph(measuring.convnet(), 32, dtype_policy="mixed_bfloat16"))
    assert live.bytes.weights == full.bytes.weights
    normalised = check(graph(image_net, dtype_policy="mixed_bfloat16"))  # which the CPU computes in float32
    assert normalised.bytes.weights == graph(image_net).bytes.weights


def test_memory_grows_with_the_batch():
    small, large = graph(image_net, 16), graph(image_net, 64)
    # The scratch of Eigen's kernels hardly depends on the batch.
    own = [report.bytes.total - report.bytes.workspace - report.bytes.allocator for report in (small, large)]
    assert 2.5 < own[1] / own[0] < 4.5
    if cpu_kernels().kind == "onednn":
        assert 2.5 < large.bytes.total / small.bytes.total < 4.5
    assert large.bytes.inputs == 4 * small.bytes.inputs == 64 * (32 * 32 * 3 * 4 + 4)
    # The last batch of an epoch is another one: its own estimate is that of its size.
    assert graph(image_net, 7).bytes.total < small.bytes.total


def test_inference_needs_less_and_has_no_optimizer():
    train, inference = check(graph(image_net, 32)), check(graph(image_net, 32, mode="inference"))
    assert inference.bytes.total < 0.7 * train.bytes.total
    assert inference.bytes.optimizer == inference.bytes.gradients == 0


# Models that are odd: an answer or an error that says why, never anything else.


def stateful():
    return keras.Sequential([keras.Input(batch_shape=(4, 6, 3)), layers.LSTM(5, stateful=True), layers.Dense(1)])


def masked():
    ids = keras.Input((6,), dtype="int32")
    return keras.Model(
        ids, layers.Dense(1)(layers.Bidirectional(layers.GRU(4))(layers.Embedding(9, 3, mask_zero=True)(ids)))
    )


def quantised():
    model = keras.Sequential([keras.Input((32,)), layers.Dense(16), layers.Dense(4)])
    model.quantize("int8")
    return model


def frozen():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
    model.trainable = False
    model.compile("adam", "mse")
    return model


def without_weights():
    return keras.Sequential([keras.Input((8,)), layers.Flatten()])


def mixed():
    pixels = keras.Input((10, 10, 3), dtype="uint8")
    x = layers.Conv2D(4, 3, dtype="mixed_bfloat16")(layers.Rescaling(1 / 255, dtype="float32")(pixels))
    return keras.Model(pixels, layers.Dense(5, dtype="float64")(layers.Flatten(dtype="mixed_float16")(x)))


def wrapped():
    return keras.Sequential(
        [keras.Input((6, 3)), layers.TimeDistributed(layers.Dense(4)), layers.Lambda(lambda x: x * 2)]
    )


def looked_up():
    words = layers.StringLookup(vocabulary=["a", "b"])
    return keras.Sequential(
        [keras.Input((4,), dtype="string"), words, layers.Embedding(5, 8), layers.Flatten(), layers.Dense(10)]
    )


@pytest.mark.parametrize(
    "build",
    [stateful, masked, quantised, frozen, without_weights, mixed, wrapped, looked_up],
    ids=lambda f: f.__name__,
)
def test_unusual_models_are_estimated(build):
    report = check(graph(build, 4 if build is stateful else 8))
    # TensorFlow cannot infer the shapes of looked up words.
    assert ("drop_remainder=True" in str(report)) == (build is looked_up)


def convolutional_recurrence():
    return keras.Sequential([keras.Input((6, 16, 16, 3)), layers.ConvLSTM2D(8, 3), layers.Flatten(), layers.Dense(10)])


def embedded():
    return keras.Sequential(
        [keras.Input((16,), dtype="int32"), layers.Embedding(5000, 64), layers.GlobalAveragePooling1D(),
         layers.Dense(10)]
    )  # fmt: skip


class MeanApart(layers.Layer):
    """A mean over axes that do not lie together, so of a transposed copy."""

    def call(self, x):
        return keras.ops.mean(x, axis=(1, 3))


def reduced():
    return keras.Sequential([keras.Input((32, 16, 32, 8)), MeanApart(), layers.Flatten(), layers.Dense(10)])


def transposed():
    """An Einsum whose second operand, and its gradient, have the axes in another order than the product."""
    return keras.Sequential(
        [keras.Input((64, 64)), layers.EinsumDense("abc,dcb->ad", output_shape=256), layers.Dense(10)]
    )


@pytest.mark.usefixtures("x86_kernels")
@pytest.mark.parametrize(
    ("build", "optimizer", "batch_size"),
    [
        (convolutional_recurrence, "adam", 256),
        (embedded, "adafactor", 2048),
        (embedded, keras.optimizers.Adam(gradient_accumulation_steps=4), 2048),
        (reduced, "sgd", 16),
        (transposed, "sgd", 16),
    ],
    ids=["loop", "branch", "sizes in constants", "axes in constants", "order of axes"],
)
def test_sizes_are_inferred_from_constants(build, optimizer, batch_size):
    model = build()
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    report = check(graph(model, batch_size))
    measured = measure(model, batch_size=batch_size, jit_compile=False)
    assert report.bytes.total == pytest.approx(measured.bytes.total, rel=0.15)


class Chosen(layers.Layer):
    def call(self, x):
        import tensorflow as tf

        return x * tf.reduce_sum(tf.boolean_mask(x, x > 0))


class Endless(layers.Layer):
    def call(self, x):
        import tensorflow as tf

        return tf.while_loop(lambda value: tf.reduce_sum(value) < 100.0, lambda value: value * 2.0, [x])[0]


class NoGradient(layers.Layer):
    def call(self, x):
        import tensorflow as tf

        y = tf.numpy_function(lambda value: value, [x], tf.float32)
        y.set_shape(x.shape)
        return y


@pytest.mark.parametrize("layer", [Chosen, Endless, NoGradient])
def test_unsupported_step_has_a_reason_and_auto_falls_back(layer, monkeypatch):
    from kerasmem.estimation import methods

    monkeypatch.setattr(methods, "PROBED_SHARE", 0)  # no step is run

    def build():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layer()(layers.Dense(4)(inputs)))
        model.compile("sgd", "mse")
        return model

    with pytest.raises(KerasmemError, match=r"depends on the data|No gradients"):
        graph(build)
    report = estimate(build)
    assert (report.settings.method, report.settings.execution) == ("formula", "none")
    assert report.bytes.total == report.formula.total_bytes
    assert any("graph has no answer" in note for note in report.notes)
    assert report.fallback.startswith("graph has no answer")


@pytest.mark.parametrize(("megabytes", "is_in_place"), [(30, False), (120, True)])
def test_grappler_adds_in_place_if_a_step_would_fill_the_device(megabytes, is_in_place):
    """A canary of its memory optimizer: TensorFlow says that a CPU has 256 MiB, and it begins at 80 % of them."""
    with tf.Graph().as_default() as graph:
        tensors = [tf.random.uniform((megabytes << 18,)) for _ in range(3)]  # on paper
        tf.identity(tf.add_n([tf.exp(tensor) for tensor in tensors]), name="result")
    counts = Counter(node.op for node in optimise(graph.as_graph_def(), ["result"]).node)
    expected = (0, 1, 3) if is_in_place else (1, 0, 0)
    assert (counts["AddN"], counts["TemporaryVariable"], counts["AssignAdd"]) == expected


def test_a_giant_batch_allocates_nothing():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = check(graph(image_net, 100_000))
    assert report.bytes.total > 20 * 2**30
    assert report.bytes.inputs == 100_000 * (32 * 32 * 3 * 4 + 4)  # 1.2 GB
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 400 * 2**20
    with pytest.raises(KerasmemError):
        graph(image_net, 10**12)


def test_estimate_keeps_the_random_state():
    def draw(between):
        keras.utils.set_random_seed(1)
        between()
        layer = layers.Dense(3)
        layer.build((None, 3))
        return layer.kernel.numpy()

    assert np.array_equal(draw(lambda: None), draw(lambda: graph(dense)))


@pytest.mark.slow
def test_seven_billion_parameters_stay_under_four_gib_of_host_memory(program):
    import resource

    done = program(
        "-m", "kerasmem", "estimate", f"{DECODER}:decoder", "--batch-size", 4, "--method", "graph",
        "--optimizer", "adam", "--loss", "sparse_categorical_crossentropy", "--json",
        env={"CUDA_VISIBLE_DEVICES": "-1"},
    )  # fmt: skip
    assert done.code == 0, done.err[-2000:]
    report = json.loads(done.out)
    parameters = report["model"]["parameters"]
    assert parameters > 6.5e9 and report["settings"]["method"] == "graph"
    # weights and Adam's two moments are there from beginning to end, and in the end every gradient too
    assert report["bytes"]["total"] > 4 * 4 * parameters
    # the largest of this process's children so far, of which no other is as large
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4 * 2**30
