"""The page's parts, in order: figures, runs, ranks, time, composition, estimate beside measured, notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kerasmem.monitoring.digest import LogSummary
from kerasmem.monitoring.merging import Training
from kerasmem.rendering.composition import Composition
from kerasmem.rendering.page import tables
from kerasmem.rendering.page.charts import Bar, Chart, bars, over_time
from kerasmem.rendering.page.contents import PageContents
from kerasmem.rendering.page.markup import attribute, text
from kerasmem.rendering.runs_table import kept_rows, peak_place, run_name
from kerasmem.units import format_size

_MOST_LAYERS = 20
_MOST_CHARTS = 16  # of runs over time
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
        caption = text(chart.caption)
        return (
            f'<figure><figcaption id="{chart.name}-caption">{caption}</figcaption>'
            f'<div class="chart" id="{chart.name}" role="img" aria-labelledby="{chart.name}-caption" '
            f'data-height="{chart.height}"></div></figure>'
        )

    def _name(self) -> str:
        return f"chart{len(self.charts)}"

    # ------------------------------------------------------------- sections

    def _figures(self) -> str:
        found: list[tuple[str, str, str]] = []
        every = [(log, run) for log in self._contents.logs for run in log.runs]
        peaks = [(run.peak_bytes, log, run) for log, run in every if run.peak_bytes is not None]
        if peaks:
            peak, log, run = max(peaks, key=lambda item: item[0])
            found.append(("Largest allocator peak", format_size(peak), f"{run_name(log, run)}: {peak_place(run)}"))
        hosts = [(run.rss_bytes, log, run) for log, run in every if run.rss_bytes is not None]
        if hosts:
            host, log, run = max(hosts, key=lambda item: item[0])
            found.append(("Largest host process", format_size(host), run_name(log, run)))
        cards = [(run.driver_used_bytes, run) for _, run in every if run.driver_used_bytes is not None]
        if cards:
            used, run = max(cards, key=lambda item: item[0])
            total = run.driver_total_bytes
            found.append(("In use on the card", format_size(used), f"of {format_size(total)}" if total else ""))
        for title, group in (("estimated", self._contents.estimates), ("measured", self._contents.profiles)):
            if group:
                largest = max(group, key=lambda each: each.total)
                found.append((f"Largest {title} step", format_size(largest.total), _settings(largest)))
        cells = "".join(
            f'<div><dt>{name}</dt><dd>{value}<span class="where">{text(where, 120)}</span></dd></div>'
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
            series = [
                ("allocator peak", "peak", [Bar(run.peak_bytes) for _, run in known]),
                ("host process", "host", [Bar(run.rss_bytes) for _, run in known]),
            ]
            series = [each for each in series if any(bar.bytes is not None for bar in each[2])]
            parts.append(self._place(bars(self._name(), "The largest sizes of each run", names, series)))
        parts.append(tables.runs(self._contents.trainings))
        parts.append(
            '<p class="soft">Growth is the last fifth’s median less the second fifth’s: what came on top once the '
            "run had warmed up.</p>"
        )
        yield _section(parts)

    def _ranks(self) -> Iterator[str]:
        for training in self._contents.trainings:
            if len(training.logs) > 1:
                yield _section(self._one_training(training))

    def _one_training(self, training: Training) -> list[str]:
        parts = [f"<h2>{len(training.logs)} ranks</h2><p>{text(training.name)}</p>"]
        logs = training.logs[:_MOST_BARS]
        series = [
            ("allocator peak", "peak", [Bar(log.peak_bytes) for log in logs]),
            ("host process", "host", [Bar(log.rss_bytes) for log in logs]),
        ]
        series = [each for each in series if any(bar.bytes is not None for bar in each[2])]
        if series:
            names = [f"rank {log.rank}" for log in logs]
            parts.append(self._place(bars(self._name(), "The largest sizes of each rank", names, series)))
        parts.append(tables.ranks(training))
        if training.missing_ranks:
            missing = ", ".join(map(str, training.missing_ranks[:20]))
            parts.append(f"<p>No log was given of rank {missing}.</p>")
        return parts

    def _time(self) -> Iterator[str]:
        courses = [(log, course) for log in self._contents.logs for course in log.courses if course.lines]
        if not courses:
            return
        parts = ["<h2>Memory over time</h2>"]
        for log, course in courses[:_MOST_CHARTS]:
            parts.append(f"<h3>{text(log.name)}{_which_runs(log, course.runs)}</h3>")
            readings = max(line.readings for line in course.lines)
            caption = "Dotted lines are where epochs begin; drag to zoom, double-click to go back."
            if course.phases:
                named = ", ".join(dict.fromkeys(span.phase for span in course.phases))
                caption += f" Shaded: {named}."
            if any(len(line.values) < line.readings for line in course.lines):
                caption += f" {readings:,} readings, thinned; each stretch keeps its largest and least."
            parts.append(self._place(over_time(self._name(), caption, course)))
            parts.append(tables.folded("Epoch by epoch, as a table", tables.epochs(log, course.runs)))
            if log.phases and course is log.courses[0]:
                parts.append(tables.folded("Phase by phase, as a table", tables.phases(log.phases)))
        if len(courses) > _MOST_CHARTS:
            parts.append(f'<p class="soft">{len(courses) - _MOST_CHARTS} more are in the table of runs alone.</p>')
        yield _section(parts)

    def _composition(self) -> Iterator[str]:
        every = self._contents.compositions
        if not every:
            return
        parts = ["<h2>What the peak is made of</h2>"]
        shown = every[:_MOST_BARS]
        names = list(dict.fromkeys(name for each in shown for name, part in each.categories if part))
        if names:
            series = [
                (name, f"c{place % 8}", [Bar(dict(each.categories).get(name)) for each in shown])
                for place, name in enumerate(names[:16])
            ]
            rows = [f"{each.source}" for each in shown]
            parts.append(self._place(bars(self._name(), "The peak by category", rows, series, stacked=True)))
            parts.append(tables.folded("By category, as a table", tables.categories(shown)))
        paired = {id(profile) for each in self._contents.estimates if (profile := self._contents.profile_for(each))}
        for each in shown:
            if id(each) in paired or (not each.is_measured and self._contents.profile_for(each) is not None):
                continue  # beside its partner, below
            parts += [f"<h3>{text(each.source)}</h3>", f'<p class="soft">{text(_settings(each))}{_verdict(each)}</p>']
            known = sorted((layer for layer in each.layers if layer.bytes), key=lambda layer: -(layer.bytes or 0))
            if not known:
                parts.append("<p>This method does not divide the peak by layer.</p>")
                continue
            kind = "What each layer holds at the peak" if each.is_at_peak else "Each layer’s share of the total"
            top = known[:_MOST_LAYERS]
            caption = f"{kind}, the largest {len(top)} of {len(each.layers)} layers"
            column = [Bar(layer.bytes) for layer in top]
            role = "measured" if each.is_measured else "estimated"
            rows = [layer.name for layer in top]
            parts.append(self._place(bars(self._name(), caption, rows, [(role, role, column)])))
            parts.append(tables.folded("By layer, as a table", tables.layers(each)))
        yield _section(parts)

    def _beside(self) -> Iterator[str]:
        contents = self._contents
        kept, _ = kept_rows(contents.trainings, _MOST_BARS)
        peaks = [(run_name(log, run), run.peak_bytes) for log, run in kept if run.peak_bytes is not None]
        if not contents.estimates or not (contents.profiles or peaks):
            return
        parts = ["<h2>Estimated beside measured</h2>"]
        estimates, profiles = contents.estimates[:_MOST_BARS], contents.profiles[:_MOST_BARS]
        rows = [each.source for each in (*estimates, *profiles)] + [name for name, _ in peaks]
        nothing = Bar(None)
        measured = [*(Bar(each.total) for each in profiles), *(Bar(peak) for _, peak in peaks)]
        estimated = [Bar(each.total, each.low, each.high) for each in estimates]
        series = [
            ("estimated", "estimated", [*estimated, *[nothing] * len(measured)]),
            ("measured", "measured", [*[nothing] * len(estimated), *measured]),
        ]
        chart = bars(self._name(), "Peaks; the thin line is the interval that the estimate claims", rows, series)
        chart.layout["barmode"] = "overlay"
        parts += [self._place(chart), tables.beside_measured(contents)]
        for estimate in estimates:
            profile = contents.profile_for(estimate)
            if profile is not None:
                parts += self._layer_by_layer(estimate, profile)
        yield _section(parts)

    def _layer_by_layer(self, estimate: Composition, profile: Composition) -> Iterator[str]:
        yield f"<h3>{text(estimate.source)} beside {text(profile.source)}, layer by layer</h3>"
        differing = [
            f"{name} ({text(ours)} estimated, {text(theirs)} measured)"
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
            lines += [f"{text(log.name)}: {text(note, 600)}" for note in log.notes]
        for each in self._contents.compositions:
            lines += [f"{text(each.source)}: {text(note, 600)}" for note in each.notes]
            lines += [f"{text(each.source)}, not in the total: {text(note, 600)}" for note in each.unmodelled]
        if lines:
            shown = "".join(f"<li>{line}</li>" for line in lines[:_MOST_NOTES])
            rest = f"<p>and {len(lines) - _MOST_NOTES} more</p>" if len(lines) > _MOST_NOTES else ""
            yield _section(
                [tables.folded(f"What the figures leave out ({len(lines)} notes)", f"<ul>{shown}</ul>{rest}")]
            )


def _section(parts: Sequence[str]) -> str:
    return "<section>" + "\n".join(parts) + "</section>"


def _which_runs(log: LogSummary, span: tuple[int, int]) -> str:
    if len(log.runs) < 2:
        return ""
    return f", run {span[0] + 1}" if span[0] == span[1] else f", runs {span[0] + 1} to {span[1] + 1}"


def _settings(each: Composition) -> str:
    how = "measured" if each.is_measured else each.method
    parts = [each.model, None if each.batch_size is None else f"batch {each.batch_size:,}", each.mode]
    parts += [each.optimizer, how, each.execution if each.execution != how else None]
    return ", ".join(str(part) for part in parts if part and part != "none")


def _verdict(each: Composition) -> str:
    if each.device is None:
        return ""
    name, verdict = each.device
    kind = verdict.replace(" ", "-") if verdict in ("fits", "does not fit", "too close to call") else ""
    return f'; {text(name)}: <b class="{attribute(kind)}">{text(verdict)}</b>'
