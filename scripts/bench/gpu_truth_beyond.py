"""Training that needs more than a card has free: unified memory, and activations that wait on the host.

python scripts/bench/gpu_truth_beyond.py BYTES     # leaves so many bytes of the first card free until its input ends
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu_truth_machine import gpu_bytes

SHARES = (1.5, 0.8, 0.5)  # what is left free on the card, over what training takes
Ask = Callable[..., dict[str, Any]]


def fill_card(leave: int) -> None:
    """Take all of the first card but so many bytes, say so, and keep it until the input ends."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def checked(code: int) -> None:
        if code:
            sys.exit(f"CUDA's driver answers {code}")

    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    checked(cuda.cuInit(0))
    checked(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
    checked(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    taken = max(0, free.value - leave)
    if taken:
        checked(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(taken)))
    print(taken, flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def only_free(leave: int) -> Iterator[int]:
    """Leave so many bytes of the card free; yield how many another process holds.

    Raises:
        RuntimeError: they cannot be taken.
    """
    with subprocess.Popen(
        [sys.executable, __file__, str(leave)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        taken = process.stdout.readline().strip()
        try:
            if not taken:
                raise RuntimeError(f"the card cannot be filled: {process.stderr.read().strip()[-300:]}")
            yield int(taken)
        finally:
            process.stdin.close()


def unified(task: dict[str, Any], ask: Ask, device: str) -> dict[str, Any]:
    """Return how a step trains where the card has less free than it takes, with unified memory and without.

    Another process holds the rest of the card, so that a card of any size is tried beyond its end.

    Args:
        task: the model, its batch, and whether this is a rehearsal.
        ask: runs a kind of part in a fresh process.
        device: "gpu" or "cpu".
    """
    step = {**task, "dtype": "float32", "jit_compile": True, "steps": 2 if task["rehearsed"] else 5}
    from os import environ

    step["framework"] = framework = environ["KERAS_BACKEND"]
    alone = ask("1", {**step, "plan": False}, framework, device)
    if "failed" in alone:
        raise RuntimeError(f"the step alone: {alone['failed']}")
    peak = alone["measured"]["peak"]
    memory = gpu_bytes() if device == "gpu" else None
    result: dict[str, Any] = {"alone": alone, "plenty": ask("train", step, framework, device), "rows": []}
    if memory is None or peak is None:  # the variables do no harm: this is what a machine without a card can try
        result["rows"].append({"unified": True, **ask("train", step, framework, device, **beyond(framework, 2.0))})
        return {**result, "needs_card": ["a card to fill, and what its driver counts"]}
    context = max(0, (alone["measured"].get("driver_with_context") or 0) - memory["used"])
    for share in SHARES:
        leave = int(share * peak) + context
        with only_free(leave) as taken:
            for shared in (False, True):
                limit = 4 * peak if shared and framework == "tensorflow" else None
                fraction = max(1.5, 1 + 4 * peak / memory["total"])
                variables = beyond(framework, fraction) if shared else {}
                answer = ask("train", {**step, "limit": limit}, framework, device, **variables)
                row = {"share": share, "left_free": leave, "held_by_another": taken, "unified": shared}
                result["rows"].append({**row, **answer})
    return {**result, "needs_card": []}


def beyond(framework: str, fraction: float) -> dict[str, str]:
    """Return the variables that let a framework's allocator take more than the card has."""
    if framework == "jax":
        return {"TF_FORCE_UNIFIED_MEMORY": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.3f}"}
    return {"TF_FORCE_UNIFIED_MEMORY": "1"}


def offload(task: dict[str, Any]) -> dict[str, Any]:
    """Return what blocks of a network take in JAX with activations kept, computed again, or moved to the host."""
    import jax

    width, batch, blocks, steps = (64, 32, 4, 2) if task["rehearsed"] else (4096, 8192, 24, 5)
    device = jax.devices()[0]
    rows, missing = [], []
    for way in ("offloaded", "recomputed", "kept"):  # JAX's peak is never reset: the least comes first
        try:
            rows.append({"way": way, **_blocks(way, device, width, batch, blocks, steps)})
        except Exception as error:
            if device.platform != "cpu":
                raise
            missing.append(f"{way}: {type(error).__name__}: {error}"[:200])
    if rows and rows[0]["peak"] is None:
        missing.append("the allocator's peak")
    settings = {"width": width, "batch": batch, "blocks": blocks}
    return {"device": device.device_kind, "settings": settings, "rows": rows, "needs_card": missing}


def _blocks(way: str, device: Any, width: int, batch: int, blocks: int, steps: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    policies = jax.checkpoint_policies
    policy = policies.nothing_saveable
    if way == "offloaded":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["block"],
            offload_src="device",
            offload_dst="pinned_host",
        )

    def block(x: Any, weights: Any) -> Any:
        return checkpoint_name(x + jax.nn.gelu(x @ weights[0]) @ weights[1], "block")

    def loss(weights: Any, x: Any) -> Any:
        for each in weights:
            x = (block if way == "kept" else jax.checkpoint(block, policy=policy))(x, each)
        return jnp.mean(x * x)

    weights = [(jnp.full((width, width), 0.001), jnp.full((width, width), 0.001)) for _ in range(blocks)]
    x = jnp.ones((batch, width))
    compiled = jax.jit(jax.grad(loss)).lower(weights, x).compile()
    plan = compiled.memory_analysis()
    jax.block_until_ready(compiled(weights, x))
    began = time.perf_counter()
    for _ in range(steps):
        jax.block_until_ready(compiled(weights, x))
    return {
        "plan": {
            "argument": plan.argument_size_in_bytes,
            "temp": plan.temp_size_in_bytes,
            "host_temp": getattr(plan, "host_temp_size_in_bytes", None),
        },
        "peak": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "step_seconds": round((time.perf_counter() - began) / steps, 5),
    }


if __name__ == "__main__":
    fill_card(int(sys.argv[1]))
