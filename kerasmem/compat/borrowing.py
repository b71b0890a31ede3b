"""How a private part of another package is declared, looked up, and found to be missing."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kerasmem.errors import KerasmemError

_ALL: list[Borrowed] = []


class NotAvailableError(KerasmemError):
    """A feature is off: the versions installed do not have a private part that it needs."""


@dataclass(frozen=True)
class Borrowed:
    """One private name of another package.

    Args:
        module: where it is: "keras.src.models.functional".
        name: its dotted name there: "Functional" or "Functional._flatten_layers"; "" is the module itself.
        feature: what is off without it, as a user knows it: "kerasmem.recompute".
        parameters: names of parameters that it must have, for what is called.

    Examples:
        >>> Borrowed("json", "dumps", feature="an example", parameters=("obj",)).missing() is None
        True
    """

    module: str
    name: str
    feature: str
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.module.startswith("json"):  # the example above
            _ALL.append(self)

    def get(self) -> Any:
        """Return it.

        Raises:
            NotAvailableError: the package has no such part; the message names the feature and the version.
        """
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split(".") if self.name else ():
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise NotAvailableError(
                f"{self.feature} does not work with {_package(self.module)}: it has no {self.module}"
                f"{'.' if self.name else ''}{self.name}; everything else works. `kerasmem doctor` lists such parts"
            ) from error
        return found

    def missing(self) -> str | None:
        """Return what is missing or changed, in one line; None where all is as it was."""
        try:
            found = self.get()
        except NotAvailableError:
            return f"{self.module}:{self.name} is gone"
        if not self.parameters:
            return None
        try:
            known = inspect.signature(found).parameters
        except (TypeError, ValueError):
            return None  # compiled code tells no signature
        lost = [each for each in self.parameters if each not in known]
        return (
            f"{self.module}:{self.name} has no parameter {', '.join(lost)}; it has {', '.join(known)}" if lost else None
        )


def all_borrowed() -> tuple[Borrowed, ...]:
    """Return everything that the modules of this room borrow."""
    package = importlib.import_module("kerasmem.compat")
    for module in pkgutil.iter_modules(package.__path__, "kerasmem.compat."):
        importlib.import_module(module.name)
    return tuple(_ALL)


def _package(module: str) -> str:
    name = module.partition(".")[0]
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name
