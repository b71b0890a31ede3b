"""`kerasmem report`."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.options import all_of
from kerasmem.cli.terminal import show_json, show_text
from kerasmem.errors import InputError, UsageError
from kerasmem.files import json_object, write_named

if TYPE_CHECKING:
    from kerasmem.rendering.report_contents import PageContents


_LARGEST_LOG = 2 * 2**30


@click.command("report", cls=GuardedCommand)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@all_of("--output", "--json")
def report_command(files: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Show runs, estimates and profiles as a page, a table or JSON.

    FILEs are logs of MemoryLogger (.jsonl, .csv), and the results of `kerasmem estimate --json` and
    `kerasmem profile --json`. --output writes an HTML page that needs no network. By default, tables are printed.

    Examples:
      kerasmem report run.jsonl -o page.html
      kerasmem report before.jsonl after.jsonl estimate.json profile.json -o page.html
      kerasmem report run.rank*.jsonl --json
    """
    _check_output(files, output)
    contents = _read(files)
    if output is not None:
        from kerasmem.rendering.page import render_page

        try:
            write_named(output, render_page(contents).encode())
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"--output {output} cannot be written: {reason}; choose another path") from error
    if as_json:
        reports = [{"source": saved.source, **saved.report.to_dict()} for saved in contents.reports]
        show_json({"format_version": 1, "logs": [log.to_dict() for log in contents.logs], "reports": reports})
    elif output is None:
        from kerasmem.rendering.report_contents import reports_table, runs_table

        if contents.logs:
            show_text(lambda terminal: runs_table(contents.logs, terminal))
        if contents.reports:
            show_text(lambda terminal: reports_table(contents.reports, terminal))


def _check_output(files: tuple[str, ...], output: str | None) -> None:
    """Refuse a repeated file, and an output that would overwrite an input."""
    inputs: set[str] = set()
    for path in files:
        if os.path.realpath(path) in inputs:
            raise UsageError(f"{path}: each file must be passed once; got it twice")
        inputs.add(os.path.realpath(path))
    if output is not None and os.path.realpath(output) in inputs:
        raise UsageError(f"--output must not be an input; got {output}")


def _read(files: tuple[str, ...]) -> PageContents:
    from kerasmem.monitoring.log_summary import LogSummary, summarise_file
    from kerasmem.rendering.report_contents import PageContents, SavedReport, read_report

    reports: list[SavedReport] = []
    logs: list[LogSummary] = []
    for path in files:
        _check_readable(path)
        data = json_object(path)
        if data is None or "kind" in data:
            log = summarise_file(path)
            if not log.rows:
                raise InputError(f"{path}: has no samples; the run may have ended before its first batch")
            logs.append(log)
        elif "bytes" in data:
            reports.append(read_report(data, path))
        else:
            raise InputError(
                f"{path}: the JSON of an estimate or a profile must have the field bytes; write one with "
                "kerasmem estimate MODEL --json > estimate.json"
            )
    return PageContents(tuple(logs), tuple(reports))


def _check_readable(path: str) -> None:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: must be a log or a saved report, not a folder or device")
        open(path, "rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read: {reason}; check the name") from error
    if status.st_size > _LARGEST_LOG:
        raise InputError(f"{path}: must be at most 2 GiB; log fewer batches: MemoryLogger(update_freq=100)")
    if status.st_size == 0:
        raise InputError(f"{path}: is empty; pass a log of MemoryLogger or a saved estimate")
