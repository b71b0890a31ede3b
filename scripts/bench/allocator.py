#!/usr/bin/env python3
"""The simulated BFC allocator against the real one: what real processes asked for, replayed request by request.

    python scripts/bench/allocator.py [MODEL …] [--steps 6]

Each model of the list trains in a fresh process with TensorFlow's BFC allocator on the CPU, recorded from before its
first allocation. The simulation is given the requests in their order, and the address of a region when it grows;
counted are the chunks whose size, and those whose address, is not what TensorFlow handed out. `wrong_sizes_untold` are
those of a simulation that has to guess the order of the regions' addresses, which decides between chunks of equal size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from environment import ROOT, environment, write_results

DEFAULT = (
    "mnist_cnn", "wide_mlp", "vgg16", "resnet50", "mobilenet_v2", "lstm", "transformer", "unet", "text_classifier",
)  # fmt: skip


def train(name: str, steps: int, folder: str) -> None:
    """Train one model in this process, recording every allocation from the first on."""
    import tensorflow as tf

    tf.profiler.experimental.start(folder, options=tf.profiler.experimental.ProfilerOptions(host_tracer_level=3))
    import keras
    from zoo import MODELS

    build, batch = MODELS[name]
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, jit_compile=False)
    for size in (batch, batch // 2, batch):  # as a last batch that is smaller, and what it leaves behind
        x = [tf.zeros((size, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]
        y = tf.zeros((size,), tf.int32)
        for _ in range(steps // 3):
            model.train_on_batch(x if len(x) > 1 else x[0], y)
    tf.profiler.experimental.stop()


def untold(events: Any, descending: bool) -> int:
    """Return the wrong chunk sizes where the simulation is not told where TensorFlow's regions lie."""
    from kerasmem.devices.recording import ALLOCATE
    from kerasmem.estimation.allocator import BFCAllocator

    pool = BFCAllocator(limit=64 << 30, collect=False, descending=descending)
    handles: dict[int, int] = {}
    wrong = 0
    for event in events:
        if event.kind == ALLOCATE:
            handles[event.address] = pool.allocate(event.requested)
            wrong += pool.chunk_size(handles[event.address]) != event.allocated
        elif event.address in handles:
            pool.free(handles.pop(event.address))
    return wrong


def compare(folder: str) -> dict[str, Any]:
    """Replay one recording."""
    from kerasmem.devices.recording import ALLOCATE, read_allocator_events
    from kerasmem.estimation.allocator import BFCAllocator

    events = read_allocator_events(folder)
    pool = BFCAllocator(limit=64 << 30, collect=False, descending=True)
    handles: dict[int, int] = {}
    sizes = addresses = in_use = unknown = told = out_of_order = before_it = 0
    for event in events:
        if event.kind == ALLOCATE:
            pool.next_address = event.address
            before = pool.reserved
            handle = pool.allocate(event.requested)
            pool.next_address = None
            told += pool.reserved != before
            sizes += pool.chunk_size(handle) != event.allocated
            addresses += handle != event.address
            handles[event.address] = handle
        elif event.address in handles:
            pool.free(handles.pop(event.address))
        else:
            unknown += 1
        in_use += pool.in_use != event.in_use
        out_of_order += event.in_use - before_it != (event.allocated if event.kind == ALLOCATE else -event.allocated)
        before_it = event.in_use
    return {
        "events": len(events),
        "allocations": sum(event.kind == ALLOCATE for event in events),
        "wrong_sizes": sizes,
        "wrong_addresses": addresses,
        "wrong_in_use": in_use,
        "out_of_order": out_of_order,
        "wrong_sizes_untold": {"descending": untold(events, True), "ascending": untold(events, False)},
        "unknown_frees": unknown,
        "regions": told,
        "reserved_bytes": pool.reserved,
        "peak_bytes": max(event.in_use for event in events),
        "simulated_peak_bytes": pool.peak,
        "requested_at_peak_bytes": pool.requested_at_peak,
    }


def record(name: str, steps: int) -> dict[str, Any]:
    """Train in a fresh process and compare."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, name, "--into", folder, "--steps", str(steps)],
            capture_output=True,
            text=True,
            env={
                **os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true", "CUDA_VISIBLE_DEVICES": "-1",
                "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(ROOT),
            },
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        return {"model": name, **compare(folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--into", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        train(options.models[0], options.steps, options.into)
        return
    sys.path.insert(0, str(ROOT))
    rows = []
    for name in options.models or DEFAULT:
        rows.append(record(name, options.steps))
        print(json.dumps(rows[-1]), file=sys.stderr)
    counts = ("events", "allocations", "wrong_sizes", "wrong_addresses", "wrong_in_use", "out_of_order")
    summary = {key: sum(row[key] for row in rows) for key in counts}
    print(json.dumps(summary), file=sys.stderr)
    if not options.models:
        versions = environment("tensorflow", "keras")
        settings = {"steps": options.steps, "optimizer": "adam", "jit_compile": False}
        write_results("allocator", {"environment": versions, "settings": settings, "summary": summary, "rows": rows})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
