"""Make the links of README.md absolute for PyPI. All other metadata is in setup.cfg."""

import configparser
import re
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent
metadata = configparser.ConfigParser(interpolation=None)
metadata.read(FOLDER / "setup.cfg", encoding="utf-8")
url = metadata["metadata"].get("url")
readme = (FOLDER / "README.md").read_text(encoding="utf-8")
if url is not None:
    readme = re.sub(r"!\[([^]]*)\]\((?!\w+:|#)", rf"![\1]({url}/raw/main/", readme)
    readme = re.sub(r"\]\((?!\w+:|#)", f"]({url}/blob/main/", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
