"""Single remedies, chosen by the model and estimated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kerasmem.errors import KerasmemError
from kerasmem.estimation.report import FITS, SPREAD, Bytes
from kerasmem.estimation.sizing import max_batch_size
from kerasmem.models.backend import runs_on_jax
from kerasmem.recovery.advice import Considered, Remedy
from kerasmem.recovery.changed_model import LORA_RANK, is_loaded
from kerasmem.recovery.changes import OPTIMIZERS, Change, Traits, code_of, ordered, worst_result
from kerasmem.recovery.estimator import Need, OutOfTimeError, StepEstimator
from kerasmem.units import format_size

# Identical steps differ by so much of their peak, of which a smaller saving cannot be told.
_NOISE, _NOISE_OF_PLAN = SPREAD["graph"], SPREAD["xla"]
_ESTIMATES_OF_A_SEARCH = 5  # about as many sizes are asked for the largest batch
_SLOW_FLOAT16 = (7, 0)  # the first compute capability with Tensor Cores
_HAS_BFLOAT16 = (8, 0)
_ON_TENSORFLOW = ("jit_compile", "micro_batches", "replicas")
_GPU_KERNELS = (
    "half precision was estimated with this machine's kernels, which convert to float32 and back; for the "
    "card's own: pip install 'kerasmem[gpu-targets]'"
)


@dataclass
class RemedySearch:
    """Estimates every single remedy that the model allows, the cheapest to estimate first.

    Attributes:
        estimator: of the step, whose step as it is was estimated.
        traits: of the model.
        remedies: that save memory.
        changes: all that were estimated and save memory, for combinations.
        considered: what is not offered.
        notes: for the reader.
    """

    estimator: StepEstimator
    traits: Traits = field(init=False)
    remedies: list[Remedy] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    considered: list[Considered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _largest_batch: int | None = None  # that fits, where the whole one does not

    def run(self) -> None:
        """Estimate them all."""
        estimator = self.estimator
        if estimator.method == "formula":
            self._reject("all but the batch", "the formula, which answers here, knows nothing else")
            self._batches()
            return
        for change in self._candidates():
            self._try(change)
        is_half_rejected = any(each.name.startswith("half precision") for each in self.considered)
        if is_half_rejected and estimator.target.source == "catalogue" and estimator.method != "gpu-target":
            self.notes.append(_GPU_KERNELS)

    def _reject(self, name: str, why: str) -> None:
        self.considered.append(Considered(name, why))

    def _candidates(self) -> Iterator[Change]:
        """Yield changes worth an estimate; the others are put among the considered.

        What takes one estimate comes first, then what takes several, a plan of cuts or another compilation, so that a
        time that is too short leaves out few.
        """
        is_training = self.estimator.mode == "train"
        yield from self._half_precision()
        if is_training:
            yield from self._optimizers()
            yield from self._fewer_trained()
        self._batches()
        if is_training:
            self._micro_batches()
            yield self.traits.change("recompute", "auto")
            self._replicas()
        yield self.traits.change("jit_compile", self.estimator.current.settings.execution != "xla")

    def _half_precision(self) -> Iterator[Change]:
        """Yield the policy for the card: bfloat16 if it has that, since it needs no loss scaling."""
        policy, target = self.estimator.current.settings.dtype_policy, self.estimator.target
        if policy != "float32":
            self._reject("half precision", f"most layers compute in {policy} already")
            return
        capability = target.compute_capability or _SLOW_FLOAT16
        kind = "mixed_bfloat16" if capability >= _HAS_BFLOAT16 else "mixed_float16"
        change = self.traits.change("dtype_policy", kind)
        if capability < _SLOW_FLOAT16:
            slow = "compute capability {}.{} has no Tensor Cores: float16 saves memory, not time, or is slower"
            change = replace(change, cost=slow.format(*capability))
        yield change

    def _optimizers(self) -> Iterator[Change]:
        current = self.estimator.current
        own = current.settings.optimizer or "adam"
        kept, weights = current.bytes.optimizer or 0, current.bytes.weights or 1
        if self.traits.has_own_step:
            self._reject("a leaner optimizer", "the model has a training step of its own, which may hold others")
        elif current.bytes.optimizer is not None and kept < _NOISE_OF_PLAN * weights:
            self._reject("a leaner optimizer", f"{own} keeps next to nothing already")
        else:
            for name in OPTIMIZERS:
                if name.split("_")[0] != own or name == "sgd":
                    yield self.traits.change("optimizer", name)

    def _fewer_trained(self) -> Iterator[Change]:
        if not self.traits.head_start:
            self._reject("frozen backbone and LoRA", "there are no weights before the last layer that has some")
            return
        yield self.traits.change("freeze", True)
        if self.traits.can_lora:
            yield self.traits.change("lora", LORA_RANK)
        else:
            self._reject("LoRA", f"no kernel of the backbone is larger than its factors of rank {LORA_RANK} would be")

    def _batches(self) -> None:
        """Try the largest batch that fits; half of the batch if the whole one fits."""
        estimator, now, name = self.estimator, self.estimator.batch_size, "a smaller batch"
        if now == 1:
            self._reject(name, "it is 1 already")
            return
        if estimator.fits_now:
            self._try(self.traits.change("batch_size", now // 2))
            return
        if not estimator.has_time(_ESTIMATES_OF_A_SEARCH):
            self._reject(name, "there was no time for the search")
            return
        spec = replace(estimator.origin, **estimator.step_options(), method=estimator.method)
        try:
            search = max_batch_size(spec.model, **spec.settings(), maximum=now - 1, margin=estimator.margin)
        except KerasmemError as error:
            self._reject(name, str(error))
            return
        stands_in = search.report.settings.stands_in
        for each in search.evaluations:
            need = Bytes(each.total, each.low, each.high, *[None] * 7)
            if each.size == search.report.settings.batch_size:
                need = search.report.bytes
            estimator.add([self.traits.change("batch_size", each.size)], need, estimator.method, stands_in)
        self._largest_batch = max((each.size for each in search.evaluations if each.verdict == FITS), default=1)
        smallest = search.evaluations[0].size
        self._try(self.traits.change("batch_size", smallest if search.largest is None else search.largest))

    def _micro_batches(self) -> None:
        """Try the fewest micro-batches that fit, in powers of two; two if the whole batch fits."""
        now = self.estimator.batch_size
        largest = self._largest_batch or now
        sizes = [min(2**power, now) for power in range(1, (now - 1).bit_length() + 1)]
        self._try_sizes("micro_batches", [size for size in sizes if size * largest >= now])

    def _replicas(self) -> None:
        """Try the fewest cards that fit, in powers of two; two if one is enough."""
        self._try_sizes("replicas", [cards for cards in (2, 4, 8) if cards <= self.estimator.batch_size])

    def _try_sizes(self, kind: str, sizes: list[int]) -> None:
        """Try sizes until one fits; only the first if the step as it is fits."""
        for size in sizes:
            verdict = self._try(self.traits.change(kind, size), is_last=size == sizes[-1])
            if verdict in (None, FITS) or self.estimator.fits_now:
                return

    def _try(self, change: Change, is_last: bool = True) -> str | None:
        """Estimate a change, and offer it if it saves memory and decides among sizes of its kind.

        Returns:
            The verdict with the change, or None without an estimate.
        """
        if change.kind in _ON_TENSORFLOW and runs_on_jax():
            self._reject(change.name, "estimated and written for TensorFlow alone, and Keras runs on JAX")
            return None
        try:
            need = self.estimator.estimate([change])
            before = self.estimator.baseline([change])
        except KerasmemError as error:
            out_of_time = isinstance(error, OutOfTimeError)
            self._reject(change.name, str(error) if out_of_time else f"it cannot be estimated: {error}")
            return None
        saving = before.bytes.total - need.bytes.total
        noise = _NOISE_OF_PLAN if need.method in ("xla", "gpu-target") else _NOISE
        if saving < noise * before.bytes.total:
            if is_last:
                self._reject(change.name, f"by the estimate ({need.method}) it {_too_little(saving)}")
            return need.verdict
        self.changes.append(change)
        if is_last or FITS in (before.verdict, need.verdict):
            self.remedies.append(self.remedy([change], need))
        return need.verdict

    def remedy(self, changes: Iterable[Change], need: Need) -> Remedy:
        """Make a remedy of some changes and their need."""
        made = ordered(changes)
        before = self.estimator.baseline(made).bytes.total
        name, result = " + ".join(each.name for each in made), worst_result(made)
        return Remedy(
            name=name,
            changes=tuple(each.to_data() for each in made),
            result=result,
            cost="; ".join(each.cost if len(made) == 1 else f"{each.name}: {each.cost}" for each in made),
            compute=math.prod(each.compute for each in made),
            total=need.bytes.total,
            low=need.bytes.low,
            high=need.bytes.most_needed,
            before=before,
            verdict=need.verdict,
            method=need.method,
            code=code_of(made, self.traits, self.estimator.mode, is_loaded=is_loaded(self.estimator.origin)),
            stands_in=need.stands_in,
        )


def _too_little(saving: int) -> str:
    if saving < 0:
        return f"takes {format_size(-saving)} more"
    return f"saves {format_size(saving)}, within the variation of identical steps"
