#!/usr/bin/env python3
"""Print the lowest versions that setup.cfg allows, as constraints for pip: one `name==version` a line.

Those of kerasmem and its extras; the tools that only run the tests are the newest.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path

SETTINGS = Path(__file__).resolve().parent.parent / "setup.cfg"
# name>=version, with or without an upper bound and conditions after it
BOUNDED = re.compile(r"(?P<name>[\w.-]+)>=(?P<lowest>[\w.]+)")


def constraints(text: str) -> list[str]:
    """Return `name==version` for each requirement in the text of a setup.cfg that has a lower bound."""
    settings = configparser.ConfigParser()
    settings.read_string(text)
    extras = [needs for extra, needs in settings["options.extras_require"].items() if not extra.startswith("test")]
    needs = "\n".join((settings["options"]["install_requires"], *extras)).splitlines()
    found = {match["name"]: match["lowest"] for line in needs if (match := BOUNDED.match(line.strip()))}
    return [f"{name}=={lowest}" for name, lowest in found.items()]


if __name__ == "__main__":
    print("\n".join(constraints(SETTINGS.read_text())))
