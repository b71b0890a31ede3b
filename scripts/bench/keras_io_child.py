"""Measure or estimate one example for keras_io.py and print JSON.

python scripts/bench/keras_io_child.py PART '{"file": …, "set": {…}, …}'
"""

from __future__ import annotations

import ast
import dis
import gc
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from estimates_child import max_rss

WARM_UP, STEPS = 3, 12
EXAMPLE = "example.py"
ROWS = 4096
# Methods that change what a name refers to. Other calls at the top of an example only show something.
CHANGES = frozenset(("adapt", "add", "append", "build", "compile", "load_weights", "set_weights", "shuffle", "update"))
FIT_SETTINGS = frozenset(("x", "y", "batch_size", "sample_weight", "class_weight"))
random = np.random.default_rng(0)


class Fitting(BaseException):
    """The example calls `fit`. Not an `Exception`, so that examples do not catch it."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.settings = model, settings


class _Rewritten(ast.NodeTransformer):
    """Drops what cannot be downloaded, what surrounds `fit` and what a function does after it."""

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == "weights" and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _method(node) == "fit":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg in FIT_SETTINGS]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        fitting = [index for index, statement in enumerate(node.body) if _fits(statement)]
        if fitting:
            node.body = node.body[: fitting[0] + 1]
        return node


def _method(node: ast.AST) -> str:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def _fits(node: ast.AST) -> bool:
    return any(_method(part) == "fit" for part in ast.walk(node))


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _compiled(source: ast.stmt | str) -> CodeType:
    tree = ast.parse(source) if isinstance(source, str) else ast.Module([source], [])
    return compile(ast.fix_missing_locations(tree), EXAMPLE, "exec")


def _loaded(codes: list[CodeType], of_functions: set[str]) -> set[str]:
    """Return the global names that code reads, and add those that its functions read to a set."""
    names = {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "LOAD_NAME"}
    for code in itertools.chain.from_iterable(map(_nested, codes)):
        reads = ("LOAD_NAME", "LOAD_GLOBAL")
        of_functions |= {step.argval for step in dis.get_instructions(code) if step.opname in reads}
    return names


def _stored(codes: list[CodeType]) -> set[str]:
    return {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}


def _changed(statement: ast.stmt, code: CodeType) -> set[str]:
    """Return the global names that the statement binds or whose value it changes."""
    names = _stored([code])
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return names
    for node in ast.walk(statement):
        target: ast.AST | None = None
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            target = node
        elif _method(node) in CHANGES:
            target = node.func
        while isinstance(target, (ast.Subscript, ast.Attribute, ast.Call)):
            target = target.func if isinstance(target, ast.Call) else target.value
        if isinstance(target, ast.Name):
            names.add(target.id)
    return names


def fitting(entry: dict[str, Any]) -> Fitting:
    """Execute the statements of an example that its call of `fit` needs, up to that call."""
    text = Path(entry["path"]).read_text()
    for old, new in (("keras_core", "keras"), *entry.get("replace", {}).items()):
        text = text.replace(old, new)
    Path(EXAMPLE).write_text(text)  # AutoGraph reads the source of functions
    statements = _Rewritten().visit(ast.parse(text)).body
    dropped = entry.get("drop", [])
    statements = [node for node in statements if not any(word in ast.unparse(node) for word in dropped)]
    goal = _goal(statements, entry)
    statements = statements[: goal + 1]
    codes = [_compiled(node) for node in statements]
    imports = [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    binds = [_changed(node, code) - modules for node, code in zip(statements, codes, strict=True)]
    instead: dict[int, list[CodeType]] = {}
    for name, value in entry.get("set", {}).items():
        root = re.split(r"[.\[]", name)[0]
        index = next(index for index, names in enumerate(binds) if root in names)
        instead.setdefault(index, [] if root == name else [codes[index]]).append(_compiled(f"{name} = {value}"))
    rewritten = [instead.get(index, [code]) for index, code in enumerate(codes)]
    kept = _kept(statements, rewritten, binds)
    return _run(imports, (code for index in sorted(kept) for code in rewritten[index]))


def _kept(statements: list[ast.stmt], codes: list[list[CodeType]], binds: list[set[str]]) -> set[int]:
    """Return the indices of the statements that the last one needs.

    A name that functions read counts as needed everywhere: they read it when they are called.
    """
    of_functions: set[str] = set()
    while True:
        kept, needed, before = {len(codes) - 1}, _loaded(codes[-1], of_functions), len(of_functions)
        for index in range(len(codes) - 2, -1, -1):
            if not binds[index] & (needed | of_functions):
                continue
            kept.add(index)
            if isinstance(statements[index], (ast.Assign, ast.FunctionDef, ast.ClassDef)):
                needed -= _stored(codes[index])
            needed |= _loaded(codes[index], of_functions)
        if len(of_functions) == before:
            return kept


def _goal(statements: list[ast.stmt], entry: dict[str, Any]) -> int:
    """Return the index of the statement that fits the model, itself or by a function of the example."""
    trainers = {node.name for node in statements if isinstance(node, ast.FunctionDef) and _fits(node)}
    return next(
        index
        for index, node in enumerate(statements)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and entry.get("goal", "") in ast.unparse(node)
        and (_fits(node) or trainers & {part.id for part in ast.walk(node) if isinstance(part, ast.Name)})
    )


def _run(imports: list[ast.Import | ast.ImportFrom], steps: Iterable[CodeType]) -> Fitting:
    import keras
    import tensorflow as tf

    values: dict[str, Any] = {
        "__name__": "__main__", "keras": keras, "tf": tf, "np": np, "floats": floats, "integers": integers,
        "words": words, "slices": slices, "random": random, "ROWS": ROWS,
    }  # fmt: skip
    for statement in imports:
        _import(statement, values)
    original = keras.Model.fit
    keras.Model.fit = _capture
    try:
        for code in steps:
            exec(code, values)
    except Fitting as reached:
        for name in [name for name, value in values.items() if isinstance(value, tf.data.Dataset)]:
            del values[name]
        return reached
    finally:
        keras.Model.fit = original
    raise RuntimeError("the example does not call fit")


def _import(statement: ast.Import | ast.ImportFrom, values: dict[str, Any]) -> None:
    """Import name by name, with a stand-in for a package that is not installed."""
    for alias in statement.names:
        one = type(statement)(**{**vars(statement), "names": [alias]})
        try:
            exec(_compiled(one), values)
        except (ImportError, AttributeError):
            values[alias.asname or alias.name.partition(".")[0]] = MagicMock(name=alias.name)


def _capture(model: Any, *arguments: Any, **named: Any) -> None:
    raise Fitting(model, dict(zip(("x", "y", "batch_size"), arguments, strict=False)) | named)


def floats(*shape: int) -> np.ndarray:
    """Return random numbers from 0 to 1."""
    return random.random(shape, dtype=np.float32)


def integers(below: int, *shape: int, dtype: str = "int64") -> np.ndarray:
    """Return random integers from 0."""
    return random.integers(below, size=shape).astype(dtype)


def words(rows: int, length: int) -> list[str]:
    """Return texts of random words."""
    return [" ".join(f"w{number}" for number in row) for row in integers(5000, rows, length)]


def slices(*arrays: Any) -> Any:
    """Return a dataset of rows."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0])


