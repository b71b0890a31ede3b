"""Run operations one by one and print what each asked of the allocator: single_ops.py SEED THREADS [DTYPES].

The environment must have TF_CPU_ALLOCATOR_USE_BFC=true; TF_ENABLE_ONEDNN_OPTS chooses the kernels. Dtypes are separated
by commas and default to all that the rules know. Shapes, strides and
dtypes are drawn from the seed. Prints {"kernels": …, "operations": [{"type", "inputs", "output", "requests", …}]}.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import asdict

import tensorflow as tf

from kerasmem.devices.kernels import cpu_kernels
from kerasmem.devices.recording import ALLOCATE, of_device, read_recording, start_recording
from kerasmem.estimation.graph.build import node_of

TIMES = 5  # of each kind of operation
raw = tf.raw_ops


def convolution(draw, dtype):
    """Yield a convolution of two dimensions and its gradients."""
    batch, size, kernel = draw.choice((1, 2, 5, 16)), draw.randint(6, 40), draw.choice((1, 2, 3, 5))
    channels, filters, stride = draw.choice((1, 3, 8, 17, 64)), draw.choice((4, 16, 33, 128)), draw.choice((1, 1, 2))
    padding = draw.choice(("SAME", "VALID"))
    x = tf.zeros((batch, size, size + 3, channels), dtype)
    w = tf.zeros((kernel, kernel, channels, filters), dtype)
    more = {"strides": [1, stride, stride, 1], "padding": padding}
    y = raw.Conv2D(input=x, filter=w, **more)
    yield raw.Conv2D, {"input": x, "filter": w}, more
    yield raw.Conv2DBackpropInput, {"input_sizes": x.shape, "filter": w, "out_backprop": y}, more
    yield raw.Conv2DBackpropFilter, {"input": x, "filter_sizes": w.shape, "out_backprop": y}, more


def depthwise(draw, dtype):
    """Yield a depthwise convolution and its gradients."""
    batch, size, channels = draw.choice((1, 4, 9)), draw.randint(8, 30), draw.choice((16, 32, 64))
    x = tf.zeros((batch, size, size, channels), dtype)
    w = tf.zeros((3, 3, channels, draw.choice((1, 2))), dtype)
    more = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    y = raw.DepthwiseConv2dNative(input=x, filter=w, **more)
    yield raw.DepthwiseConv2dNative, {"input": x, "filter": w}, more
    yield raw.DepthwiseConv2dNativeBackpropInput, {"input_sizes": x.shape, "filter": w, "out_backprop": y}, more
    yield raw.DepthwiseConv2dNativeBackpropFilter, {"input": x, "filter_sizes": w.shape, "out_backprop": y}, more


def volumes(draw, dtype):
    """Yield a convolution of three dimensions and its gradients."""
    if dtype == "float16":
        return  # oneDNN or not, a CPU has no such kernel for the forward pass
    batch, size, channels = draw.choice((1, 4, 30)), draw.randint(4, 9), draw.choice((2, 16))
    x = tf.zeros((batch, size, 6, 7, channels), dtype)
    w = tf.zeros((draw.choice((1, 3)), 3, 3, channels, draw.choice((4, 24, 200))), dtype)
    more = {"strides": [1] * 5, "padding": draw.choice(("SAME", "VALID"))}
    y = raw.Conv3D(input=x, filter=w, **more)
    yield raw.Conv3D, {"input": x, "filter": w}, more
    if dtype == "float32":
        yield raw.Conv3DBackpropInputV2, {"input_sizes": x.shape, "filter": w, "out_backprop": y}, more
        yield raw.Conv3DBackpropFilterV2, {"input": x, "filter_sizes": w.shape, "out_backprop": y}, more


def pooling(draw, dtype):
    """Yield a pooling and its gradient."""
    x = tf.zeros((draw.choice((1, 3, 8)), draw.randint(6, 40), draw.randint(6, 40), draw.choice((3, 16, 50))), dtype)
    more = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": draw.choice(("SAME", "VALID"))}
    y = raw.MaxPool(input=x, **more)
    yield raw.MaxPool, {"input": x}, more
    yield raw.MaxPoolGrad, {"orig_input": x, "orig_output": y, "grad": y}, more


def normalisation(draw, dtype):
    """Yield a batch normalisation and its gradient."""
    x = tf.zeros((draw.choice((2, 9)), draw.randint(20, 40), 33, draw.choice((8, 50))), dtype)
    each = tf.ones(x.shape[-1])
    none = tf.zeros(0)
    made = raw.FusedBatchNormV3(x=x, scale=each, offset=each, mean=none, variance=none)
    yield raw.FusedBatchNormV3, {"x": x, "scale": each, "offset": each, "mean": none, "variance": none}, {}
    reserved = {f"reserve_space_{number}": made[2 + number] for number in (1, 2, 3)}
    yield raw.FusedBatchNormGradV3, {"y_backprop": x, "x": x, "scale": each, **reserved}, {}


def product(draw, dtype):
    """Yield a matrix product."""
    rows, inner, columns = (draw.randint(8, 300) for _ in range(3))
    a, b = tf.zeros((rows, inner), dtype), tf.zeros((columns, inner), dtype)
    yield raw.MatMul, {"a": a, "b": b}, {"transpose_b": True}
    several = tf.zeros((3, rows, inner), dtype)
    yield raw.BatchMatMulV2, {"x": several, "y": b}, {"adj_y": True}
    small = tf.zeros((400, inner), "int8"), tf.zeros((inner, 300), "int8")
    yield raw.BatchMatMulV3, {"x": small[0], "y": small[1]}, {"Tout": "int32"}


def reduction(draw, dtype):
    """Yield reductions over axes that do and do not lie together."""
    x = tf.zeros([9, *(draw.choice((1, 7, 9, 12)) for _ in range(5))], dtype)
    several = [axis for axis, size in enumerate(x.shape) if size > 1]  # over one alone nothing is computed
    for operation in (raw.Sum, raw.Mean, raw.Max, raw.Prod):
        axes = draw.sample(several, draw.randint(1, len(several)))
        yield operation, {"input": x, "axis": [axis - draw.choice((0, 6)) for axis in axes]}, {}


def mirrored(draw, dtype):
    """Yield a border that mirrors what it surrounds, and its gradient."""
    x = tf.zeros((draw.choice((1, 4)), draw.randint(20, 50), 40, draw.choice((8, 33))), dtype)
    paddings = [[0, 0], [draw.randint(0, 3), 2], [1, draw.randint(0, 3)], [0, 0]]
    more = {"mode": draw.choice(("REFLECT", "SYMMETRIC"))}
    yield raw.MirrorPad, {"input": x, "paddings": paddings}, more
    yield raw.MirrorPadGrad, {"input": x, "paddings": paddings}, more


def einsum(equation, name, **operands):
    return raw.Einsum(inputs=[*operands.values()], equation=equation, name=name)


def contraction(draw, dtype):
    """Yield an Einsum with axes in any order."""
    kinds = [draw.sample("abcdefghij"[2 * kind : 2 * kind + 2], draw.randint(0, 2)) for kind in range(5)]
    batch, left, right, summed, alone = kinds
    operands = [[*batch, *left, *summed, *alone], [*batch, *right, *summed], [*batch, *left, *right]]
    for each in operands:
        draw.shuffle(each)
    sizes = {label: draw.choice((1, 8, 11)) for label in "abcdefghij"}
    terms = list(map("".join, operands))
    x, y = (tf.zeros([sizes[label] for label in each], dtype) for each in operands[:2])
    yield einsum, {"first": x, "second": y}, {"equation": f"{terms[0]},{terms[1]}->{terms[2]}"}
    if made := [label for label in operands[2] if label in operands[0]]:
        yield einsum, {"first": x}, {"equation": f"{terms[0]}->{''.join(made)}"}


KINDS = (
    convolution, volumes, depthwise, pooling, normalisation, product, reduction, mirrored, contraction,
)  # fmt: skip


def cases(seed, dtypes):
    """Yield (function that runs an operation, its tensors, its attributes)."""
    draw = random.Random(seed)
    for times in range(TIMES):
        for made in KINDS:
            yield from made(draw, dtypes[times % len(dtypes)])


def main():
    seed, threads, *dtypes = sys.argv[1:]
    tf.config.threading.set_intra_op_parallelism_threads(int(threads))
    dtypes = dtypes[0].split(",") if dtypes else ("float32", "float32", "bfloat16", "float16")
    found, runs = [], []
    for number, (operation, tensors, more) in enumerate(cases(int(seed), dtypes)):
        name = f"single_{number}"
        constants = {key: list(value) for key, value in tensors.items() if not tf.is_tensor(value)}
        traced = tf.function(
            lambda given, run=operation, fixed=constants, more=more, name=name: run(
                **given, **fixed, **more, name=name
            ),
            autograph=False,
        )
        given = {key: value for key, value in tensors.items() if key not in constants}
        result = traced(given)
        made = traced.get_concrete_function(given).graph.get_operation_by_name(name)
        runs.append((traced, given))
        found.append(
            {
                "name": name, "type": made.type, "dtype": made.outputs[0].dtype.name,
                "axes": node_of(made).attributes.get("axes"), "equation": more.get("equation"),
                "inputs": [(list(each.shape), each.dtype.name) for each in map(tf.convert_to_tensor, tensors.values())],
                "output": list(result[0].shape if isinstance(result, tuple) else result.shape),
            }
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        start_recording(folder)
        for traced, given in runs:
            traced(given)
        tf.profiler.experimental.stop()
        events = of_device(read_recording(folder, "none")[0], "CPU:0")
    requests, running = {each["name"]: [] for each in found}, ""
    for event in events:
        if event.kind == ALLOCATE:
            running = event.op.partition(":")[0] or running  # a kernel's own tensors come without its name
            requests.get(running, []).append(event.requested)
    for each in found:
        each["requests"] = sorted(requests[each["name"]])
    print(json.dumps({"kernels": asdict(cpu_kernels()), "operations": found}))


if __name__ == "__main__":
    main()
