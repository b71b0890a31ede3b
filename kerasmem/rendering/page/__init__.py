"""Results as one self-contained page: charts, and every number in a table beside them.

=========== ===================================================================
verdicts    what the page says first
sections    the page's parts, in order
charts      each chart as plain data, for page.js
tables      HTML tables
document    the whole document: security policy, style, script
=========== ===================================================================
"""

from __future__ import annotations

from kerasmem.rendering.page.document import render_page

__all__ = ["render_page"]
