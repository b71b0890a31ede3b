"""Estimates of single remedies that the model allows."""

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
from kerasmem.recovery.changes import OPTIMIZERS, Change, Traits, code_of, order_changes, worst_result
from kerasmem.recovery.estimator import Need, OutOfTimeError, StepEstimator
from kerasmem.units import format_size

# Variation of identical steps, relative to the peak. Smaller savings are not offered.
_NOISE, _NOISE_OF_PLAN = SPREAD["graph"], SPREAD["xla"]
_ESTIMATES_OF_A_SEARCH = 5  # approximate number of sizes in a search of the largest batch
_SLOW_FLOAT16 = (7, 0)  # the first compute capability with Tensor Cores
_HAS_BFLOAT16 = (8, 0)
_ON_TENSORFLOW = ("jit_compile", "micro_batches", "replicas")
_GPU_KERNELS = (
    "half precision was estimated with this machine's kernels, which convert to float32 and back; to use the "
    "card's kernels: pip install 'kerasmem[gpu-targets]'"
)


@dataclass
class RemedySearch:
    """Estimates every single remedy that the model allows, the fastest estimates first.

    Attributes:
        estimator: estimator that has estimated the current step.
        traits: properties of the model.
        remedies: remedies that save memory.
        changes: all estimated changes that save memory, for combinations.
        considered: remedies that are not offered.
        notes: remarks for the reader.
    """

    estimator: StepEstimator
    traits: Traits = field(init=False)
    remedies: list[Remedy] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    considered: list[Considered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _largest_batch: int | None = None  # that fits, if the current one does not

    def run(self) -> None:
        """Estimate all remedies."""
        estimator = self.estimator
        if estimator.method == "formula":
            self._reject("remedies other than the batch", "the formula method cannot estimate them")
            self._batches()
            return
        for change in self._candidates():
            self._try(change)
        is_half_rejected = any(rejected.name.startswith("half precision") for rejected in self.considered)
        if is_half_rejected and estimator.target.source == "catalogue" and estimator.method != "gpu-target":
            self.notes.append(_GPU_KERNELS)

    def _reject(self, name: str, why: str) -> None:
        self.considered.append(Considered(name, why))

    def _candidates(self) -> Iterator[Change]:
        """Yield changes worth an estimate, and reject the others.

        Changes that need one estimate come first, then those that need several, a plan of cuts or another compilation.
        So a short time limit omits few.
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
        """Yield the policy for the card: bfloat16 if supported, as it needs no loss scaling."""
        policy, target = self.estimator.current.settings.dtype_policy, self.estimator.target
        if policy != "float32":
            self._reject("half precision", f"most layers already compute in {policy}")
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
        optimizer = current.settings.optimizer or "adam"
        slots, weights = current.bytes.optimizer or 0, current.bytes.weights or 1
        if self.traits.has_own_step:
            self._reject("a leaner optimizer", "the model's custom training step may have other optimizers")
        elif current.bytes.optimizer is not None and slots < _NOISE_OF_PLAN * weights:
            self._reject("a leaner optimizer", f"{optimizer} already keeps almost nothing")
        else:
            for name in OPTIMIZERS:
                if name.split("_")[0] != optimizer or name == "sgd":
                    yield self.traits.change("optimizer", name)

    def _fewer_trained(self) -> Iterator[Change]:
        if not self.traits.head_start:
            self._reject("frozen backbone and LoRA", "no layer before the last layer with weights has weights")
            return
        yield self.traits.change("freeze", True)
        if self.traits.can_lora:
            yield self.traits.change("lora", LORA_RANK)
        else:
            self._reject("LoRA", f"no kernel of the backbone is larger than factors of rank {LORA_RANK}")

    def _batches(self) -> None:
        """Try the largest batch that fits, or half the batch if the whole one fits."""
        estimator, now, name = self.estimator, self.estimator.batch_size, "a smaller batch"
        if now == 1:
            self._reject(name, "the batch size is already 1")
            return
        if estimator.fits_now:
            self._try(self.traits.change("batch_size", now // 2))
            return
        if not estimator.has_time(_ESTIMATES_OF_A_SEARCH):
            self._reject(name, "not searched, as the time limit has passed")
            return
        spec = replace(estimator.origin, **estimator.step_options(), method=estimator.method)
        try:
            search = max_batch_size(spec.model, **spec.settings(), maximum=now - 1, margin=estimator.margin)
        except KerasmemError as error:
            self._reject(name, str(error))
            return
        stands_in = search.report.settings.stands_in
        for tried in search.evaluations:
            need = Bytes(tried.total, tried.low, tried.high, *[None] * 7)
            if tried.size == search.report.settings.batch_size:
                need = search.report.bytes
            estimator.add([self.traits.change("batch_size", tried.size)], need, estimator.method, stands_in)
        self._largest_batch = max((tried.size for tried in search.evaluations if tried.verdict == FITS), default=1)
        smallest = search.evaluations[0].size
        self._try(self.traits.change("batch_size", smallest if search.largest is None else search.largest))

    def _micro_batches(self) -> None:
        """Try the fewest micro-batches that fit, in powers of two, or two if the whole batch fits."""
        now = self.estimator.batch_size
        largest = self._largest_batch or now
        sizes = [min(2**power, now) for power in range(1, (now - 1).bit_length() + 1)]
        self._try_sizes("micro_batches", [size for size in sizes if size * largest >= now])

    def _replicas(self) -> None:
        """Try the fewest cards that fit, in powers of two, or two if one is enough."""
        self._try_sizes("replicas", [cards for cards in (2, 4, 8) if cards <= self.estimator.batch_size])

    def _try_sizes(self, kind: str, sizes: list[int]) -> None:
        """Try sizes until one fits, or only the first if the current step fits."""
        for size in sizes:
            verdict = self._try(self.traits.change(kind, size), is_last=size == sizes[-1])
            if verdict in (None, FITS) or self.estimator.fits_now:
                return

    def _try(self, change: Change, is_last: bool = True) -> str | None:
        """Estimate a change, and offer it if it saves memory and is the last or first fitting size of its kind.

        Returns:
            The verdict with the change, or None without an estimate.
        """
        if change.kind in _ON_TENSORFLOW and runs_on_jax():
            self._reject(change.name, "only available on TensorFlow, and Keras runs on JAX")
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
        """Return the remedy of changes and their need."""
        in_order = order_changes(changes)
        before = self.estimator.baseline(in_order).bytes.total
        costs = [change.cost if len(in_order) == 1 else f"{change.name}: {change.cost}" for change in in_order]
        return Remedy(
            name=" + ".join(change.name for change in in_order),
            changes=tuple(change.to_data() for change in in_order),
            result=worst_result(in_order),
            cost="; ".join(costs),
            compute=math.prod(change.compute for change in in_order),
            total=need.bytes.total,
            low=need.bytes.low,
            high=need.bytes.most_needed,
            before=before,
            verdict=need.verdict,
            method=need.method,
            code=code_of(in_order, self.traits, self.estimator.mode, is_loaded=is_loaded(self.estimator.origin)),
            stands_in=need.stands_in,
        )


def _too_little(saving: int) -> str:
    if saving < 0:
        return f"needs {format_size(-saving)} more"
    return f"saves {format_size(saving)}, within the variation of identical steps"
