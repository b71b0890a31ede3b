"""A report as one HTML page without scripts: verdicts, charts, and every number in a table beside them.

The page needs no network, and its content security policy lets it reach none.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template

import kerasmem
from kerasmem.rendering.formatting import html_attribute, html_text
from kerasmem.rendering.page.sections import sections, verdicts
from kerasmem.rendering.report_contents import PageContents

_POLICY = "default-src 'none'; style-src '{style}'; img-src data:; base-uri 'none'; form-action 'none'"


def render_page(contents: PageContents) -> str:
    """Return the page as HTML: some 30 KB, and 10 KB for each line of a chart."""
    style = _file("page.css")
    names = [*(log.name for log in contents.logs), *(report.source for report in contents.reports)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return Template(_file("page.html")).substitute(
        policy=_POLICY.format(style=_hash(style)),
        title=html_attribute(contents.title),
        style=style,
        heading=html_text(contents.title),
        verdicts=verdicts(contents),
        shown=", ".join(html_text(name, 80) for name in names[:8]) + more,
        body="\n".join(f"<section>{section}</section>" for section in sections(contents)),
        version=html_attribute(kerasmem.__version__),
    )


@cache
def _file(name: str) -> str:
    return files("kerasmem.rendering.page").joinpath(name).read_text(encoding="utf-8")


def _hash(style: str) -> str:
    """Return the hash of a style for the policy, with line feeds as a browser reads them."""
    digest = hashlib.sha256(style.replace("\r\n", "\n").replace("\r", "\n").encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
