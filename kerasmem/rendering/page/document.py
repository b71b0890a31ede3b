"""The whole document: one file that needs no network, and that its own policy lets reach none."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

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
    data = embedded_json([chart.to_dict() for chart in sections.charts])
    policy = _POLICY.format(scripts=" ".join(_hash(each) for each in (library, script)))
    names = [*(training.name for training in contents.trainings), *(each.source for each in contents.compositions)]
    shown = ", ".join(html_text(name, 80) for name in names[:8]) + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )
    version = f"kerasmem {html_attribute(kerasmem.__version__)}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{html_attribute(contents.title)} · kerasmem</title>
<style>{_file("page.css")}</style>
</head>
<body>
<header><h1>{html_text(contents.title)}</h1><p class="soft">{shown}</p></header>
<main>
<noscript><p>The charts need JavaScript; every number is in the tables too.</p></noscript>
{body}
</main>
<footer>{version}. Sizes are binary: 1 GiB is 1024 MiB. Charts by plotly.js.</footer>
<script type="application/json" id="charts">{data}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


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