def use_random_datasets() -> None:
    """Replace what Keras downloads by random arrays of the same shapes."""
    from keras import datasets

    def of_images(shape: tuple[int, ...], classes: int, labels: tuple[int, ...]) -> Callable[[], Any]:
        def part() -> tuple[np.ndarray, np.ndarray]:
            return integers(256, ROWS, *shape, dtype="uint8"), integers(classes, ROWS, *labels, dtype="uint8")

        return lambda: (part(), part())

    def of_reviews(num_words: int = 20000) -> Any:
        def part() -> tuple[np.ndarray, np.ndarray]:
            return integers(num_words, ROWS, 250), integers(2, ROWS)

        return part(), part()

    datasets.mnist.load_data = datasets.fashion_mnist.load_data = of_images((28, 28), 10, ())
    datasets.cifar10.load_data = of_images((32, 32, 3), 10, (1,))
    datasets.cifar100.load_data = of_images((32, 32, 3), 100, (1,))
    datasets.imdb.load_data = of_reviews


def batches(settings: dict[str, Any]) -> Iterator[Any]:
    """Return the batches of NumPy arrays that `fit` makes of its data, again and again."""
    import tensorflow as tf
    from keras import tree, utils

    x = settings["x"]
    if isinstance(x, tf.data.Dataset):
        drawn = itertools.islice(x.as_numpy_iterator(), STEPS + WARM_UP)
    elif isinstance(x, utils.PyDataset):
        drawn = (x[index] for index in range(min(len(x), STEPS + WARM_UP)))
    elif isinstance(x, Iterator):
        drawn = itertools.islice(x, STEPS + WARM_UP)
    else:
        size = settings.get("batch_size") or 32
        rows = utils.pack_x_y_sample_weight(x, settings.get("y"), settings.get("sample_weight"))
        rows = tree.map_structure(_as_fit_converts, rows)
        steps = min(STEPS + WARM_UP, len(tree.flatten(rows)[0]) // size)
        drawn = (tree.map_structure(lambda array, i=i: array[i * size : (i + 1) * size], rows) for i in range(steps))
    return itertools.cycle([tree.lists_to_tuples(tree.map_structure(np.array, batch)) for batch in drawn])


def _as_fit_converts(array: Any) -> np.ndarray:
    return np.asarray(array, "float32" if np.issubdtype(np.asarray(array).dtype, np.floating) else None)


def truth(entry: dict[str, Any]) -> dict[str, Any]:
    """Fit the example's model and return the peak in use of each step, weights, optimizer and batch included."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    reached = fitting(entry)
    model, settings = reached.model, reached.settings
    facts = features(model, settings)
    signature = settings["x"].element_spec if isinstance(settings["x"], tf.data.Dataset) else None
    rows = keras.tree.flatten(settings["x"])[0]  # `fit` knows the batch size if it divides the number of rows
    is_even = isinstance(rows, np.ndarray) and len(rows) % (settings.get("batch_size") or 32) == 0
    source = batches(settings)
    class_weight = settings.get("class_weight")
    del reached, settings, rows
    gc.collect()
    first = next(source)
    signature = signature or keras.tree.map_structure(
        lambda array: tf.TensorSpec((len(array) if is_even else None, *array.shape[1:]), array.dtype), first
    )
    data = tf.data.Dataset.from_generator(lambda: itertools.chain([first], source), output_signature=signature)
    pipeline = tf.data.Options()
    pipeline.experimental_optimization.inject_prefetch = False  # a batch in waiting is host memory
    data = data.with_options(pipeline)
    memory = tf.config.experimental
    before: list[int] = []
    peaks: list[int] = []

    class Peaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            memory.reset_memory_stats("CPU:0")
            before.append(memory.get_memory_info("CPU:0")["current"])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            peaks.append(memory.get_memory_info("CPU:0")["peak"])

    others = _other_bytes(model)
    history = model.fit(
        data, steps_per_epoch=WARM_UP + STEPS, class_weight=class_weight, callbacks=[Peaks()], verbose=0
    )
    return {
        "peak_bytes": peaks[WARM_UP:],
        "before_bytes": before[WARM_UP:],
        "variable_bytes": _variable_bytes(model),
        "other_bytes": others,
        "batch_bytes": sum(np.asarray(array).nbytes for array in keras.tree.flatten(first)),
        "loss_is_finite": all(math.isfinite(np.mean(value[-1])) for value in history.history.values()),
        "features": facts,
        "max_rss_bytes": max_rss(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _variables(model: Any) -> list[Any]:
    """Return all variables of the model, its optimizers and metrics."""
    import keras

    held = [*model.variables, *(variable for metric in model.metrics for variable in metric.variables)]
    for value in vars(model).values():
        if isinstance(value, keras.optimizers.Optimizer):
            held += value.variables
    return list({id(variable): variable for variable in held}.values())


def _variable_bytes(model: Any) -> int:
    """Return the logical bytes of all variables of the model, its optimizers and metrics."""
    return sum(_bytes(variable.shape, variable.dtype) for variable in _variables(model))


def _other_bytes(model: Any) -> int:
    """Return the logical bytes of the tensors and variables in memory that are not the model's."""
    import tensorflow as tf

    own = {id(variable.value) for variable in _variables(model)}
    others = [
        value
        for value in gc.get_objects()
        if isinstance(value, (tf.Tensor, tf.Variable))
        and id(value) not in own
        and (
            isinstance(value, tf.Variable) or (hasattr(value, "numpy") and value.dtype not in (tf.resource, tf.variant))
        )
    ]
    return sum(_bytes(value.shape, value.dtype.name) for value in others if value.dtype != tf.string)


def _bytes(shape: Iterable[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(str(dtype)).itemsize


def features(model: Any, settings: dict[str, Any]) -> list[str]:
    """Return what the example has of its own, and the kind of its data."""
    import keras

    def own(value: Any) -> bool:
        return bool(getattr(value, "__module__", "") == "__main__")

    x, losses = settings["x"], keras.tree.flatten(getattr(model, "loss", None))
    layers = [layer for layer in model._flatten_layers() if layer is not model and own(layer)]
    weighted = (
        len(spec) == 3 if isinstance(spec := getattr(x, "element_spec", None), tuple) else "sample_weight" in settings
    )
    facts = {
        "own train_step": own(type(model)) and type(model).train_step is not keras.Model.train_step,
        "own loss": any(map(own, losses)),
        "own metric": any(map(own, model.metrics)),
        "own optimizer": own(getattr(model, "optimizer", None)),
        "own layers": bool(layers),
        "layers without get_config": not all("get_config" in vars(type(layer)) for layer in layers),
        "subclassed model": any(own(base) and "call" in vars(base) for base in type(model).mro()),
        "several inputs": len(getattr(model, "inputs", None) or ()) > 1,
        "several outputs": len(getattr(model, "outputs", None) or ()) > 1,
        "sample weights": weighted,
        "class weights": "class_weight" in settings,
    }
    kind = "tf.data" if spec else "PyDataset" if isinstance(x, keras.utils.PyDataset) else type(x).__name__
    return [*(name for name, holds in facts.items() if holds), f"{kind}, y" if "y" in settings else kind]


def estimate(entry: dict[str, Any]) -> dict[str, Any]:
    """Estimate the example's live model from the data that it passes to `fit`."""
    import kerasmem

    reached = fitting(entry)
    x, y, weight = (reached.settings.get(name) for name in ("x", "y", "sample_weight"))
    data = x if y is None else (x, y) if weight is None else (x, y, weight)
    size = reached.settings.get("batch_size")
    began = time.perf_counter()
    try:
        report = kerasmem.estimate(
            reached.model, data=data, method="graph", **({} if size is None else {"batch_size": size})
        )
    except Exception as problem:
        return {"refusal": f"{type(problem).__name__}: {problem}"[:600]}
    return {
        "total": report.bytes.total,
        "low": report.bytes.low,
        "high": report.bytes.high,
        "method": report.settings.method,
        "unmodelled": [entry.what for entry in report.unmodelled],
        "notes": list(report.notes)[:4],
        "wall_seconds": round(time.perf_counter() - began, 2),
        "max_rss_bytes": max_rss(),
    }


PARTS = {part.__name__: part for part in (truth, estimate)}

if __name__ == "__main__":
    entry = json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # some examples write files
        use_random_datasets()
        print("\n" + json.dumps(PARTS[sys.argv[1]](entry)))
