"""What is worth doing in this case: two or three things, the most useful first, each with code that runs today."""

from __future__ import annotations

from kerasmem.diagnosis.diagnosis import Suggestion
from kerasmem.diagnosis.incidents import Incident
from kerasmem.diagnosis.judging import Figures
from kerasmem.units import format_size

MOST = 3


def suggestions(incident: Incident, found: Figures, operation: str | None, phase: str | None) -> tuple[Suggestion, ...]:
    """Return what to do about a failure.

    Args:
        incident: the failure.
        found: its figures and cause.
        operation: that failed.
        phase: of the step.
    """
    if incident.family == "host" or incident.what == "host":
        chosen = _host(incident, found)
    elif incident.family == "cuda" and incident.what == "library":
        chosen = [
            _growth("the library's own memory lies outside TensorFlow's"),
            _processes(found),
            _smaller(found, None),
        ]
    elif incident.what == "copy":
        chosen = [_stream(incident, found), _processes(found), _smaller(found, None)]
    elif incident.family == "pytorch":
        chosen = _pytorch(incident, found)
    else:
        chosen = _device(incident, found, batch_of(incident, operation, phase), phase)
    return tuple(chosen[:MOST])


def batch_of(incident: Incident, operation: str | None, phase: str | None) -> int | None:
    """Return the batch size where the tensor's first dimension is one, None where it may be something else."""
    sizes = incident.facts.get("tensor_shape")
    if incident.family != "tensorflow" or not sizes or len(sizes) < 2 or phase == "optimizer":
        return None
    last = (operation or "").rsplit("/", 1)[-1]
    of_weights = (
        "BackpropFilter",
        "MatMul_1",
        "Assign",
        "Initializer",
        "andom",
        "Const",
        "zeros",
        "ones",
        "Fill",
        "Read",
    )
    if phase is None or any(word in last for word in of_weights) or not 1 <= sizes[0] <= 65536:
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


def _device(incident: Incident, found: Figures, batch: int | None, phase: str | None) -> list[Suggestion]:
    on_host = str(incident.facts.get("device") or "").startswith("CPU")
    compiled = incident.family in ("xla", "jax")
    chosen = []
    if found.cause == "other process":
        chosen += [_processes(found), _growth("this process then takes what it needs, not the whole card")]
    if found.cause == "fragmentation" and not on_host:
        chosen.append(_async_allocator(found))
    if incident.facts.get("dtype") in ("double", "float64", "f64"):
        chosen.append(_float32(found))
    if phase == "optimizer":
        chosen.append(_leaner())
    chosen.append(_smaller(found, batch))
    if incident.family == "theano":
        return [*chosen, _processes(found)] if found.cause != "other process" else chosen
    is_tpu = incident.facts.get("device") == "TPU"
    if compiled and incident.family == "xla" and incident.what == "program":
        chosen.append(_uncompiled())
    if incident.family in ("tensorflow", "xla") and not is_tpu:  # what runs on TensorFlow, on one card
        if phase == "optimizer":
            chosen.append(_advice(found, batch))
        elif batch is not None and smaller_batch(batch, found) >= batch:
            chosen.append(_recompute())
        else:
            chosen.append(_pieces(batch))
    if not on_host:
        chosen.append(_mixed(tpu=is_tpu))
    return [*chosen, _advice(found, batch)] if incident.family != "jax" else [*chosen, _watch()]


def _host(incident: Incident, found: Figures) -> list[Suggestion]:
    chosen = []
    if incident.facts.get("dtype") in ("float64", "f8", "double"):
        half = (
            ""
            if found.requested is None
            else f": {format_size(found.requested // 2)} in place of {format_size(found.requested)}"
        )
        why = f"half the bytes{half}, and Keras computes in float32 anyway"
        chosen.append(Suggestion("Make the array float32", why, 'x = numpy.empty(shape, dtype="float32")'))
    chosen.append(_stream(incident, found))
    if incident.what == "slurm":
        limit = "" if found.limit is None else f" more than {format_size(found.limit)}"
        chosen.append(
            Suggestion(
                "Ask Slurm for more memory",
                f"the job was held to its limit{limit and f'; ask for{limit}'}",
                f"#SBATCH --mem={64 if found.limit is None else -(-found.limit * 3 // 2**31)}G",  # half as much again
            )
        )
    elif incident.what in ("cgroup", "container"):
        limit = "the container" if found.limit is None else f"the container, held to {format_size(found.limit)},"
        code = "resources: {limits: {memory: 32Gi}}   # Kubernetes; docker run --memory 32g"
        chosen.append(
            Suggestion("Raise the container's limit", f"{limit} was killed at it, whatever the machine has", code)
        )
    elif incident.what == "killed":
        code = "sudo dmesg -T | grep -i -E 'out of memory|oom'"
        chosen.append(Suggestion("Ask the kernel why", "it logs each process that it kills for want of memory", code))
    code = 'with kerasmem.track("load data"):\n    x, y = load_data()'
    chosen.append(
        Suggestion("Find the step that takes it", "what was kept after each action is told at the program's end", code)
    )
    return chosen


