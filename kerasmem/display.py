"""`kerasmem.summary` and `kerasmem.report_page`: results for a terminal or a notebook."""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from kerasmem.errors import UsageError
from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.report import MemoryReport
from kerasmem.files import write_named
from kerasmem.models.spec import DEFAULT_BATCH_SIZE
from kerasmem.monitoring.timeline import Timeline
from kerasmem.profiling.results import StepProfile
from kerasmem.rendering.estimate_tables import DEFAULT_WIDTH, summary_table
from kerasmem.rendering.formatting import plain_text

_RESULTS = "timelines (kerasmem.read_timeline reads a log), memory reports or profiles"
_FRAME_STYLE = "width: 100%; height: 720px; border: 0"  # of a page in a notebook


def summary(
    model: Any,
    batch_size: int = DEFAULT_BATCH_SIZE,
    *,
    line_length: int | None = None,
    print_fn: Callable[[str], object] | None = None,
    show_trainable: bool = False,
    **options: Any,
) -> None:
    """Print the table of `model.summary(expand_nested=True)` with the memory of each layer.

    Args:
        model: a Keras model, or another model that `kerasmem.estimate` accepts.
        batch_size: samples in a batch. Defaults to 32.
        line_length: characters in a line. Defaults to the terminal's width.
        print_fn: function that is called with the text. Defaults to printing to the terminal.
        show_trainable: whether to show if a layer is trainable. Defaults to False.
        **options: arguments of `kerasmem.estimate`, such as `input_shape` or `dtype_policy`. `method` defaults to
            "formula", which is immediate.

    Raises:
        KerasmemError: If `kerasmem.estimate` raises one.

    Examples:
        >>> import keras, kerasmem
        >>> kerasmem.summary(keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]), batch_size=16)
        ... # doctest: +SKIP
    """
    report = estimate(model, batch_size=batch_size, **{"method": "formula", **options})
    console = Console(emoji=False, markup=False, highlight=False)
    width = line_length or (min(DEFAULT_WIDTH, console.width) if print_fn is None else DEFAULT_WIDTH)
    table = summary_table(report, width, show_trainable=show_trainable)
    if print_fn is None:
        console.print(table)
    else:
        print_fn(plain_text(table, line_length or DEFAULT_WIDTH))


@dataclass(frozen=True)
class ReportPage:
    """HTML page of `kerasmem report`, which a notebook displays.

    Attributes:
        html: the page. It needs no network.
    """

    html: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file.

        Raises:
            OSError: If the file cannot be written.
        """
        write_named(os.fspath(path), self.html.encode())

    def _repr_html_(self) -> str:
        page = html.escape(self.html)  # the frame separates its style and its policy from the notebook's
        return f'<iframe sandbox="" title="Memory report" style="{_FRAME_STYLE}" srcdoc="{page}"></iframe>'


def report_page(*results: Any, title: str = "Memory report") -> ReportPage:
    """Combine results on one page: memory over time, the peak by category and layer, verdicts.

    Args:
        *results: timelines (`logger.timeline`, `kerasmem.read_timeline`), memory reports (`kerasmem.estimate`) and
            profiles of a step (`kerasmem.profile`).
        title: heading of the page. Defaults to "Memory report".

    Returns:
        A `ReportPage`. A notebook displays it, and `save` writes it to a file.

    Raises:
        UsageError: If there are no results, or one has another type.

    Examples:
        >>> import kerasmem
        >>> import pathlib, tempfile
        >>> log = pathlib.Path(tempfile.mkdtemp()) / "run.csv"
        >>> _ = log.write_text("run,time,phase,peak_bytes\\n0,0.5,train,900\\n0,0.75,train,700\\n")
        >>> "Memory over time" in kerasmem.report_page(kerasmem.read_timeline(log)).html
        True
    """
    from kerasmem.monitoring.log_summary import LogSummary, summarise
    from kerasmem.rendering.page import render_page
    from kerasmem.rendering.report_contents import PageContents, SavedReport

    logs: list[LogSummary] = []
    reports: list[SavedReport] = []
    for result in results:
        if isinstance(result, Timeline):
            logs.append(summarise(result, f"log {len(logs) + 1}"))
        elif isinstance(result, (MemoryReport, StepProfile)):
            name = f"{'profile' if isinstance(result, StepProfile) else 'estimate'} {len(reports) + 1}"
            reports.append(SavedReport(name, result))
        else:
            raise UsageError(f"results must be {_RESULTS}; got {type(result).__name__}")
    if not results:
        raise UsageError(f"results must be {_RESULTS}; got none")
    return ReportPage(render_page(PageContents(tuple(logs), tuple(reports), title)))
