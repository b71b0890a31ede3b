"""The eager method: the step of Keras on PyTorch, run operation by operation on fake tensors and added up.

Fake tensors have shapes, dtypes and a place, and no memory. Keras's own step runs on them, with PyTorch's autograd and
the optimizer; what every operation puts out counts from then on until nothing refers to it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from kerasmem.compat.keras_variables import raw_value, stand_ins_for
from kerasmem.compat.torch_modes import address, dispatch_mode, fake_tensor_mode, is_unshared, tensors_of
from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.errors import KerasmemError, ModelError
from kerasmem.estimation.compiled.planned import instant_of, row_of
from kerasmem.estimation.report import Outcome, Pool, Shares, Unmodelled
from kerasmem.estimation.tracing import Step
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.op_names import CATEGORIES
from kerasmem.models.symbolic_step import SymbolicStep, symbolic_step

_CUDA_GRAIN = 512  # bytes; what PyTorch's caching allocator rounds a request up to
# Kernels of a CPU that may copy what they take and give into a layout of their own, or blocks of it, while they run.
_COPYING = (
    "aten.convolution", "aten.max_pool", "aten.avg_pool", "aten._adaptive_avg_pool", "aten._scaled_dot_product",
)  # fmt: skip
_SUM = "aten.add.Tensor"
_VALUE = "aten._local_scalar_dense.default"


@dataclass(frozen=True, eq=False)
class _Held:
    """One block of memory: its bytes, its category, and the operation, phase and layer that asked for it."""

    bytes: int
    category: str
    operation: str | None = None
    phase: str | None = None
    layer: str | None = None


_Peak = tuple[int, list[_Held]]  # bytes, and the blocks that are held then, the newest last


class _Ledger:
    """The blocks that are held, and how that changes while a step runs.

    Args:
        grain: bytes that a block is rounded up to.
    """

    def __init__(self, grain: int) -> None:
        self._grain = grain
        self._held: dict[int, _Held] = {}  # by the address of what holds it
        self.before: tuple[_Held, ...] = ()
        self.changes: list[tuple[_Held, int]] = []  # +1 where it comes, -1 where it goes

    def begin(self) -> None:
        """Begin a step from what is held now."""
        self.before = tuple(self._held.values())
        self.changes.clear()

    def hold(self, tensor: Any, category: str, *asked_by: str | None) -> None:
        """Count a tensor's memory, unless another tensor has brought it.

        Args:
            tensor: a fake one.
            category: of its bytes.
            *asked_by: the operation, its phase and its layer.
        """
        storage = tensor.untyped_storage()
        place = address(storage)
        if place in self._held:
            return
        block = _Held(self._rounded(storage.nbytes()), category, *asked_by)
        self._held[place] = block
        self.changes.append((block, 1))
        weakref.finalize(storage, self._let_go, place)

    def pass_by(self, size: int, operation: str) -> None:
        """Count what an operation takes while it runs."""
        block = _Held(self._rounded(size), "scratch", operation)
        self.changes += [(block, 1), (block, -1)]

    def block_of(self, tensor: Any) -> _Held | None:
        """Return the block that a tensor lies in."""
        return self._held.get(address(tensor.untyped_storage()))

    def peak(self, with_scratch: bool = False) -> _Peak:
        """Return the most bytes that were held in the step, and the blocks then, the newest last."""
        now = sum(block.bytes for block in self.before)
        most, at = now, 0
        for number, (block, sign) in enumerate(self.changes, 1):
            if with_scratch or block.category != "scratch":
                now += sign * block.bytes
                if now > most:
                    most, at = now, number
        live = dict.fromkeys(self.before)
        for block, sign in self.changes[:at]:
            if sign > 0:
                live[block] = None
            else:
                live.pop(block, None)
        return most, [block for block in live if with_scratch or block.category != "scratch"]

    def give_up(self, tensor: Any) -> None:
        """Count a tensor's memory as gone, though the tensor is still there."""
        self._let_go(address(tensor.untyped_storage()))

    def _let_go(self, place: int) -> None:
        block = self._held.pop(place, None)
        if block is not None:
            self.changes.append((block, -1))

    def _rounded(self, size: int) -> int:
        return -(-size // self._grain) * self._grain


def eager_outcome(step: Step, target: DeviceTarget | None) -> Outcome:
    """Run the step of a model without weights on fake tensors, and return the peak of what it holds.

    Args:
        step: inside `open_step`.
        target: the device that was named, or None.

    Raises:
        ModelError: the step cannot be prepared, or asks for what fake tensors do not have; the message says why.
    """
    opened, shapes = step.opened, step.shapes
    mode = step.arguments.mode
    prepared = symbolic_step(opened.model, opened.training, shapes.structure, shapes.inputs, shapes.batch_size, mode)
    is_card = target is not None and target.source == "catalogue"
    ledger = _Ledger(_CUDA_GRAIN if is_card else 1)
    try:
        gradients, (total, live), (uncollected, _) = _run(step, prepared, ledger)
    except KerasmemError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {keras_reason(error)}"
        raise ModelError(f"model {opened.model.name!r} cannot run on PyTorch's fake tensors: {reason}") from error
    copies = 0 if is_card else ledger.peak(with_scratch=True)[0] - uncollected
    shares, rows, newest = Shares(), frozenset(step.rows), live[-1]
    for block in live:
        shares.add(block.bytes, "gradients" if block in gradients else block.category, row_of(block.layer, rows))
    instant = None
    if newest.operation is not None:
        instant = instant_of(newest.operation, row_of(newest.layer, rows), newest.phase)
        if newest.layer is None and newest.phase != "optimizer":
            instant = replace(instant, text=f"in the {newest.phase} pass, at {newest.operation}")
    return Outcome(
        "eager", "eager", total, total, max(total, uncollected + copies), Pool(total, total, None),
        shares.categories, shares.layers, instant, tuple(_unmodelled(is_card, copies)),
        (*prepared.notes, f"Keras on PyTorch, on fake tensors: {len(ledger.changes):,} blocks come and go in a step"),
    )  # fmt: skip


def _run(step: Step, prepared: SymbolicStep, ledger: _Ledger) -> tuple[set[_Held | None], _Peak, _Peak]:
    """Take steps on fake tensors.

    Keras leaves cycles of references behind that hold tensors until Python collects them: now and then, as in a
    training, or in the last of these steps not at all.

    Returns:
        The blocks of the weights' gradients; the usual peak; the peak of the step in which nothing is collected.
    """
    import torch

    keras, trains = import_keras(), step.arguments.mode == "train"
    kinds = {id(each): "optimizer" for each in prepared.variables.get("optimizer", ())}
    owners = step.shapes.inferred.owners

    def make(variable: Any) -> Any:
        value = keras.ops.zeros(tuple(variable.shape), variable.dtype)
        stand_in = torch.nn.Parameter(value, requires_grad=variable.trainable and value.is_floating_point())
        ledger.hold(stand_in, kinds.get(id(variable), "weights"), None, None, owners.get(id(variable)))
        return stand_in

    variables = [each for group in prepared.variables.values() for each in group]
    with fake_tensor_mode(), stand_ins_for(variables, make), _calls_noted(step.opened.model) as calls:
        batch = keras.tree.map_structure(lambda spec: keras.ops.zeros(spec.shape, spec.dtype), prepared.data)
        for tensor in keras.tree.flatten(batch):
            ledger.hold(tensor, "inputs")
        with _counting(ledger, calls, trains), torch.set_grad_enabled(trains):  # as Keras's trainer has it
            peaks, gradients = [], set()
            for collects in (True, True, False):
                ledger.begin()
                with _collection(collects):
                    prepared.function(batch)
                peaks.append(ledger.peak())
                trained = (raw_value(each).grad for each in prepared.variables["trainable"])
                gradients |= {ledger.block_of(each) for each in trained if each is not None}
        return gradients, peaks[1], peaks[2]


@contextlib.contextmanager
def _collection(is_on: bool) -> Iterator[None]:
    """Let Python collect cycles of references inside, or not."""
    was_on = gc.isenabled()
    gc.collect()
    (gc.enable if is_on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_on else gc.disable)()


@dataclass
class _Calls:
    """Whose operations run: the optimizer's, or the layers' that are being called, the outermost first."""

    in_optimizer: bool = False
    layers: list[str] = field(default_factory=list)

    @property
    def layer(self) -> str | None:
        """The path of the layer that is being called."""
        return "/".join(self.layers) or None


@contextlib.contextmanager
def _calls_noted(model: Any) -> Iterator[_Calls]:
    """Note calls of layers and optimizers inside, of this thread alone."""
    keras, calls, owner = import_keras(), _Calls(), threading.get_ident()
    apply, call = keras.Optimizer.apply, keras.Layer.__call__

    def noted_apply(self: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return apply(self, *arguments, **options)
        calls.in_optimizer = True
        try:
            return apply(self, *arguments, **options)
        finally:
            calls.in_optimizer = False

    def noted_call(self: Any, /, *arguments: Any, **options: Any) -> Any:
        if self is model or threading.get_ident() != owner:
            return call(self, *arguments, **options)
        calls.layers.append(str(self.name))
        try:
            return call(self, *arguments, **options)
        finally:
            calls.layers.pop()

    with (
        mock.patch.object(keras.Optimizer, "apply", noted_apply),
        mock.patch.object(keras.Layer, "__call__", noted_call),
    ):
        yield calls


def _counting(ledger: _Ledger, calls: _Calls, trains: bool) -> Any:
    """Return a mode in which what every operation puts out is counted."""
    import torch

    class Counting(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(function)
            if name == _VALUE:
                return _some_value(args[0].dtype)
            phase = "backward" if trains and not torch.is_grad_enabled() else "forward"
            if calls.in_optimizer:
                phase = "optimizer"
            if name == _SUM and phase == "backward" and is_unshared(args[0]):
                ledger.give_up(args[0])  # autograd adds up a gradient in place; of fake tensors it makes a new one
            made = function(*args, **(kwargs or {}))
            for tensor in tensors_of(made):
                ledger.hold(tensor, CATEGORIES[phase], name, phase, calls.layer)
            if name.startswith(_COPYING):
                ledger.pass_by(sum(each.nbytes for each in tensors_of((args, made))), name)
            return made

    return Counting()


def _some_value(dtype: Any) -> bool | int | float:
    """Return a number for a value that a fake tensor does not have; no shape depends on it."""
    return True if str(dtype) == "torch.bool" else 1.0 if dtype.is_floating_point else 1


def _unmodelled(is_card: bool, copies: int) -> Iterator[Unmodelled]:
    if is_card:
        yield Unmodelled("cuDNN workspace", "chosen by cuDNN for each convolution and recurrence")
        yield Unmodelled("cached blocks", "what PyTorch's caching allocator keeps beyond what is in use")
    elif copies:
        why = (
            "oneDNN copies what a convolution takes and gives into a layout of its own; in the interval, not the total"
        )
        yield Unmodelled("scratch of kernels", why, copies)
