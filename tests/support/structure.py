"""What is wrong with the structure of a package, as its source shows it: each function returns faults by module."""

from __future__ import annotations

import ast
import functools
import re
from collections import deque
from collections.abc import Callable, Container
from pathlib import Path

GUESTS = re.compile(r"keras\.src|tensorflow\.python|_getframe|currentframe|_current_frames|\bf_locals\b|\bf_back\b")
LONGEST = 80


def modules(package: Path) -> list[Path]:
    """Return the modules of a package, as paths inside it."""
    return sorted(path.relative_to(package) for path in package.rglob("*.py"))


def room_of(module: Path) -> str:
    """Return the room of a module: its top folder, or its own name on the ground floor."""
    return module.parts[0].removesuffix(".py")


def guests(package: Path) -> dict[Path, list[str]]:
    """Return the lines outside compat/ that name private parts of Keras or TensorFlow, or frames of the stack."""
    return _by_module(
        package,
        lambda path: [
            f"line {number}: {line.strip()}"
            for number, line in enumerate((package / path).read_text().splitlines(), 1)
            if room_of(path) != "compat" and GUESTS.search(line)
        ],
    )


def long_functions(package: Path) -> dict[Path, list[str]]:
    """Return the functions of more lines than `LONGEST`, tables of data left out."""
    return _by_module(
        package,
        lambda path: [
            f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
            for node in ast.walk(_parsed(package / path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno + 1 > LONGEST
            and not _is_table(node)
        ],
    )


def circles(package: Path) -> dict[Path, list[str]]:
    """Return the shortest way from each module back to itself by imports, wherever they stand in the file.

    The package's own `__init__` is left out: it is the list of the public names, each loaded on first use.
    """
    known = {_dotted(package, path): path for path in modules(package) if str(path) != "__init__.py"}
    imports = {name: _imports(package / path, known) for name, path in known.items()}
    return _by_module(package, lambda path: _way_back(_dotted(package, path), imports))


def private_imports(package: Path) -> dict[Path, list[str]]:
    """Return the names with a leading underscore that a module takes from another module of the package."""

    def taken(path: Path) -> list[str]:
        return [
            f"{node.module}.{alias.name}"
            for node in ast.walk(_parsed(package / path))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package.name
            for alias in node.names
            if any(part.startswith("_") for part in (*node.module.split("."), alias.name))
        ]

    return _by_module(package, taken)


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _by_module(package: Path, faults: Callable[[Path], list[str]]) -> dict[Path, list[str]]:
    return {path: found for path in modules(package) if (found := faults(path))}


def _is_table(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return all(
        isinstance(each, ast.Return | ast.Assign | ast.AnnAssign)
        and isinstance(each.value, ast.Dict | ast.List | ast.Tuple | ast.Set)
        for each in body
    )


def _dotted(package: Path, path: Path) -> str:
    return ".".join((package.name, *path.with_suffix("").parts)).removesuffix(".__init__")


def _imports(file: Path, known: Container[str]) -> set[str]:
    """Return the modules of the package that a file imports; in `from a import b`, `a.b` where that is a module."""
    found: set[str] = set()
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in known else node.module for name in inner)
    return {name for name in found if name in known}


def _way_back(start: str, imports: dict[str, set[str]]) -> list[str]:
    came_from: dict[str, str] = {}
    waiting = deque([start] if start in imports else [])
    while waiting:
        module = waiting.popleft()
        for name in sorted(imports[module] - came_from.keys()):
            came_from[name] = module
            waiting.append(name)
    if start not in came_from:
        return []
    way = [came_from[start], start]
    while way[0] != start:
        way.insert(0, came_from[way[0]])
    return [" -> ".join(way)]
