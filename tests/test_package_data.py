"""Data files are installed with the package."""

from __future__ import annotations

import configparser
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_file_of_the_package_is_installed():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    patterns = settings["options.package_data"]["kerasmem"].replace(",", " ").split()
    listed = subprocess.run(["git", "ls-files", "kerasmem"], cwd=ROOT, capture_output=True, text=True)
    data = [Path(name).relative_to("kerasmem") for name in listed.stdout.split() if not name.endswith(".py")]
    left_out = [str(path) for path in data if not any(path.match(pattern) for pattern in patterns)]
    assert not left_out, "setup.cfg's package_data does not name them"
