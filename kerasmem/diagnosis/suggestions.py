"""What is worth doing in this case: two or three things, the most useful first, each with code that runs today."""

from __future__ import annotations

from kerasmem.diagnosis.causes import Figures
from kerasmem.diagnosis.diagnosis import Suggestion
from kerasmem.diagnosis.failures import Failure
from kerasmem.units import format_size

MOST = 3
_LEANER = Suggestion(
    "Use an optimizer that keeps less",
    "it ran out while updating the weights: Adam keeps two more values for each, SGD with momentum one",
    "model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=loss)",
)
_UNCOMPILED = Suggestion(
    "Try the step without XLA",
    "a compiled step takes its temporary memory in one piece; without XLA the pieces are smaller",
    "model.compile(optimizer, loss, jit_compile=False)",
)
_RECOMPUTE = Suggestion(
    "Compute activations again in the backward pass",
    "the batch cannot be divided; a step then keeps what crosses a few cuts, for at most a third more arithmetic",
    "model = kerasmem.recompute(model)",
)
_WATCH = Suggestion(
    "Watch memory grow",
    "the log shows what is in use, step by step, and what was live at the peak",
    'model.fit(x, y, callbacks=[kerasmem.MemoryLogger("run.jsonl")])',
)
_KERNEL_LOG = Suggestion(
    "Ask the kernel why",
    "it logs each process that it kills for want of memory",
    "sudo dmesg -T | grep -i -E 'out of memory|oom'",
)
_TRACK = Suggestion(
    "Find the step that takes it",
    "what was kept after each action is told at the program's end",
    'with kerasmem.track("load data"):\n    x, y = load_data()',
)
# operations on weights, whose first dimension is no batch
_OF_WEIGHTS = (
    "BackpropFilter", "MatMul_1", "Assign", "Initializer", "andom", "Const", "zeros", "ones", "Fill", "Read",
)  # fmt: skip


def suggestions(failure: Failure, found: Figures, operation: str | None, phase: str | None) -> tuple[Suggestion, ...]:
    """Return what to do about a failure.

    Args:
        failure: the failure.
        found: its figures and cause.
        operation: that failed.
        phase: of the step.
    """
    if failure.family == "host" or failure.what == "host":
        chosen = _host(failure, found)
    elif failure.family == "cuda" and failure.what == "library":
        chosen = [
            _growth("the library's own memory lies outside TensorFlow's"),
            _processes(found),
            _smaller(found, None),
        ]
    elif failure.what == "copy":
        chosen = [_stream(failure, found), _processes(found), _smaller(found, None)]
    elif failure.family == "pytorch":
        chosen = _pytorch(failure, found)
    else:
        chosen = _device(failure, found, batch_of(failure, operation, phase), phase)
    return tuple(chosen[:MOST])


def batch_of(failure: Failure, operation: str | None, phase: str | None) -> int | None:
    """Return the batch size where the tensor's first dimension is one, None where it may be something else."""
    sizes = failure.facts.get("tensor_shape")
    if failure.family != "tensorflow" or not sizes or len(sizes) < 2 or phase == "optimizer":
        return None
    last = (operation or "").rsplit("/", 1)[-1]
    if phase is None or any(word in last for word in _OF_WEIGHTS) or not 1 <= sizes[0] <= 65536:
        return None
    return int(sizes[0])


def smaller_batch(batch: int, found: Figures) -> int:
    """Return a power of two at most half the batch, scaled by what the step lacked: a first guess, as weights do not
    shrink with the batch.

    Example:
        >>> smaller_batch(64, Figures(2**30, 0, 0, 2**33, 2**33, None, None, "capacity"))
        32
    """
    share = 0.5
    if found.requested and found.limit and found.in_use is not None:
        share = min(share, found.limit / (found.in_use + found.requested))
    return 1 << max(0, int(batch * share).bit_length() - 1)


def _device(failure: Failure, found: Figures, batch: int | None, phase: str | None) -> list[Suggestion]:
    device, family = str(failure.facts.get("device") or ""), failure.family
    is_on_host, is_tpu = device.startswith("CPU"), device == "TPU"
    chosen = []
    if found.cause == "other process":
        chosen += [_processes(found), _growth("this process then takes what it needs, not the whole card")]
    if found.cause == "fragmentation" and not is_on_host:
        chosen.append(_async_allocator(found))
    if failure.facts.get("dtype") in ("double", "float64", "f64"):
        chosen.append(_float32(found))
    if phase == "optimizer":
        chosen.append(_LEANER)
    chosen.append(_smaller(found, batch))
    if family == "theano":
        return [*chosen, *([] if found.cause == "other process" else [_processes(found)])]
    if family == "xla" and failure.what == "program":
        chosen.append(_UNCOMPILED)
    if family in ("tensorflow", "xla") and not is_tpu:  # what runs on TensorFlow, on one card
        chosen.append(_other_step(found, batch, phase))
    if not is_on_host:
        chosen.append(_mixed(tpu=is_tpu))
    return [*chosen, _advice(found, batch) if family != "jax" else _WATCH]


def _other_step(found: Figures, batch: int | None, phase: str | None) -> Suggestion:
    """Return the step that takes less for the same update."""
    if phase == "optimizer":
        return _advice(found, batch)
    is_small = batch is not None and smaller_batch(batch, found) >= batch
    return _RECOMPUTE if is_small else _pieces(batch)


