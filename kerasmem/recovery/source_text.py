"""How the model, its optimizer, its loss and a batch are written in Python: the parts of a script."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerasmem.compat.keras_compile import user_metrics
from kerasmem.models.backend import import_keras
from kerasmem.models.batch import pack_inputs
from kerasmem.models.names import is_factory_name
from kerasmem.models.training import TrainingSettings, make_optimizer
from kerasmem.recovery.changes import OPTIMIZERS

THE_MODEL = "# `model` is the model that was given to kerasmem.advise."


def opening_lines(source: Any, options: Mapping[str, Any], policy: str | None) -> tuple[list[str], list[str]]:
    """Return the imports and the lines that make `model`.

    Args:
        source: what `kerasmem.advise` was given.
        options: `factory`, `factory_args`, `custom_objects`, `trust`, `dtype_policy`.
        policy: the dtype policy to compute in; None: the model's own.
    """
    policy = policy or options.get("dtype_policy")
    factory = options.get("factory")
    of_code: Any = factory if factory is not None else source
    arguments = dict(options.get("factory_args") or {})
    if isinstance(of_code, functools.partial):
        of_code, arguments = of_code.func, {**of_code.keywords, **arguments}
    is_text = isinstance(of_code, (str, os.PathLike))
    if (is_text and is_factory_name(os.fspath(of_code))) or (factory is not None and is_text):
        imports, call = _of_name(os.fspath(of_code), arguments)
    elif inspect.isroutine(of_code) or isinstance(of_code, type):
        imports, call = _of_function(of_code, arguments)
    elif is_text:
        imports, lines = _of_file(os.fspath(of_code), options)
        return imports, [*lines, *_half_precision(policy)]
    else:
        return [], [THE_MODEL, *_half_precision(policy)]
    before = [] if policy is None else [f'keras.config.set_dtype_policy("{policy}")   # before the model is built']
    lines = [*before, f"model = {call}"]
    if factory is not None and source is not None:
        lines.append(f"model.load_weights({os.fspath(source)!r})")
    return imports, lines


def optimizer_text(training: TrainingSettings, replacement: str | None) -> str:
    """Return the optimizer as Python: the one that replaces it, or the model's own with its settings."""
    if replacement is not None:
        lean = OPTIMIZERS[replacement]
        return f"keras.optimizers.{lean.class_name}({', '.join([str(lean.learning_rate), *_keywords(lean.config)])})"
    name, config = training.optimizer, dict(training.optimizer_config or {})
    if name == "lossscaleoptimizer" and isinstance(config.get("inner_optimizer"), dict):
        inner = config["inner_optimizer"]
        name, config = str(inner["class_name"]).rpartition(">")[2].lower(), dict(inner["config"])
    if name is None:
        return '"adam"'
    try:
        usual = make_optimizer(name, {})
    except ValueError:  # not one of Keras's
        return "model.optimizer"
    words = []
    for key, value in usual.get_config().items():
        given = config.get(key, value)
        if key == "learning_rate" and isinstance(given, Mapping):
            words.append(f"learning_rate=keras.optimizers.schedules.deserialize({dict(given)!r})")
        elif key != "name" and not _is_same(given, value):
            words.append(f"{key}={_number(given)!r}")
    return f"keras.optimizers.{type(usual).__name__}({', '.join(words)})"


def loss_text(loss: Any) -> str:
    """Return a loss as Python; one that is not Keras's is taken from the model."""
    return _structure_text(loss, "losses", import_keras().losses.Loss, needs_all=True) or "model.loss"


def metrics_text(model: Any) -> str | None:
    """Return Keras's metrics as Python, in the list or dict in which they were given; None where there are none."""
    return _structure_text(user_metrics(model), "metrics", import_keras().metrics.Metric, needs_all=False)


def arrays_text(structure: Any, flat: list[Any], samples: str) -> str:
    """Return arrays of zeros in a structure: a list, a dict or one.

    Args:
        structure: of the tensors, from `model_inputs`, or the tensors themselves.
        flat: the tensors, with the batch first.
        samples: the number of samples, as Python.
    """
    return nested_text(pack_inputs(structure, [_zeros(each, samples) for each in flat]))


def nested_text(nested: Any) -> str:
    """Return a structure of Python expressions as Python."""
    if isinstance(nested, dict):
        return "{" + ", ".join(f"{name!r}: {nested_text(each)}" for name, each in nested.items()) + "}"
    if isinstance(nested, (list, tuple)):
        return "[" + ", ".join(map(nested_text, nested)) + "]"
    return str(nested)


