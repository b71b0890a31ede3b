"""How a private part of another package is declared, looked up, and found to be missing."""

from __future__ import annotations

import importlib
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
        target: "module:name", with a dotted name for a method.
        feature: the feature of kerasmem that needs it, as a user knows it: "kerasmem.recompute".

    Examples:
        >>> Borrowed("json:dumps", feature="an example").exists()
        True
    """

    target: str
    feature: str

    def __post_init__(self) -> None:
        if not self.target.startswith("json:"):  # the example above
            _ALL.append(self)

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        """The package's name."""
        return self.target.partition(".")[0].partition(":")[0]

    @property
    def name(self) -> str:
        """The name within the module."""
        return self.target.partition(":")[2]

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Call it.

        Raises:
            NotAvailableError: If the package has no such part.
        """
        return self.get()(*arguments, **settings)

    def get(self) -> Any:
        """Import and return it.

        Raises:
            NotAvailableError: If the package has no such part.
        """
        owner, name = self.owner()
        return getattr(owner, name)

    def owner(self) -> tuple[Any, str]:
        """Return the class or module that has it, and its name in there.

        Raises:
            NotAvailableError: If the package has no such part.
        """
        try:
            owner: Any = importlib.import_module(self.module)
            *classes, name = self.name.split(".")
            for part in classes:
                owner = getattr(owner, part)
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise NotAvailableError(
                f"{self.feature} does not work with {_installed(self.package)}: it has no "
                f"{self.module}.{self.name}; everything else works. `kerasmem doctor` lists such parts"
            ) from error
        return owner, name

    def exists(self) -> bool:
        """Return whether the package has such a part."""
        try:
            self.get()
        except NotAvailableError:
            return False
        return True


def all_borrowed() -> tuple[Borrowed, ...]:
    """List every private name that the modules of `kerasmem.compat` use."""
    package = importlib.import_module("kerasmem.compat")
    for module in pkgutil.iter_modules(package.__path__, "kerasmem.compat."):
        importlib.import_module(module.name)
    return tuple(_ALL)


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
