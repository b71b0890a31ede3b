"""What the estimates' bench does in a process of its own: one part of one row, the answer as a line of JSON.

python scripts/bench/estimates_child.py PART '{"model": …, "batch_size": …, …}'
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARM_UP = 2
CAPPED_STEPS = 4


def _trained(row: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the row's model and a batch, both with real values."""
    import keras
    from zoo import batch_of, compiled

    keras.utils.set_random_seed(0)
    model = compiled(row["model"], row["optimizer"], row["dtype"], row["metrics"], row["mode"] == "xla")
    return (model, *batch_of(row["model"], model, row["batch_size"]))


def truth(row: dict[str, Any]) -> dict[str, Any]:
    """Train some steps and return the peak in use of each, weights, optimizer and batch included."""
    comes_first = _come_first()  # before TensorFlow starts its threads
    import tensorflow as tf

    model, x, y = _trained(row)
    began = time.perf_counter()
    for _ in range(WARM_UP):
        model.train_on_batch(x, y)
    warmed = time.perf_counter()
    peaks, before = [], []
    memory = tf.config.experimental
    for _ in range(row["steps"]):
        memory.reset_memory_stats("CPU:0")
        before.append(memory.get_memory_info("CPU:0")["current"])
        loss = model.train_on_batch(x, y)
        peaks.append(memory.get_memory_info("CPU:0")["peak"])
    ended = time.perf_counter()
    result = {
        "peak_bytes": peaks,
        "before_bytes": before if len(set(before)) > 1 else before[:1],
        "persistent_bytes": _persistent_bytes(model, x, y),
        "loss_is_finite": all(math.isfinite(each) for each in (loss if isinstance(loss, list) else [loss])),
        "max_rss_bytes": _max_rss(),
        "load_average": round(os.getloadavg()[0], 1),  # what else ran meanwhile changes the order of operations
        "comes_first": comes_first,
        "warm_up_seconds": round(warmed - began, 2),
        "step_seconds": round((ended - warmed) / row["steps"], 3),
    }
    return result | _requests_of_a_step(model, x, y)


def _come_first() -> bool:
    """Have all other work wait, where `nice -n -20` asks for it; return whether it does.

    A session is a group of its own to Linux's scheduler (sched_autogroup): niceness only tells the processes of one
    session apart, and sessions share the processors equally, each by its group's own niceness.
    """
    if os.nice(0) > -10:
        return False
    group = Path("/proc/self/autogroup")
    try:
        group.write_text("-20")
    except OSError:
        return not group.exists()  # no groups: niceness is enough
    return True


def _persistent_bytes(model: Any, x: Any, y: Any) -> int:
    """Return what is live between steps, as logical bytes: every variable once, and the batch."""
    import tensorflow as tf
    from keras import tree

    held = [*model.variables, *model.optimizer.variables, *tree.flatten((x, y))]
    for metric in model.metrics:
        held += metric.variables
    once = {id(each): each for each in held}.values()
    return sum(math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in once)


def _requests_of_a_step(model: Any, x: Any, y: Any) -> dict[str, Any]:
    """Return what one step asked of the allocator: the most live at once, and the largest requests."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0)
        tf.profiler.experimental.start(folder, options)
        model.train_on_batch(x, y)
        tf.profiler.experimental.stop()
        space = xplane_pb2.XSpace()
        space.ParseFromString(next(Path(folder).rglob("*.xplane.pb")).read_bytes())
    events = []
    for plane in space.planes:
        names = {key: value.name for key, value in plane.stat_metadata.items()}
        kinds = {key: value.name for key, value in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                kind = kinds[event.metadata_id]
                if kind not in ("MemoryAllocation", "MemoryDeallocation"):
                    continue
                values = {names[stat.metadata_id]: stat for stat in event.stats}
                if not _text(values.get("allocator_name"), names).startswith("bfc_cpu"):
                    continue
                at = line.timestamp_ns * 1000 + event.offset_ps
                events.append((at, kind, _number(values.get("addr")), _number(values.get("requested_bytes"))))
    live: dict[int, int] = {}
    now = most = 0
    requests = []
    for _, kind, address, asked in sorted(events, key=lambda each: each[0]):
        if kind == "MemoryAllocation":
            requests.append(asked)
            live[address] = asked
            now += asked
            most = max(most, now)
        else:
            now -= live.pop(address, 0)
    return {
        "requested_increase_bytes": most,
        "largest_requests_bytes": sorted(requests, reverse=True)[:6],
        "scalar_requests_bytes": sum(asked for asked in requests if asked <= 8),
        "requests": len(requests),
    }


def _number(stat: Any) -> int:
    return 0 if stat is None else int(stat.int64_value or stat.uint64_value)


def _text(stat: Any, names: dict[int, str]) -> str:
    return "" if stat is None else str(stat.str_value or names.get(stat.ref_value, ""))


def capped(row: dict[str, Any]) -> dict[str, Any]:
    """Train some steps under the memory limit that the caller has set; running out ends this process with a message."""
    model, x, y = _trained(row)
    for _ in range(CAPPED_STEPS):
        model.train_on_batch(x, y)
    return {"outcome": "trained"}


def estimate(row: dict[str, Any]) -> dict[str, Any]:
    """Estimate the row by the method asked for, without its weights; the formula where that fails."""
    import kerasmem

    began = time.perf_counter()
    try:
        report = _report(kerasmem, row, row["method"])
        error = None
    except Exception as problem:
        report, error = None, f"{type(problem).__name__}: {problem}"[:400]
    wall = round(time.perf_counter() - began, 2)
    rss = _max_rss()
    result: dict[str, Any] = {"method": row["method"], "error": error, "wall_seconds": wall, "max_rss_bytes": rss}
    if report is None:
        return result
    pool = report.pool
    return result | {
        "method_used": report.settings.method,
        "total": report.bytes.total,
        "low": report.bytes.low,
        "high": report.bytes.high,
        "formula": report.formula.total_bytes,
        "requested": pool and pool.requested,
        "reserved": pool and pool.reserved,
        "smallest_limit": pool and pool.smallest_limit,
        "unmodelled": [each.what for each in report.unmodelled],
        "notes": list(report.notes)[:4],
    }


def _report(kerasmem: Any, row: dict[str, Any], method: str) -> Any:
    from zoo import ZOO

    shape = ZOO[row["model"]].input_shape
    return kerasmem.estimate(
        f"{HERE / 'zoo.py'}:compiled",
        factory_args={
            "name": row["model"],
            "optimizer": row["optimizer"],
            "dtype": row["dtype"],
            "metrics": row["metrics"],
            "jit_compile": row["mode"] == "xla",
        },
        batch_size=row["batch_size"],
        method=method,
        jit_compile=row["mode"] == "xla",
        **({"input_shape": shape} if shape else {}),
    )


def rivals(row: dict[str, Any]) -> dict[str, Any]:
    """Ask the formula, model-profiler and Grappler's virtual cluster for the same row."""
    asked: dict[str, Callable[[dict[str, Any]], int]] = {
        "formula": _formula,
        "model-profiler": _model_profiler,
        "grappler": _grappler,
    }
    result: dict[str, Any] = {}
    for name, ask in asked.items():
        began = time.perf_counter()
        try:
            answer: dict[str, Any] = {"total": ask(row)}
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"[:300]}
        result[name] = answer | {"wall_seconds": round(time.perf_counter() - began, 2)}
    return result