def _host(failure: Failure, found: Figures) -> list[Suggestion]:
    chosen = []
    if failure.facts.get("dtype") in ("float64", "f8", "double"):
        why = f"half the bytes{_half(found)}, and Keras computes in float32 anyway"
        chosen.append(Suggestion("Make the array float32", why, 'x = numpy.empty(shape, dtype="float32")'))
    chosen.append(_stream(failure, found))
    if failure.what == "slurm":
        more = "" if found.limit is None else f"; ask for more than {format_size(found.limit)}"
        gigabytes = 64 if found.limit is None else -(-found.limit * 3 // 2**31)  # half as much again
        why = f"the job was held to its limit{more}"
        chosen.append(Suggestion("Ask Slurm for more memory", why, f"#SBATCH --mem={gigabytes}G"))
    elif failure.what in ("cgroup", "container"):
        limit = "the container" if found.limit is None else f"the container, held to {format_size(found.limit)},"
        code = "resources: {limits: {memory: 32Gi}}   # Kubernetes; docker run --memory 32g"
        why = f"{limit} was killed at it, whatever the machine has"
        chosen.append(Suggestion("Raise the container's limit", why, code))
    elif failure.what == "killed":
        chosen.append(_KERNEL_LOG)
    return [*chosen, _TRACK]


def _pytorch(failure: Failure, found: Figures) -> list[Suggestion]:
    chosen = []
    if found.cause == "other process":
        chosen.append(_processes(found))
    if found.cause == "fragmentation":
        name = "PYTORCH_HIP_ALLOC_CONF" if failure.facts.get("platform") == "HIP" else "PYTORCH_CUDA_ALLOC_CONF"
        why = "enough is free, in pieces that are too small"
        if found.reserved is not None and found.in_use is not None:
            spare = format_size(found.reserved - found.in_use)
            why = f"{spare} are reserved and not handed out, in pieces that are too small"
        code = f"{name}=expandable_segments:True python train.py"
        chosen.append(Suggestion("Let the allocator grow its pieces", why, code))
    chosen += [_smaller(found, None), _mixed(tpu=False)]
    if found.cause not in ("other process", "fragmentation"):
        chosen.append(_processes(found))
    return chosen


def _half(found: Figures) -> str:
    if not found.requested:
        return ""
    return f": {format_size(found.requested // 2)} in place of {format_size(found.requested)}"


def _smaller(found: Figures, batch: int | None) -> Suggestion:
    ask = f"kerasmem.max_batch_size(model, device={_device_argument(found)}).largest   # the largest that fits"
    if batch is None:
        why = "activations shrink with it; the estimator tells which fits"
        return Suggestion("Train with a smaller batch", why, ask)
    smaller = smaller_batch(batch, found)
    if smaller >= batch or batch < 2:
        code = "print(kerasmem.estimate(model, batch_size=1).bytes)"
        return Suggestion("See what takes the memory", "the batch cannot be much smaller", code)
    tensor = ""
    if found.requested:
        then = format_size(found.requested * smaller // batch)
        tensor = f"; this tensor is then {then}, not {format_size(found.requested)}"
    what, code = f"Train with batches of {smaller} in place of {batch}", f"model.fit(x, y, batch_size={smaller})\n{ask}"
    return Suggestion(what, f"activations shrink with the batch{tensor}", code)


def _device_argument(found: Figures) -> str:
    return str(found.limit) if found.limit else '"16GB"'  # the second is the user's to set


def _mixed(*, tpu: bool) -> Suggestion:
    policy = "mixed_bfloat16" if tpu else "mixed_float16"
    code = f'keras.mixed_precision.set_global_policy("{policy}")   # before the model is built'
    return Suggestion("Compute in half precision", "activations take half the bytes; weights stay float32", code)


def _growth(why: str) -> Suggestion:
    return Suggestion(
        "Let TensorFlow take memory as it needs it",
        why,
        "kerasmem.enable_memory_growth()   # before any other use of TensorFlow",
    )


def _processes(found: Figures) -> Suggestion:
    held = "" if not found.others else f"; here others hold {format_size(found.others)}"
    code = "nvidia-smi   # or: kerasmem watch"
    return Suggestion("See who else holds the card", f"a notebook or a dead run may keep its memory{held}", code)


def _async_allocator(found: Figures) -> Suggestion:
    free = "enough" if found.free is None else format_size(found.free)
    piece = "" if found.largest is None else f", the largest piece {format_size(found.largest)}"
    return Suggestion(
        "Use CUDA's own allocator",
        f"{free} is free{piece}; it joins pieces",
        "TF_GPU_ALLOCATOR=cuda_malloc_async python train.py",
    )


def _float32(found: Figures) -> Suggestion:
    return Suggestion("Feed float32, not float64", f"half the bytes{_half(found)}", 'x = x.astype("float32")')


def _pieces(batch: int | None) -> Suggestion:
    size = "" if batch is None else f", batch_size={batch}"
    return Suggestion(
        "Keep the batch and take it in pieces",
        "a step that runs out is taken again in micro-batches whose gradients are added up: one update, as before",
        f"kerasmem.fit(model, x, y{size})   # the arguments of model.fit",
    )


def _advice(found: Figures, batch: int | None) -> Suggestion:
    size = "" if batch is None else f", batch_size={batch}"
    return Suggestion(
        "See what saves how much",
        "each remedy estimated on the changed model, and what fits together, with a script",
        f"kerasmem.advise(model, device={_device_argument(found)}{size}).remedies",
    )


def _stream(failure: Failure, found: Figures) -> Suggestion:
    is_array = found.requested is not None and failure.what in ("array", "copy")
    whole = format_size(found.requested) if is_array else "the data"
    code = 'model.fit(kerasmem.H5ChunkSequence("data.h5", batch_size=32))'
    return Suggestion("Stream the data from HDF5", f"a few chunks are in memory at a time, never {whole} at once", code)
