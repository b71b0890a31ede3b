"""Declaration and lookup of private parts of other packages."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kerasmem.errors import KerasmemError

_ALL: list[Borrowed] = []


class NotAvailableError(KerasmemError):
    """A feature is unavailable, because an installed package lacks a private part that it needs."""


@dataclass(frozen=True)
class Borrowed:
    """Private name of another package.

    Args:
        target: "module:name" or "module:Class.method".
        feature: public feature of kerasmem that needs it, such as "kerasmem.recompute".

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
        """Dotted name of the module."""
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        """Name of the package."""
        return self.target.partition(".")[0].partition(":")[0]

    @property
    def name(self) -> str:
        """Name in the module."""
        return self.target.partition(":")[2]

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Call the function.

        Raises:
            NotAvailableError: If the package lacks it.
        """
        return self.get()(*arguments, **settings)

    def get(self) -> Any:
        """Import and return the object.

        Raises:
            NotAvailableError: If the package lacks it.
        """
        owner, name = self.owner()
        return getattr(owner, name)

    def owner(self) -> tuple[Any, str]:
        """Return the class or module that contains the object, and its name there.

        Raises:
            NotAvailableError: If the package lacks it.
        """
        try:
            owner: Any = importlib.import_module(self.module)
            *classes, name = self.name.split(".")
            for part in classes:
                owner = getattr(owner, part)
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise NotAvailableError(
                f"{self.feature} does not work with {_package_version(self.package)}, which lacks "
                f"{self.module}.{self.name}. Other features work; `kerasmem doctor` lists missing parts"
            ) from error
        return owner, name

    def exists(self) -> bool:
        """Return whether the package has the object."""
        try:
            self.get()
        except NotAvailableError:
            return False
        return True


def all_borrowed() -> tuple[Borrowed, ...]:
    """List all private names that `kerasmem.compat` declares."""
    package = importlib.import_module("kerasmem.compat")
    for module in pkgutil.iter_modules(package.__path__, "kerasmem.compat."):
        importlib.import_module(module.name)
    return tuple(_ALL)


def _package_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