def _zeros(tensor: Any, samples: str) -> str:
    sizes = "".join(f", {size}" for size in tuple(tensor.shape)[1:]) or ","
    if str(tensor.dtype) == "string":
        return f'np.full(({samples}{sizes}), "", object)'
    return f'np.zeros(({samples}{sizes}), "{tensor.dtype}")'


def _of_name(text: str, arguments: dict[str, Any]) -> tuple[list[str], str]:
    module, _, function = text.rpartition(":")
    if module.startswith("keras."):
        return [], f"{module}.{_call(function, arguments, module == 'keras.applications')}"
    if not module.endswith(".py"):
        return [f"from {module} import {function}"], _call(function, arguments)
    path = Path(module).absolute()
    lines = ["import sys", f"sys.path.insert(0, {os.fspath(path.parent)!r})", f"from {path.stem} import {function}"]
    return lines, _call(function, arguments)


def _of_function(build: Any, arguments: dict[str, Any]) -> tuple[list[str], str]:
    module, name = str(getattr(build, "__module__", "__main__")), str(build.__qualname__)
    call = _call(build.__name__, arguments, module.startswith("keras.") and "applications" in module)
    if module == "__main__" or "." in name:
        return [], f"{call}   # the function that was given to kerasmem.advise"
    return [f"from {module} import {name}"], call


def _call(function: str, arguments: dict[str, Any], without_weights: bool = False) -> str:
    given = {"weights": None, **arguments} if without_weights else arguments
    return f"{function}({', '.join(_keywords(given))})"


def _of_file(path: str, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    given = dict(options.get("custom_objects") or {})
    own = {name: each for name, each in given.items() if getattr(each, "__qualname__", "") == name}
    imports = [f"from {each.__module__} import {name}" for name, each in sorted(own.items())][:20]
    objects = nested_text({name: name for name in sorted(own)[:20]})
    if path.lower().endswith(".json"):
        tail = f", custom_objects={objects}" if own else ""
        return imports, [f"model = keras.models.model_from_json(open({path!r}).read(){tail})"]
    words = [f"custom_objects={objects}"] if own else []
    words += ["compile=False", *(["safe_mode=False"] if options.get("trust") else [])]
    return imports, [f"model = keras.saving.load_model({path!r}, {', '.join(words)})"]


def _half_precision(policy: str | None) -> list[str]:
    """Return the lines that change the policy of a model that is there: each layer has its own."""
    if policy is None:
        return []
    return [
        "from kerasmem.recovery.transforms import with_policy",
        f'model = with_policy(model, "{policy}")   # every layer; weights stay float32',
    ]


def _structure_text(given: Any, module: str, base: Any, *, needs_all: bool) -> str | None:
    """Return losses or metrics as Python; what is not Keras's is left out, or makes it None where all are needed."""
    if not isinstance(given, (dict, list, tuple)):
        return _object_text(given, module, base)
    pairs = given.items() if isinstance(given, dict) else enumerate(given)
    texts = {key: _structure_text(each, module, base, needs_all=needs_all) for key, each in pairs}
    found = {key: text for key, text in texts.items() if text is not None}
    if not found or (needs_all and len(found) < len(texts)):
        return None
    return nested_text(found if isinstance(given, dict) else list(found.values()))


def _object_text(given: Any, module: str, base: Any) -> str | None:
    """Return a name, or an object or function of `keras.losses` or `keras.metrics`, as Python; None for others."""
    if isinstance(given, str):
        return repr(given)
    known, kind = getattr(import_keras(), module), type(given)
    if isinstance(given, base) and getattr(known, kind.__name__, None) is kind:
        try:
            config, usual = given.get_config(), kind().get_config()
        except Exception:  # it cannot be made without arguments, or holds a function
            return None
        words = [f"{key}={value!r}" for key, value in config.items() if usual.get(key) != value and key != "name"]
        return f"keras.{module}.{kind.__name__}({', '.join(words)})"
    name = getattr(given, "__name__", None)
    return repr(name) if name is not None and getattr(known, name, None) is given else None


def _keywords(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in arguments.items()]


def _is_same(one: Any, other: Any) -> bool:
    is_float = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-6) if is_float else bool(one == other)


def _number(value: Any) -> Any:
    """Return a number as a person writes it: a learning rate comes out of a float32."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
