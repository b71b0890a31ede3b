"""PyTorch's fake tensors, the mode that sees every operation, and who shares a tensor's memory."""

from __future__ import annotations

from typing import Any

from kerasmem.compat.borrowing import Borrowed

_FEATURE = "estimates where Keras runs on PyTorch"
_FAKE = Borrowed("torch._subclasses.fake_tensor", "FakeTensorMode", feature=_FEATURE)
_DISPATCH = Borrowed("torch.utils._python_dispatch", "TorchDispatchMode", feature=_FEATURE)
_USES = Borrowed("torch", "_C._storage_Use_Count", feature=_FEATURE)
_LEAVES = Borrowed("torch.utils._pytree", "tree_leaves", feature=_FEATURE, parameters=("tree",))
_BY_ITSELF = 2  # uses of a storage: its only tensor, and the object that asks


def fake_tensor_mode() -> Any:
    """Return a context in which PyTorch computes shapes, dtypes and places alone, and allocates nothing."""
    return _FAKE.get()()


def dispatch_mode() -> Any:
    """Return the class whose `__torch_dispatch__` is called in the place of every operation."""
    return _DISPATCH.get()


def tensors_of(values: Any) -> list[Any]:
    """Return the tensors in what an operation takes or gives. Keras's `tree` would hold on to them for a while."""
    import torch

    return [each for each in _LEAVES.get()(values) if isinstance(each, torch.Tensor)]


def address(storage: Any) -> int:
    """Return what tells the memory behind a tensor from all other that is in use."""
    return int(storage._cdata)


def is_unshared(tensor: Any) -> bool:
    """Return whether no other tensor, and nothing that autograd keeps, refers to the tensor's memory."""
    return bool(_USES.get()(address(tensor.untyped_storage())) == _BY_ITSELF)