def _pytorch(incident: Incident, found: Figures) -> list[Suggestion]:
    chosen = []
    if found.cause == "other process":
        chosen.append(_processes(found))
    if found.cause == "fragmentation":
        name = "PYTORCH_HIP_ALLOC_CONF" if incident.facts.get("platform") == "HIP" else "PYTORCH_CUDA_ALLOC_CONF"
        spare = (
            ""
            if found.reserved is None or found.in_use is None
            else f"{format_size(found.reserved - found.in_use)} are "
        )
        why = (
            f"{spare}reserved and not handed out, in pieces that are too small"
            if spare
            else "enough is free, in pieces that are too small"
        )
        chosen.append(
            Suggestion("Let the allocator grow its pieces", why, f"{name}=expandable_segments:True python train.py")
        )
    chosen.append(_smaller(found, None))
    chosen.append(_mixed(tpu=False))
    if found.cause not in ("other process", "fragmentation"):
        chosen.append(_processes(found))
    return chosen


def _smaller(found: Figures, batch: int | None) -> Suggestion:
    device = str(found.limit) if found.limit else '"16GB"'  # the second is the user's to set
    ask = f"kerasmem.max_batch_size(model, device={device}).largest   # the largest that fits"
    if batch is None:
        return Suggestion(
            "Train with a smaller batch", "activations shrink with it; the estimator tells which fits", ask
        )
    smaller = smaller_batch(batch, found)
    if smaller >= batch or batch < 2:
        return Suggestion(
            "See what takes the memory",
            "the batch cannot be much smaller",
            "print(kerasmem.estimate(model, batch_size=1).bytes)",
        )
    tensor = ""
    if found.requested:
        then = format_size(found.requested * smaller // batch)
        tensor = f"; this tensor is then {then}, not {format_size(found.requested)}"
    return Suggestion(
        f"Train with batches of {smaller} in place of {batch}",
        f"activations shrink with the batch{tensor}",
        f"model.fit(x, y, batch_size={smaller})\n{ask}",
    )


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
    half = (
        ""
        if not found.requested
        else f": {format_size(found.requested // 2)} in place of {format_size(found.requested)}"
    )
    return Suggestion("Feed float32, not float64", f"half the bytes{half}", 'x = x.astype("float32")')


def _leaner() -> Suggestion:
    why = "it ran out while updating the weights: Adam keeps two more values for each, SGD with momentum one"
    return Suggestion(
        "Use an optimizer that keeps less", why, "model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=loss)"
    )


def _uncompiled() -> Suggestion:
    why = "a compiled step takes its temporary memory in one piece; without XLA the pieces are smaller"
    return Suggestion("Try the step without XLA", why, "model.compile(optimizer, loss, jit_compile=False)")


def _pieces(batch: int | None) -> Suggestion:
    size = "" if batch is None else f", batch_size={batch}"
    return Suggestion(
        "Keep the batch and take it in pieces",
        "a step that runs out is taken again in micro-batches whose gradients are added up: one update, as before",
        f"kerasmem.fit(model, x, y{size})   # the arguments of model.fit",
    )


def _recompute() -> Suggestion:
    return Suggestion(
        "Compute activations again in the backward pass",
        "the batch cannot be divided; a step then keeps what crosses a few cuts, for at most a third more arithmetic",
        "model = kerasmem.recompute(model)",
    )


def _advice(found: Figures, batch: int | None) -> Suggestion:
    device = str(found.limit) if found.limit else '"16GB"'  # the second is the user's to set
    size = "" if batch is None else f", batch_size={batch}"
    return Suggestion(
        "See what saves how much",
        "each remedy estimated on the changed model, and what fits together, with a script",
        f"kerasmem.advise(model, device={device}{size}).remedies",
    )


def _watch() -> Suggestion:
    why = "the log shows what is in use, step by step, and what was live at the peak"
    return Suggestion("Watch memory grow", why, 'model.fit(x, y, callbacks=[kerasmem.MemoryLogger("run.jsonl")])')


def _stream(incident: Incident, found: Figures) -> Suggestion:
    whole = (
        "the data"
        if found.requested is None or incident.what not in ("array", "copy")
        else f"{format_size(found.requested)}"
    )
    code = 'model.fit(kerasmem.H5ChunkSequence("data.h5", batch_size=32))'
    return Suggestion("Stream the data from HDF5", f"a few chunks are in memory at a time, never {whole} at once", code)
