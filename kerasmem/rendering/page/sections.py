"""The page's parts, in order: figures, runs, ranks, time, composition, estimate beside measured, notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kerasmem.monitoring.log_summary import LogSummary, RunSummary
from kerasmem.monitoring.rank_logs import TrainingLogs
from kerasmem.rendering.contents import Composition, PageContents
from kerasmem.rendering.escape import html_attribute, html_text
from kerasmem.rendering.page import tables
from kerasmem.rendering.page.charts import Bar, Chart, bars, by_category, by_layer, over_time
from kerasmem.rendering.page.verdicts import limit_of
from kerasmem.rendering.runs_table import kept_rows, peak_place, run_name
from kerasmem.units import format_size

_MOST_LAYERS = 20
_MOST_CHARTS = 16  # of runs over time
_MOST_POINTS = 3000  # of a line
_DRAWN_POINTS = 50_000  # of all lines of a page together: less than 1 MB
_MOST_BARS = 24
_MOST_NOTES = 40


class Sections:
    """Writes the sections of a page.

    Args:
        contents: what goes onto it.

    Attributes:
        charts: those that the sections written so far have places for.
    """

    def __init__(self, contents: PageContents) -> None:
        self.charts: list[Chart] = []
        self._contents = contents

    def all(self) -> str:
        """Return the HTML of all sections that the contents call for."""
        parts = [self._figures(), *self._runs(), *self._ranks(), *self._time(), *self._composition()]
        return "\n".join([*parts, *self._beside(), *self._notes()])

    def _place(self, chart: Chart) -> str:
        self.charts.append(chart)
        caption = html_text(chart.caption)
        return (
            f'<figure><figcaption id="{chart.name}-caption">{caption}</figcaption>'
            f'<div class="chart" id="{chart.name}" role="img" aria-labelledby="{chart.name}-caption"></div></figure>'
        )

    def _name(self) -> str:
        return f"chart{len(self.charts)}"

    # ------------------------------------------------------------- sections

    def _figures(self) -> str:
        found: list[tuple[str, str, str]] = []

        def largest(name: str) -> tuple[int, LogSummary, RunSummary] | None:
            every = ((getattr(run, name), log, run) for log in self._contents.logs for run in log.runs)
            return max((each for each in every if each[0] is not None), key=lambda each: each[0], default=None)

        if peak := largest("peak_bytes"):
            where = f"{run_name(*peak[1:])}: {peak_place(peak[2])}"
            found.append(("Largest allocator peak", format_size(peak[0]), where))
        if host := largest("rss_bytes"):
            found.append(("Largest host process", format_size(host[0]), run_name(*host[1:])))
        if card := largest("driver_used_bytes"):
            total = card[2].driver_total_bytes
            found.append(("In use on the card", format_size(card[0]), f"of {format_size(total)}" if total else ""))
        for title, group in (("estimated", self._contents.estimates), ("measured", self._contents.profiles)):
            if group:
                most = max(group, key=lambda each: each.total)
                found.append((f"Largest {title} step", format_size(most.total), _settings(most)))
        cells = "".join(
            f'<div><dt>{name}</dt><dd>{value}<span class="where">{html_text(where, 120)}</span></dd></div>'
            for name, value, where in found
        )
        return f'<dl class="figures">{cells}</dl>'

    def _runs(self) -> Iterator[str]:
        if not any(log.runs for log in self._contents.logs):
            return
        kept, _ = kept_rows(self._contents.trainings, _MOST_BARS)
        parts = ["<h2>Run beside run</h2>"]
        known = [(log, run) for log, run in kept if run.peak_bytes is not None or run.rss_bytes is not None]
        if len(known) > 1:
            names = [run_name(log, run) for log, run in known]
            series = _largest_sizes([run for _, run in known])
            limit = limit_of(self._contents)
            parts.append(self._place(bars(self._name(), "The largest sizes of each run", names, series, limit=limit)))
        parts.append(tables.runs(self._contents.trainings))
        parts.append(
            '<p class="soft">Growth is the last fifth’s median less the second fifth’s: what came on top once the '
            "run had warmed up.</p>"
        )
        yield _section(parts)

    def _ranks(self) -> Iterator[str]:
        for training in self._contents.trainings:
            if len(training.logs) > 1:
                yield _section(self._ranks_of(training))

    def _ranks_of(self, training: TrainingLogs) -> Iterator[str]:
        yield f"<h2>{len(training.logs)} ranks</h2><p>{html_text(training.name)}</p>"
        logs = training.logs[:_MOST_BARS]
        if series := _largest_sizes(logs):
            names = [f"rank {log.rank}" for log in logs]
            limit = limit_of(self._contents)
            yield self._place(bars(self._name(), "The largest sizes of each rank", names, series, limit=limit))
        yield tables.ranks(training)
        if training.missing_ranks:
            missing = ", ".join(map(str, training.missing_ranks[:20]))
            yield f"<p>No log was given of rank {missing}.</p>"

    def _time(self) -> Iterator[str]:
        curves = [(log, stretch) for log in self._contents.logs for stretch in log.curves if stretch.lines]
        if not curves:
            return
        parts = ["<h2>Memory over time</h2>"]
        drawn = curves[:_MOST_CHARTS]
        most = min(_MOST_POINTS, _DRAWN_POINTS // sum(len(stretch.lines) for _, stretch in drawn))
        for log, stretch in drawn:
            parts.append(f"<h3>{html_text(log.name)}{_which_runs(log, stretch.runs)}</h3>")
            readings = max(line.readings for line in stretch.lines)
            caption = "Dotted lines are where epochs begin; drag to zoom, double-click to go back."
            if any(min(most, len(line.values)) < line.readings for line in stretch.lines):
                caption += f" {readings:,} readings, thinned; each stretch keeps its largest and least."
            limit = limit_of(self._contents, log)
            parts.append(self._place(over_time(self._name(), caption, stretch, limit, most)))
            parts.append(tables.folded("Epoch by epoch, as a table", tables.epochs(log, stretch.runs)))
            if log.phases and stretch is log.curves[0]:
                parts.append(tables.folded("Phase by phase, as a table", tables.phases(log.phases)))
        if len(curves) > _MOST_CHARTS:
            parts.append(f'<p class="soft">{len(curves) - _MOST_CHARTS} more are in the table of runs alone.</p>')
        yield _section(parts)

    def _composition(self) -> Iterator[str]:
        every = self._contents.compositions
        if not every:
            return
        parts = ["<h2>What the peak is made of</h2>"]
        shown = every[:_MOST_BARS]
        if any(part for each in shown for _, part in each.categories):
            parts.append(self._place(by_category(self._name(), shown, limit_of(self._contents))))
            parts.append(tables.folded("By category, as a table", tables.categories(shown)))
        paired = {id(profile) for each in self._contents.estimates if (profile := self._contents.profile_for(each))}
        for each in shown:
            if id(each) not in paired and (each.is_measured or self._contents.profile_for(each) is None):
                parts += self._layers(each)  # the others stand beside their partner, below
        yield _section(parts)

    def _layers(self, each: Composition) -> Iterator[str]:
        yield f"<h3>{html_text(each.source)}</h3>"
        yield f'<p class="soft">{html_text(_settings(each))}{_verdict(each)}</p>'
        if not each.largest_layers:
            yield "<p>This method does not divide the peak by layer.</p>"
            return
        yield self._place(by_layer(self._name(), each, _MOST_LAYERS))
        yield tables.folded("By layer, as a table", tables.layers(each))

    def _beside(self) -> Iterator[str]:
        contents = self._contents
        kept, _ = kept_rows(contents.trainings, _MOST_BARS)
        peaks = [(run_name(log, run), run.peak_bytes) for log, run in kept if run.peak_bytes is not None]
        if not contents.estimates or not (contents.profiles or peaks):
            return
        parts = ["<h2>Estimated beside measured</h2>"]
        estimates, profiles = contents.estimates[:_MOST_BARS], contents.profiles[:_MOST_BARS]
        rows = [each.source for each in (*estimates, *profiles)] + [name for name, _ in peaks]
        measured = [Bar(total) for total in (*(each.total for each in profiles), *(peak for _, peak in peaks))]
        known = [bar.bytes for bar in measured if bar.bytes is not None]
        estimated = [
            Bar(each.total, each.lower_end or each.total, each.high, any(tables.misses(each, peak) for peak in known))
            for each in estimates
        ]
        series = [
            ("estimated", "estimated", [*estimated, *[Bar(None)] * len(measured)]),
            ("measured", "measured", [*[Bar(None)] * len(estimated), *measured]),
        ]
        caption = (
            "Peaks. The thin line is the interval that the estimate claims: red where a measured peak lies outside."
        )
        chart = bars(self._name(), caption, rows, series, limit=limit_of(contents))
        parts += [self._place(chart), tables.beside_measured(contents)]
        for estimate in estimates:
            profile = contents.profile_for(estimate)
            if profile is not None:
                parts += self._layer_by_layer(estimate, profile)
        yield _section(parts)

    def _layer_by_layer(self, estimate: Composition, profile: Composition) -> Iterator[str]:
        yield f"<h3>{html_text(estimate.source)} beside {html_text(profile.source)}, layer by layer</h3>"
        differing = [
            f"{name} ({html_text(ours)} estimated, {html_text(theirs)} measured)"
            for name, ours, theirs in (
                ("batch size", estimate.batch_size, profile.batch_size),
                ("mode", estimate.mode, profile.mode),
                ("execution", estimate.execution, profile.execution),
            )
            if ours != theirs and not {None, "none"} & {ours, theirs}
        ]
        if differing:
            yield f"<p>Not the same step: they differ in {', '.join(differing)}.</p>"
        ours = {layer.name: layer.bytes for layer in estimate.layers}
        theirs = {layer.name: layer.bytes for layer in profile.layers}
        names = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) or theirs.get(name)]
        names.sort(key=lambda name: -max(ours.get(name) or 0, theirs.get(name) or 0))
        top = names[:_MOST_LAYERS]
        series = [
            (role, role, [Bar(column.get(name)) for name in top])
            for role, column in (("estimated", ours), ("measured", theirs))
        ]
        caption = f"At the peak, the largest {len(top)} of {len(names)} layers that hold something"
        if not estimate.is_at_peak:
            caption += "; this estimate divides its total by layer and does not say what each holds at the peak"
        yield self._place(bars(self._name(), caption, top, series))
        yield tables.folded("Layer by layer, as a table", tables.layers(estimate, profile))

    def _notes(self) -> Iterator[str]:
        lines: list[str] = []
        for log in self._contents.logs:
            lines += [f"{html_text(log.name)}: {html_text(note, 600)}" for note in log.notes]
        for each in self._contents.compositions:
            lines += [f"{html_text(each.source)}: {html_text(note, 600)}" for note in each.notes]
            lines += [f"{html_text(each.source)}, not in the total: {html_text(note, 600)}" for note in each.unmodelled]
        if lines:
            shown = "".join(f"<li>{line}</li>" for line in lines[:_MOST_NOTES])
            rest = f"<p>and {len(lines) - _MOST_NOTES} more</p>" if len(lines) > _MOST_NOTES else ""
            title = f"What the figures leave out ({len(lines)} notes)"
            yield _section([tables.folded(title, f"<ul>{shown}</ul>{rest}")])


def _largest_sizes(every: Sequence[RunSummary] | Sequence[LogSummary]) -> list[tuple[str, str, list[Bar]]]:
    """Return the series of allocator peaks and of host processes, where any is known."""
    sizes = (("allocator peak", "peak", "peak_bytes"), ("host process", "host", "rss_bytes"))
    series = [(title, role, [Bar(getattr(each, name)) for each in every]) for title, role, name in sizes]
    return [each for each in series if any(bar.bytes is not None for bar in each[2])]


def _section(parts: Iterable[str]) -> str:
    return "<section>" + "\n".join(parts) + "</section>"


def _which_runs(log: LogSummary, span: tuple[int, int]) -> str:
    if len(log.runs) < 2:
        return ""
    return f", run {span[0] + 1}" if span[0] == span[1] else f", runs {span[0] + 1} to {span[1] + 1}"


def _settings(each: Composition) -> str:
    parts = [each.model, None if each.batch_size is None else f"batch {each.batch_size:,}", each.mode]
    parts += [each.optimizer, each.how, each.execution if each.execution != each.how else None]
    return ", ".join(str(part) for part in parts if part and part != "none")


def _verdict(each: Composition) -> str:
    if each.device is None:
        return ""
    name, verdict = each.device
    kind = verdict.replace(" ", "-") if verdict in ("fits", "does not fit", "too close to call") else ""
    return f'; {html_text(name)}: <b class="{html_attribute(kind)}">{html_text(verdict)}</b>'
