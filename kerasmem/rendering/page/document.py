"""The whole document: one file that needs no network, and that its own policy lets reach none."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template

import kerasmem
from kerasmem.rendering.contents import PageContents
from kerasmem.rendering.escape import embedded_json, html_attribute, html_text
from kerasmem.rendering.page.sections import Sections
from kerasmem.rendering.page.verdicts import verdicts

# The script and the style count by their hashes alone: nothing that gets into the page can add one.
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'"
)


def render_page(contents: PageContents) -> str:
    """Return the page as HTML text: some 30 KB, its tables, and at most some 1 MB of points."""
    sections = Sections(contents)
    body = sections.all()
    script, style = _file("page.js"), _file("page.css")
    names = [*(training.name for training in contents.trainings), *(each.source for each in contents.compositions)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return Template(_file("page.html")).substitute(
        policy=_POLICY.format(script=_hash(script), style=_hash(style)),
        title=html_attribute(contents.title),
        style=style,
        heading=html_text(contents.title),
        verdicts=verdicts(contents),
        shown=", ".join(html_text(name, 80) for name in names[:8]) + more,
        body=body,
        version=html_attribute(kerasmem.__version__),
        data=embedded_json([chart.to_dict() for chart in sections.charts]),
        script=script,
    )


@cache
def _file(name: str) -> str:
    return files("kerasmem.rendering.page").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash of a script or a style as a policy has it; the browser reads each line's end as one line feed."""
    digest = hashlib.sha256(script.replace("\r\n", "\n").replace("\r", "\n").encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