def _formula(row: dict[str, Any]) -> int:
    import kerasmem

    return int(_report(kerasmem, row, "formula").formula.total_bytes)


def _model_profiler(row: dict[str, Any]) -> int:
    """Return model-profiler's GPU memory requirement in bytes.

    Version 1.1.8 (2021) reads `layer.output_shape`, which Keras 3 has no more: the layers are lent it back. Its own
    function is called without its rounding to 0.0001 GB.
    """
    import keras
    from model_profiler.utils import keras_model_memory_usage
    from zoo import compiled

    def output_shape(layer: Any) -> Any:
        output = layer.output
        if isinstance(output, (list, tuple)):
            return [tuple(each.shape) for each in output]
        return tuple(output.shape)

    keras.layers.Layer.output_shape = property(output_shape)
    model = compiled(row["model"], row["optimizer"], row["dtype"], row["metrics"], row["mode"] == "xla")
    counted = keras_model_memory_usage.__closure__[0].cell_contents
    return int(counted(model, row["batch_size"]))


def _grappler(row: dict[str, Any]) -> int:
    """Return the peak that Grappler's virtual cluster names for the traced training step."""
    import tensorflow as tf
    from keras import tree
    from tensorflow.core.protobuf import device_properties_pb2
    from tensorflow.python.framework import meta_graph
    from tensorflow.python.framework.convert_to_constants import _run_inline_graph_optimization
    from tensorflow.python.grappler import cluster, item

    model, x, y = _trained(row | {"mode": "graph"})
    model.train_on_batch(x, y)  # the optimizer's slots are made on the first step

    def step(*flat: Any) -> Any:
        first, second = tree.pack_sequence_as((x, y), list(flat))
        return model.train_step((first, second))

    function = tf.function(step).get_concrete_function(
        *[tf.TensorSpec(each.shape, each.dtype) for each in tree.flatten((x, y))]
    )
    graph_def = _run_inline_graph_optimization(function, lower_control_flow=False, aggressive_inlining=True)
    variables = {handle.name.partition(":")[0]: outer for outer, handle in function.graph.captures}
    shapes = {id(each.handle): each for each in function.graph.variables}
    for node in graph_def.node:  # a handle from outside has no shape of its own for Grappler
        outer = shapes.get(id(variables.get(node.name)))
        if node.op == "Placeholder" and outer is not None:
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = outer.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(outer.shape.as_proto())
            node.attr["shared_name"].s = node.name.encode()
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        used = {each.op.name for operation in graph.get_operations() for each in operation.inputs}
        for operation in graph.get_operations():
            if operation.name not in used:  # updates of variables, and what the step returns
                graph.add_to_collection("train_op", operation)
        described = meta_graph.create_meta_graph_def(graph=graph)
    device = device_properties_pb2.NamedDevice(name="/device:CPU:0")
    device.properties.type = "CPU"
    device.properties.frequency = 2000
    device.properties.num_cores = 2
    device.properties.memory_size = 1 << 40
    virtual = cluster.Cluster(allow_soft_placement=True, disable_detailed_stats=False, devices=[device])
    peaks = virtual.DeterminePeakMemoryUsage(item.Item(described))
    return int(max(peak for peak, _ in peaks.values()))


def _max_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "truth": truth,
    "estimate": estimate,
    "capped": capped,
    "rivals": rivals,
}

if __name__ == "__main__":
    print("\n" + json.dumps(PARTS[sys.argv[1]](json.loads(sys.argv[2]))))
