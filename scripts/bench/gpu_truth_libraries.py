"""What CUDA's libraries take beside a step's tensors: handles, workspaces, and the tries of autotuning."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from environment import ROOT
from gpu_truth_machine import driver_bytes, gpu_bytes

sys.path.insert(0, str(ROOT))
POOL = 2 << 30  # bytes that the allocator takes at once, so that what the driver counts beyond them is no tensor
# Name, batch, height, channels, filters, kernel, stride: what ResNet, VGG, U-Net and MobileNet do most.
CONVOLUTIONS = (
    ("stem", 64, 224, 3, 64, 7, 2),
    ("wide", 32, 112, 64, 128, 3, 1),
    ("middle", 64, 28, 128, 128, 3, 1),
    ("pointwise", 64, 56, 64, 256, 1, 1),
    ("deep", 64, 7, 512, 512, 3, 1),
    ("strided", 64, 56, 128, 128, 3, 2),
)
DTYPES = ("float32", "bfloat16")
Stage = tuple[str, Callable[[], Any]]


def handles(task: dict[str, Any]) -> dict[str, Any]:
    """Return what the driver counts after each stage: context, first operation, cuBLAS, cuDNN, XLA.

    The allocator takes POOL bytes at its start and no more, so the rest is what the process takes from the driver
    beside it: the context with the code that was loaded, handles, and workspaces that libraries allocate themselves.
    """
    began, total, memory = driver_bytes(), None, gpu_bytes()
    if memory is not None:  # read by JAX when it starts
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{POOL / memory['total']:.6f}"
    stages = _jax_stages() if os.environ["KERAS_BACKEND"] == "jax" else _tensorflow_stages()
    readings = []
    for name, work in stages:
        start = time.perf_counter()
        work()
        total = driver_bytes()
        taken = None if total is None or began is None else total - began
        readings.append({"stage": name, "driver": taken, "seconds": round(time.perf_counter() - start, 3)})
    missing = [] if total is not None else ["what the driver counts"]
    return {"pool": POOL, "before": began, "stages": readings, "needs_card": missing}


def _tensorflow_stages() -> list[Stage]:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        limited = tf.config.LogicalDeviceConfiguration(memory_limit=POOL >> 20)
        tf.config.set_logical_device_configuration(gpus[0], [limited])

    def image() -> Any:
        return tf.ones((8, 32, 32, 16))

    def multiply() -> Any:
        return tf.linalg.matmul(tf.ones((512, 512)), tf.ones((512, 512)))

    def normalize() -> Any:
        ones, none = tf.ones((16,)), tf.zeros((0,))
        return tf.raw_ops.FusedBatchNormV3(x=image(), scale=ones, offset=ones, mean=none, variance=none)

    compiled = tf.function(multiply, jit_compile=True)
    return [
        ("first operation", lambda: tf.zeros((1,)).numpy()),
        ("elementwise", lambda: tf.nn.relu(tf.ones((1024,))).numpy()),
        ("matrix product (cuBLAS)", lambda: multiply().numpy()),
        ("convolution (cuDNN)", lambda: tf.nn.conv2d(image(), tf.ones((3, 3, 16, 16)), 1, "SAME").numpy()),
        ("batch normalization (cuDNN)", lambda: normalize().y.numpy()),
        ("random numbers", lambda: tf.random.stateless_normal((1024,), (1, 2)).numpy()),
        ("Cholesky decomposition (cuSOLVER)", lambda: tf.linalg.cholesky(tf.eye(64)).numpy()),
        ("compiled by XLA", lambda: compiled().numpy()),
    ]


def _jax_stages() -> list[Stage]:
    import jax
    import jax.numpy as jnp

    square = jnp.ones

    def convolve() -> Any:
        return jax.lax.conv(jnp.ones((8, 16, 32, 32)), jnp.ones((16, 16, 3, 3)), (1, 1), "SAME")

    stages: list[Stage] = [
        ("first operation", lambda: jnp.zeros((1,))),
        ("elementwise", lambda: jax.nn.relu(jnp.ones((1024,)))),
        ("matrix product (cuBLAS)", lambda: square((512, 512)) @ square((512, 512))),
        ("convolution (cuDNN)", convolve),
        ("random numbers", lambda: jax.random.normal(jax.random.key(0), (1024,))),
        ("Cholesky decomposition (cuSOLVER)", lambda: jnp.linalg.cholesky(jnp.eye(64))),
    ]
    return [(name, lambda work=work: jax.block_until_ready(work())) for name, work in stages]


def workspace(task: dict[str, Any]) -> dict[str, Any]:
    """Return what the allocator is asked for by convolutions forward and back: at first, and in a later step.

    cuDNN's algorithm is chosen when a shape first runs. With autotuning several are tried, each with a workspace of
    its own; the one that is kept asks for its workspace in every later step.
    """
    os.environ["TF_CUDNN_USE_AUTOTUNE"] = "1" if task["autotuned"] else "0"
    if not task["autotuned"]:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    device = "GPU:0" if gpus else "CPU:0"
    rows = []
    for shape in CONVOLUTIONS[:1] if task["rehearsed"] else CONVOLUTIONS:
        for dtype in DTYPES[:1] if task["rehearsed"] else DTYPES:
            try:
                rows.append(_convolution(shape, dtype, device, task["compiled"], 4 if task["rehearsed"] else 1))
            except tf.errors.OpError as error:  # older cards have no convolutions in bfloat16
                rows.append({"name": shape[0], "dtype": dtype, "failed": f"{error.message}"[:300]})
    return {"device": device, "rows": rows, "needs_card": [] if gpus else ["cuDNN: these rows are the CPU's kernels"]}


def _convolution(shape: Any, dtype: str, device: str, compiled: bool, smaller: int) -> dict[str, Any]:
    import tensorflow as tf

    name, batch, height, channels, filters, kernel, stride = shape
    x = tf.ones((batch // smaller, height, height, channels), dtype)
    weights = tf.ones((kernel, kernel, channels, filters), dtype)

    @tf.function(jit_compile=compiled)
    def both_ways() -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, weights))
            y = tf.nn.conv2d(x, weights, stride, "SAME")
        return y, *tape.gradient(y, (x, weights))  # without y nothing would compute it

    before = tf.config.experimental.get_memory_info(device)["current"]
    calls = [_recorded(both_ways, device) for _ in range(2)]
    plain = {"shape": [*x.shape], "kernel": [*weights.shape], "stride": stride, "dtype": dtype, "before": before}
    sizes = {"input": x.shape.num_elements() * x.dtype.size, "weights": weights.shape.num_elements() * x.dtype.size}
    return {"name": name, **plain, **sizes, "first": calls[0], "later": calls[1]}


def _recorded(function: Callable[[], Any], device: str) -> dict[str, Any]:
    """Call a function and return the allocator's peak and the largest requests, with the operations that made them."""
    import tensorflow as tf

    from kerasmem.devices.recording import ALLOCATE, of_device, read_allocator_events

    tf.config.experimental.reset_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=3, python_tracer_level=0, device_tracer_level=0
        )
        tf.profiler.experimental.start(folder, options)
        tf.nest.map_structure(lambda each: each.numpy()[:0], function())
        tf.profiler.experimental.stop()
        events = [each for each in of_device(read_allocator_events(folder), device) if each.kind == ALLOCATE]
    largest = sorted((each for each in events if each.requested >= 4096), key=lambda each: -each.requested)[:10]
    return {
        "peak": tf.config.experimental.get_memory_info(device)["peak"],
        "requests": len(events),
        "largest": [
            {"op": each.op, "region": each.region, "requested": each.requested, "allocated": each.allocated}
            for each in largest
        ],
    }


