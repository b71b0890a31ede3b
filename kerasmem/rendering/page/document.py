"""The whole document: one file that needs no network, and that its own policy lets reach none."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template

import kerasmem
from kerasmem.errors import MissingExtraError
from kerasmem.rendering.contents import PageContents
from kerasmem.rendering.escape import embedded_json, html_attribute, html_text
from kerasmem.rendering.page.sections import Sections

# Scripts run by their hash alone: nothing that gets into the page can add one. plotly.js writes styles into its
# SVG, so styles are not bound to a hash; `data:` and `blob:` are its "download as picture".
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def render_page(contents: PageContents) -> str:
    """Return the page as HTML text, some 5 MB, most of it plotly.js.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    library = plotly_script()
    sections = Sections(contents)
    body = sections.all()
    script = _file("page.js")
    names = [*(training.name for training in contents.trainings), *(each.source for each in contents.compositions)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return Template(_file("page.html")).substitute(
        policy=_POLICY.format(scripts=" ".join(_hash(each) for each in (library, script))),
        title=html_attribute(contents.title),
        style=_file("page.css"),
        heading=html_text(contents.title),
        shown=", ".join(html_text(name, 80) for name in names[:8]) + more,
        body=body,
        version=html_attribute(kerasmem.__version__),
        data=embedded_json([chart.to_dict() for chart in sections.charts]),
        library=library,
        script=script,
    )


@cache
def plotly_script() -> str:
    """Return the source of plotly.js.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("the page", "report") from error
    return str(get_plotlyjs())


@cache
def _file(name: str) -> str:
    return files("kerasmem.rendering.page").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return a script's hash as a policy has it; the browser reads each line's end as one line feed."""
    digest = hashlib.sha256(script.replace("\r\n", "\n").replace("\r", "\n").encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
