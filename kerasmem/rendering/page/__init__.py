"""Results as one self-contained page: charts, and every number in a table beside them.

=========== ===================================================================
sections    the page's parts, in order
charts      each chart as plotly.js takes it: plain data
tables      HTML tables
document    the whole document: security policy, style, script, plotly.js
=========== ===================================================================
"""

from __future__ import annotations

from kerasmem.rendering.page.document import render_page

__all__ = ["render_page"]