def autotuning(task: dict[str, Any]) -> dict[str, Any]:
    """Return what compiling a step in JAX takes at most, beside what the step takes, with autotuning or without."""
    if not task["autotuned"]:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    import jax
    from gpu_truth_models import plain_model

    rows = []
    device = jax.devices()[0]
    for name in ("tiny",) if task["rehearsed"] else ("plain_mlp", "plain_convolution", "plain_attention"):
        weights, x, loss = plain_model(name, 8 if task["rehearsed"] else 32, "float32")
        held = (device.memory_stats() or {}).get("bytes_in_use")
        start = time.perf_counter()
        compiled = jax.jit(jax.value_and_grad(loss)).lower(weights, x).compile()
        seconds = round(time.perf_counter() - start, 3)
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        jax.block_until_ready(compiled(weights, x))
        after = (device.memory_stats() or {}).get("peak_bytes_in_use")
        plan = compiled.memory_analysis()
        rows.append(
            {
                "model": name,
                "compile_seconds": seconds,
                "held": held,
                "peak_after_compiling": peak,
                "peak": after,
                "plan": {"argument": plan.argument_size_in_bytes, "temp": plan.temp_size_in_bytes},
            }
        )
    known = rows[0]["peak"] is not None
    return {"device": device.device_kind, "rows": rows, "needs_card": [] if known else ["the allocator's peak"]}
