"""TensorFlow's operations: the tensor that was not to be had, the node, copies to a device, the async allocator.

The forms are those of tensorflow/core/framework/op_kernel.cc ("OOM when allocating tensor with shape … and type … on
… by allocator …"), graph execution errors, and gpu_cudamallocasync_allocator.cc.
"""

from __future__ import annotations

import re

from kerasmem.diagnosis.rules import Finding, Rule, counted, named_facts, reader, rule, shaped, sized


def device_name(text: str) -> str | None:
    """Return "GPU:0" from "/job:localhost/replica:0/task:0/device:GPU:0" or "GPU_0_bfc", None for neither."""
    found = re.search(r"(?:^|[/:_(])(cpu|gpu|tpu)[:_](\d{1,4})(?!\d)", text, re.IGNORECASE)
    if found:
        return f"{found[1].upper()}:{int(found[2])}"
    return "CPU:0" if "cpu" in text.lower() else None


@reader(
    "OOM when",
    rf"OOM when allocating tensor with shape ?\[{shaped('tensor_shape', 0)}\]"
    r"(?:(?: and)? (?:of )?type (?P<dtype>\w{1,20}))?(?: on (?P<device>\S{1,200}))?"
    r"(?: by allocator (?P<allocator>\S{1,80}))?",
)
def _tensor(match: re.Match[str]) -> Finding:
    facts = named_facts(match)
    device = device_name(facts.get("device", "")) or device_name(facts.get("allocator", ""))
    return Finding("failure", "tensorflow", "tensor", {**facts, "device": device})


@reader(
    "initialized", r"(?:from \S{1,200} to (\S{1,200}) in order to run ([\w./]{1,200}): )?Dst tensor is not initialized"
)
def _copy(match: re.Match[str]) -> Finding:
    return Finding("failure", "tensorflow", "copy", {"device": device_name(match[1] or "") or "GPU:0"})


@reader(
    "lloc",
    r"(?P<allocator>gpu_async_(?P<device>\d{1,4})) cuMemAllocAsync failed to allocate "
    rf"{sized('requested_bytes')}(?!.{{0,20}}retry)",
)
def _async(match: re.Match[str]) -> Finding:
    return Finding("failure", "tensorflow", "async", {**named_facts(match), "device": f"GPU:{match['device']}"})


@reader("ode", r"(?:Detected at node '?|\{\{node |\[\[Node: )(?P<operation>[\w.\-/>]{1,400})")
def _node(match: re.Match[str]) -> Finding:
    ahead = match[0].startswith("Detected")
    return Finding("ahead" if ahead else "detail", "tensorflow", "node", named_facts(match))


_DRIVER = rf"Free memory/Total memory: {counted('driver_free')}/{counted('driver_total')}"
_REFUSED = (
    rf"failed to allocate {sized('requested_bytes')}(?: \({counted('requested_bytes')} bytes\))? "
    r"from device: .{0,20}OUT_OF_MEMORY"
)
RULES: tuple[Rule, ...] = (
    _tensor,
    _copy,
    _async,
    rule("Total memory", _DRIVER, "detail", "tensorflow"),
    _node,
    # Keras 3 numbers every scope of a call, Keras 2 does not: who wrote the traceback decides how names are read.
    rule("keras", r"keras/src/backend/tensorflow/", "ahead", "tensorflow", "keras3", keras=3),
    rule("keras", r"(?:keras/engine/|tf_keras/src/|keras/src/engine/)", "ahead", "tensorflow", "keras2", keras=2),
    rule("failed to allocate", _REFUSED, "weak", "tensorflow", "driver"),
)
