"""The public functions that print: the Python counterparts of commands."""

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

_FRAME_HEIGHT = 720  # of a page in a notebook, in CSS pixels; it scrolls inside


def summary(
    model: Any,
    batch_size: int = DEFAULT_BATCH_SIZE,
    *,
    line_length: int | None = None,
    print_fn: Callable[[str], object] | None = None,
    show_trainable: bool = False,
    **options: Any,
) -> None:
    """Print the table of `model.summary(expand_nested=True)` with what each layer takes in memory.

    Args:
        model: a Keras model, or anything else that `kerasmem.estimate` takes.
        batch_size: samples in a batch.
        line_length: columns of a line.
        print_fn: called once with the whole text in place of printing it.
        show_trainable: show whether a layer is trained.
        **options: of `kerasmem.estimate`, such as `input_shape` or `dtype_policy`; the method is "formula", which
            answers at once, unless another is named.

    Raises:
        KerasmemError: as `kerasmem.estimate`.

    Examples:
        >>> import keras, kerasmem
        >>> kerasmem.summary(keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]), batch_size=16)
        ... # doctest: +SKIP
    """
    report = estimate(model, batch_size=batch_size, **{"method": "formula", **options})  # at once, as Keras's own is
    console = Console(emoji=False, markup=False, highlight=False)
    width = line_length or (min(DEFAULT_WIDTH, console.width) if print_fn is None else DEFAULT_WIDTH)
    table = summary_table(report, width, show_trainable=show_trainable)
    if print_fn is None:
        console.print(table)
    else:
        print_fn(plain_text(table, line_length or DEFAULT_WIDTH))


@dataclass(frozen=True)
class ReportPage:
    """The page that `kerasmem report` writes. A notebook shows it in the cell.

    Attributes:
        html: the whole page, which needs no network.
    """

    html: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page into a file.

        Raises:
            OSError: it cannot be written.
        """
        write_named(os.fspath(path), self.html.encode())

    def _repr_html_(self) -> str:
        inside = html.escape(self.html)  # in a frame, whose policy and style do not meet the notebook's
        look = f"width: 100%; height: {_FRAME_HEIGHT}px; border: 0"
        return f'<iframe sandbox="" title="Memory report" style="{look}" srcdoc="{inside}"></iframe>'


def report_page(*results: Any, title: str = "Memory report") -> ReportPage:
    """Lay results side by side on one page: memory over time, the peak by category and layer, verdicts.

    Args:
        *results: a `Timeline` (`logger.timeline`, or what `kerasmem.read_timeline` gave), a `MemoryReport`, or the
            profile of a step (`logger.profile`).
        title: the page's heading.

    Returns:
        The page: the last line of a notebook's cell shows it, `save` writes it.

    Raises:
        UsageError: nothing was given, or a result of another kind.

    Examples:
        >>> import kerasmem
        >>> import pathlib, tempfile
        >>> log = pathlib.Path(tempfile.mkdtemp()) / "run.csv"
        >>> _ = log.write_text("run,time,phase,peak_bytes\\n0,0.5,train,900\\n0,0.75,train,700\\n")
        >>> "Memory over time" in report_page(kerasmem.read_timeline(log)).html
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
            raise UsageError(
                f"report_page: {type(result).__name__} is no Timeline, MemoryReport or profile; "
                "read a log with kerasmem.read_timeline, or use kerasmem report for files"
            )
    if not results:
        raise UsageError("report_page: nothing was given; give logger.timeline, or what kerasmem.estimate returned")
    return ReportPage(render_page(PageContents(tuple(logs), tuple(reports), title)))
