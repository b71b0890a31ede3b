"""Known memory before and after a step, by address: variables, batch, constants."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

from kerasmem.compat.gradients import living_objects
from kerasmem.models.own_step import variables_of
from kerasmem.profiling.replaying import KnownTensor

# A managed tensor of DLPack begins with the address of its data.
_CAPSULE_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_CAPSULE_POINTER.restype = ctypes.c_void_p
_CAPSULE_POINTER.argtypes = [ctypes.py_object, ctypes.c_char_p]


def address_of(tensor: Any) -> int | None:
    """Return the address of an eager tensor's data on any device, or None if unknown.

    DLPack hands out the buffer itself, without a copy.
    """
    import tensorflow as tf

    try:
        capsule = tf.experimental.dlpack.to_dlpack(tensor)
        managed = _CAPSULE_POINTER(capsule, b"dltensor")
        address = ctypes.cast(managed, ctypes.POINTER(ctypes.c_void_p))[0]
    except Exception:  # a dtype or a tensor that DLPack does not know
        return None
    return int(address) if address else None


def known_tensor(tensor: Any, kind: str, name: str, layer: tuple[str, ...] = ()) -> KnownTensor | None:
    """Describe an eager tensor, or return None if its address is unknown."""
    address = address_of(tensor)
    if address is None:
        return None
    elements = int(tensor.shape.num_elements() or 0)
    shape = "[" + ",".join(str(size) for size in tensor.shape) + "]"
    return KnownTensor(address, elements * (tensor.dtype.size or 0), kind, name, layer, shape)


def known_tensors(tensors: Iterable[Any], kind: str, name: str) -> list[KnownTensor]:
    """Describe the eager tensors among some objects."""
    described = (known_tensor(tensor, kind, name) for tensor in tensors if _is_eager(tensor))
    return [tensor for tensor in described if tensor is not None]


def tensors_of_model(model: Any, owners: Mapping[int, tuple[str, ...]]) -> list[KnownTensor]:
    """Describe the variables of a model, its metrics and its optimizers.

    Args:
        model: a Keras model whose variables have values.
        owners: id of a variable → names of the layer that made it.
    """
    described = []
    for variable, kind in variables_of(model).values():
        value: Any = variable.value
        if not hasattr(value, "read_value"):  # it has no value yet
            continue
        held = known_tensor(value.read_value(), kind, variable.path, owners.get(id(variable), ()))
        if held is not None:
            described.append(held)
    return described


def tensors_of_python() -> list[KnownTensor]:
    """Describe tensors that Python objects keep: constants of a step, a data set, stored results."""
    tensors = (value for value in living_objects() if _is_eager(value))
    return known_tensors((tensor for tensor in tensors if tensor.dtype.size), "constant", "a tensor kept in Python")


def _is_eager(value: Any) -> bool:
    import tensorflow as tf

    return type(value).__name__ == "EagerTensor" and tf.is_tensor(value)
