"""The same architecture under another dtype policy."""

from __future__ import annotations

from typing import Any

from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras

_DEFAULT = "float32"


def check_dtype_policy(name: str) -> None:
    """Raise UsageError unless Keras knows a policy of that name, such as "mixed_float16"."""
    keras = import_keras()
    try:
        policy = keras.dtype_policies.get(name)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"dtype policy {name!r} is not one of Keras's: float32, mixed_float16, mixed_bfloat16, …"
        ) from error
    if hasattr(policy, "quantization_mode") and policy.quantization_mode is not None:
        raise UsageError(f"dtype policy {name!r} quantises: call model.quantize(…) and give the model or its file")


def with_dtype_policy(config: dict[str, Any], policy: str) -> dict[str, Any]:
    """Return a model configuration in which every layer that has Keras's default policy has `policy`.

    Inputs keep their dtype, and so do layers that ask for another policy than float32.

    Args:
        config: a Keras 3 configuration.
        policy: the policy's name, such as "mixed_float16".

    Raises:
        UsageError: Keras has no such policy.
    """
    check_dtype_policy(policy)
    replaced: dict[str, Any] = _replace(config, policy)
    return replaced


def _replace(value: Any, policy: str) -> Any:
    if isinstance(value, list):
        return [_replace(item, policy) for item in value]
    if not isinstance(value, dict) or value.get("class_name") in ("InputLayer", "__keras_tensor__"):
        return value
    replaced = {key: _replace(item, policy) for key, item in value.items()}
    if "dtype" in replaced and "name" in replaced and _policy_name(replaced["dtype"]) == _DEFAULT:
        replaced["dtype"] = policy
    return replaced


def _policy_name(dtype: Any) -> str | None:
    if isinstance(dtype, dict):
        config = dtype.get("config")
        return config.get("name") if isinstance(config, dict) else None
    return dtype if isinstance(dtype, str) else None
