"""TensorFlow's operations: the tensor that was not to be had, the node, copies to a device, the async allocator.

The forms are those of tensorflow/core/framework/op_kernel.cc ("OOM when allocating tensor with shape … and type … on
… by allocator …"), graph execution errors, and gpu_cudamallocasync_allocator.cc.
"""

from __future__ import annotations

import re

from kerasmem.diagnosis.clues import SIZE, Clue, Rule, rule, shape, size


def device_name(text: str) -> str | None:
    """Return "GPU:0" from "/job:localhost/replica:0/task:0/device:GPU:0" or "GPU_0_bfc", None for neither."""
    found = re.search(r"(?:^|[/:_(])(cpu|gpu|tpu)[:_](\d{1,4})(?!\d)", text, re.IGNORECASE)
    if found:
        return f"{found[1].upper()}:{int(found[2])}"
    return "CPU:0" if "cpu" in text.lower() else None


@rule(
    "OOM when",
    r"OOM when allocating tensor with shape ?\[([\d, ]{0,200})\]"
    r"(?:(?: and)? (?:of )?type (\w{1,20}))?(?: on (\S{1,200}))?(?: by allocator (\S{1,80}))?",
)
def _tensor(match: re.Match[str]) -> Clue:
    device = device_name(match[3] or "") or device_name(match[4] or "")
    return Clue(
        "failure",
        "tensorflow",
        "tensor",
        {"tensor_shape": shape(match[1]), "dtype": match[2], "device": device, "allocator": match[4]},
    )


@rule(
    "initialized", r"(?:from \S{1,200} to (\S{1,200}) in order to run ([\w./]{1,200}): )?Dst tensor is not initialized"
)
def _copy(match: re.Match[str]) -> Clue:
    return Clue("failure", "tensorflow", "copy", {"device": device_name(match[1] or "") or "GPU:0"})


@rule("lloc", rf"(gpu_async_(\d{{1,4}})) cuMemAllocAsync failed to allocate {SIZE}(?!.{{0,20}}retry)")
def _async(match: re.Match[str]) -> Clue:
    return Clue(
        "failure",
        "tensorflow",
        "async",
        {"requested_bytes": size(match[3], match[4]), "device": f"GPU:{match[2]}", "allocator": match[1]},
    )


@rule("Total memory", r"Free memory/Total memory: (\d{1,20})/(\d{1,20})")
def _driver(match: re.Match[str]) -> Clue:
    return Clue("detail", "tensorflow", "", {"driver_free": size(match[1]), "driver_total": size(match[2])})


@rule("ode", r"(?:Detected at node '?|\{\{node |\[\[Node: )([\w.\-/>]{1,400})(.{0,12})")
def _node(match: re.Match[str]) -> Clue:
    ahead = match[0].startswith("Detected")
    return Clue("ahead" if ahead else "detail", "tensorflow", "node", {"operation": match[1]})


# Keras 3 numbers every scope of a call, Keras 2 does not: who wrote the traceback decides how names are read.
@rule("keras", r"keras/src/backend/tensorflow/")
def _keras3(match: re.Match[str]) -> Clue:
    return Clue("ahead", "tensorflow", "keras3", {"keras": 3})


@rule("keras", r"(?:keras/engine/|tf_keras/src/|keras/src/engine/)")
def _keras2(match: re.Match[str]) -> Clue:
    return Clue("ahead", "tensorflow", "keras2", {"keras": 2})


@rule(
    "failed to allocate", rf"failed to allocate {SIZE}(?: \((\d{{1,20}}) bytes\))? from device: .{{0,20}}OUT_OF_MEMORY"
)
def _driver_refused(match: re.Match[str]) -> Clue:
    return Clue("weak", "tensorflow", "driver", {"requested_bytes": size(match[3]) or size(match[1], match[2])})


RULES: tuple[Rule, ...] = (_tensor, _copy, _async, _driver, _node, _keras3, _keras2, _driver_refused)
