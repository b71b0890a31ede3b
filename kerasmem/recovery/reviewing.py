"""One remedy after the other: which are worth a question to the estimator, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kerasmem.devices.catalogue import find_card
from kerasmem.errors import KerasmemError
from kerasmem.estimation.outcome import SPREAD
from kerasmem.estimation.report import Bytes
from kerasmem.estimation.sizing import max_batch_size
from kerasmem.estimation.verdict import FITS
from kerasmem.recovery.advice import Considered, Remedy
from kerasmem.recovery.asking import Asker, Need, OutOfTimeError
from kerasmem.recovery.changes import OPTIMIZERS, Change, ordered, worst_result
from kerasmem.recovery.inspecting import LORA_RANK, Facts
from kerasmem.recovery.script import script
from kerasmem.units import format_size

MOST_REPLICAS = 8
# Where steps race, identical ones differ by so much of their peak; a saving within that cannot be told from noise.
LEAST_SAVING = SPREAD["graph"]
LEAST_EXACT = SPREAD["xla"]  # and so much where the plan is exact
_EXACT = ("xla", "gpu-target")
_QUESTIONS_OF_A_SEARCH = 5  # about as many sizes are asked for the largest batch
_SLOW_FLOAT16 = (7, 0)  # the first compute capability with Tensor Cores
_HAS_BFLOAT16 = (8, 0)

_HOST_EMBEDDING = Considered(
    "embedding on the host",
    "the estimate is of one device; what crosses between host and card in a step is not modelled",
)


@dataclass
class Review:
    """What came of it.

    Attributes:
        remedies: that save memory.
        changes: the change behind each remedy and what it needs, for combinations; all that were asked.
        considered: what is not offered.
        notes: for the reader.
        batches: sizes of the batch that were asked, and whether they fit.
    """

    remedies: list[Remedy] = field(default_factory=list)
    changes: list[tuple[Change, Need]] = field(default_factory=list)
    considered: list[Considered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    batches: dict[int, bool] = field(default_factory=dict)


def review(asker: Asker, facts: Facts) -> Review:
    """Ask about every single remedy that the model allows, the least harmful first."""
    found = Review()
    base = asker.base
    assert base is not None
    if base.settings.method == "formula":
        found.considered.append(Considered("all but the batch", "the formula, which answers here, knows nothing else"))
        _batches(asker, facts, found)
        return found
    for each in _candidates(asker, facts, found):
        _try(asker, facts, found, each)
    if asker.mode == "train":
        if facts.has_embedding:
            found.considered.append(_HOST_EMBEDDING)
        if any(name == "half precision" for name in (each.name.split(" (")[0] for each in found.considered)) and (
            asker.target.source == "catalogue" and asker.method != "gpu-target"
        ):
            found.notes.append(
                "half precision was estimated with this machine's kernels, which convert to float32 and back; for the "
                "card's own: pip install 'kerasmem[gpu-targets]'"
            )
    return found


def remedy(asker: Asker, facts: Facts, changes: tuple[Change, ...], need: Need) -> Remedy:
    """Return some changes and what they need as a remedy."""
    made = ordered(changes)
    before = asker.without(made).bytes.total
    name = " + ".join(each.name for each in made)
    compute = 1.0
    for each in made:
        compute *= each.compute
    ends = "" if need.bytes.low is None or need.bytes.high is None else (
        f" ({format_size(need.bytes.low)} to {format_size(need.bytes.high)})"
    )  # fmt: skip
    heading = (
        f"{name[:1].upper()}{name[1:]}: {worst_result(made)}.\n"
        f"Predicted peak {format_size(need.bytes.total)}{ends}, now {format_size(before)}."
    )
    return Remedy(
        name=name,
        changes=tuple(each.to_dict() for each in made),
        result=worst_result(made),
        cost="; ".join(each.cost if len(made) == 1 else f"{each.name}: {each.cost}" for each in made),
        compute=compute,
        total=need.bytes.total,
        low=need.bytes.low,
        high=need.bytes.high,
        before=before,
        verdict=need.verdict,
        method=need.method,
        code=script(facts.parts, made, heading),
    )


def _candidates(asker: Asker, facts: Facts, found: Review) -> Iterator[Change]:
    """Yield changes worth a question; what is not is put among the considered."""

    def no(name: str, why: str) -> None:
        found.considered.append(Considered(name, why))

    trains = asker.mode == "train"
    base = asker.base
    assert base is not None
    yield from _execution(asker, facts, found)
    if facts.is_double:
        if facts.is_graph:
            yield facts.change("float32", True)
        else:
            no("float32 in place of float64", "Keras cannot build this model anew from its layers")
    if trains:
        yield from _recomputation(facts, no)
    _batches(asker, facts, found)
    if trains:
        _micro_batches(asker, facts, found)
    if base.settings.dtype_policy == "float32":
        yield _precision(asker, facts)
    else:
        no("half precision", f"most layers compute in {base.settings.dtype_policy} already")
    if trains:
        yield from _optimizers(asker, facts, no)
        yield from _fewer_trained(facts, no)
    if facts.smaller_inputs:
        yield facts.change("input_size", facts.smaller_inputs)
    else:
        no("smaller input", facts.why_not_smaller)
    if facts.has_mixing and facts.is_graph:
        yield facts.change("separable", True)
    elif facts.has_mixing:
        no("separable convolutions", "Keras cannot build this model anew from its layers")
    if trains:
        _replicas(asker, facts, found)


def _execution(asker: Asker, facts: Facts, found: Review) -> Iterator[Change]:
    base = asker.base
    assert base is not None
    other = facts.change("jit_compile", base.settings.execution != "xla")
    for each in base.alternatives:
        if each.execution != base.settings.execution and each.total is not None:  # asked along with the step as it is
            need = Bytes(each.total, each.low, each.high, *[None] * 7)
            asker.tell([other], need, asker.method_for([other]))
    yield other


def _precision(asker: Asker, facts: Facts) -> Change:
    """Return the policy that suits the card: bfloat16 needs no loss scaling, where the card has it."""
    if asker.target.source != "catalogue":
        return facts.change("dtype_policy", "mixed_float16")
    capability = find_card(asker.target.name).compute_capability
    if capability >= _HAS_BFLOAT16:
        return facts.change("dtype_policy", "mixed_bfloat16")
    made = facts.change("dtype_policy", "mixed_float16")
    if capability >= _SLOW_FLOAT16:
        return made
    version = "{}.{}".format(*capability)
    slow = f"compute capability {version} has no Tensor Cores: float16 saves memory, not time, or is slower"
    return Change(made.kind, made.value, made.name, made.result, slow, made.compute, made.steps)


def _recomputation(facts: Facts, no: Any) -> Iterator[Change]:
    if not facts.is_graph:
        no("recomputation", "the model is not a graph of layers that can be cut into segments")
        return
    yield facts.change("recompute", "auto")


def _optimizers(asker: Asker, facts: Facts, no: Any) -> Iterator[Change]:
    base = asker.base
    assert base is not None
    own = base.settings.optimizer or "adam"
    kept, weights = base.bytes.optimizer or 0, base.bytes.weights or 1
    if facts.has_own_step:
        no("a leaner optimizer", "the model has a training step of its own, which may hold others")
    elif base.bytes.optimizer is not None and kept < LEAST_EXACT * weights:
        no("a leaner optimizer", f"{own} keeps next to nothing already")
    else:
        for name in OPTIMIZERS:
            if name.split("_")[0] != own or name == "sgd":
                yield facts.change("optimizer", name)


def _fewer_trained(facts: Facts, no: Any) -> Iterator[Change]:
    if not facts.head_start:
        no("frozen backbone and LoRA", "there are no weights before the last layer that has some")
        return
    yield facts.change("freeze", True)
    if facts.can_lora:
        yield facts.change("lora", LORA_RANK)
    else:
        no("LoRA", f"no kernel of the backbone is larger than its factors of rank {LORA_RANK} would be")


def _batches(asker: Asker, facts: Facts, found: Review) -> None:
    """The largest batch that fits; half of it where the whole one does."""
    base, now = asker.base, asker.batch_size
    assert base is not None
    name = "a smaller batch"
    if now == 1:
        found.considered.append(Considered(name, "it is 1 already"))
        return
    if base.device is not None and base.device.verdict == FITS:
        _try(asker, facts, found, facts.change("batch_size", now // 2))
        return
    if not asker.has_time(_QUESTIONS_OF_A_SEARCH):
        found.considered.append(Considered(name, "there was no time for the search"))
        return
    settings = asker.settings()
    settings.pop("batch_size")
    try:
        search = max_batch_size(
            asker.origin.source, **settings, method=asker.method, maximum=now - 1, cache=asker.cache
        )
    except KerasmemError as error:
        found.considered.append(Considered(name, str(error)))
        return
    for each in search.evaluations:
        need = Bytes(each.total, each.low, each.high, *[None] * 7)
        change = facts.change("batch_size", each.size)
        asker.tell([change], search.report.bytes if each.size == search.report.settings.batch_size else need,
                   asker.method)  # fmt: skip
        found.batches[each.size] = each.verdict == FITS
    smallest = search.evaluations[0].size
    _try(asker, facts, found, facts.change("batch_size", smallest if search.largest is None else search.largest))


def _micro_batches(asker: Asker, facts: Facts, found: Review) -> None:
    """The fewest micro-batches that fit, counted in powers of two; two where the whole batch fits."""
    base, now = asker.base, asker.batch_size
    assert base is not None
    if now < 2:
        found.considered.append(Considered("micro-batches", "a batch of 1 cannot be divided"))
        return
    pieces = 2
    if found.batches:  # a piece must be no larger than the largest batch that fits
        largest = max((size for size, fits in found.batches.items() if fits), default=1)
        while pieces * largest < now:
            pieces *= 2
    while True:
        made = facts.change("micro_batches", min(pieces, now))
        need = _try(asker, facts, found, made, is_last=pieces >= now)
        if need is None or need.verdict == FITS or pieces >= now:
            return
        if base.device is not None and base.device.verdict == FITS:
            return
        pieces *= 2


def _replicas(asker: Asker, facts: Facts, found: Review) -> None:
    """The fewest cards that fit, counted in powers of two; two where one is enough."""
    base, now = asker.base, asker.batch_size
    assert base is not None
    cards = 2
    while cards <= min(MOST_REPLICAS, now):
        last = cards * 2 > min(MOST_REPLICAS, now)
        need = _try(asker, facts, found, facts.change("replicas", cards), is_last=last)
        if need is None or need.verdict == FITS or (base.device is not None and base.device.verdict == FITS):
            return
        cards *= 2


def _try(asker: Asker, facts: Facts, found: Review, made: Change, is_last: bool = True) -> Need | None:
    """Ask about a change; offer it where it saves something and, of several sizes of it, is the one that counts."""
    try:
        need = asker.ask([made])
        before = asker.without([made])
    except OutOfTimeError as error:
        found.considered.append(Considered(made.name, str(error)))
        return None
    except KerasmemError as error:
        found.considered.append(Considered(made.name, f"it cannot be estimated: {error}"))
        return None
    saving = before.bytes.total - need.bytes.total
    if saving < (LEAST_EXACT if need.method in _EXACT else LEAST_SAVING) * before.bytes.total:
        words = f"takes {format_size(-saving)} more"
        if saving >= 0:
            words = (
                f"saves {format_size(saving)}, less than identical steps may differ by" if saving else "saves nothing"
            )
        if is_last:
            found.considered.append(Considered(made.name, f"by the estimate ({need.method}) it {words}"))
        return need
    found.changes.append((made, need))
    fits_now = before.verdict == FITS
    if is_last or fits_now or need.verdict == FITS:
        found.remedies.append(remedy(asker, facts, (made,), need))
    return need
