"""Runs and estimates in the text format that Prometheus scrapes, through prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from kerasmem.errors import MissingExtraError
from kerasmem.monitoring.rank_logs import TrainingLogs
from kerasmem.rendering.contents import Composition
from kerasmem.rendering.escape import printable

_RUN = {
    "peak_bytes": ("run_peak_bytes", "Largest bytes that the allocator handed out at once in a run."),
    "mean_in_use_bytes": ("run_in_use_mean_bytes", "Mean bytes in use after a batch."),
    "in_use_growth_bytes": ("run_in_use_growth_bytes", "Growth of bytes in use over a run, warm-up left out."),
    "reserved_bytes": ("run_reserved_bytes", "Largest bytes that the allocator took from the device."),
    "driver_used_bytes": ("run_driver_used_bytes", "Largest bytes in use on the card, by all processes."),
    "driver_total_bytes": ("run_driver_total_bytes", "The card's memory in bytes."),
    "rss_bytes": ("run_host_bytes", "Largest bytes of RAM that the training process held."),
    "mean_rss_bytes": ("run_host_mean_bytes", "Mean bytes of RAM that the training process held."),
    "rss_growth_bytes": ("run_host_growth_bytes", "Growth of the process's RAM over a run, warm-up left out."),
    "swap_bytes": ("run_swap_bytes", "Largest bytes of the training process in swap."),
    "batches": ("run_batches", "Batches logged in a run."),
    "seconds": ("run_seconds", "Seconds from a run's first reading to its last."),
}
_PART = "step_bytes"
_PART_HELP = "Bytes of a category at a step's peak; the category total is the peak itself."


def render_prometheus(trainings: Sequence[TrainingLogs], compositions: Sequence[Composition] = ()) -> str:
    """Return metrics as text, with HELP and TYPE lines and escaped labels; what is not known has no line.

    Args:
        trainings: a run is labelled with log, rank ("" for one process), run (from 0) and kind.
        compositions: labelled with source, model, method, batch_size and category.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import generate_latest
    except ImportError as error:
        raise MissingExtraError("Prometheus text", "prometheus") from error
    families = list(_families(trainings, compositions))
    return str(generate_latest(SimpleNamespace(collect=lambda: families)).decode())


def _families(trainings: Sequence[TrainingLogs], compositions: Sequence[Composition]) -> Iterator[Any]:
    """Yield a family for each metric that has a value."""
    from prometheus_client.core import GaugeMetricFamily

    runs = [(log, run) for training in trainings for log in training.logs for run in log.runs]
    for field, (name, text) in _RUN.items():
        family = GaugeMetricFamily(f"kerasmem_{name}", text, labels=("log", "rank", "run", "kind"))
        for log, run in runs:
            value = getattr(run, field)
            if value is not None:
                rank = "" if log.rank is None else str(log.rank)
                family.add_metric([printable(log.name), rank, str(run.run), printable(run.kind)], value)
        if family.samples:
            yield family
    labels = ("source", "model", "method", "batch_size", "category")
    family = GaugeMetricFamily(f"kerasmem_{_PART}", _PART_HELP, labels=labels)
    for each in compositions:
        batch = "" if each.batch_size is None else str(each.batch_size)
        head = [printable(each.source), printable(each.model), printable(each.method), batch]
        for category, count in (("total", each.total), *each.categories):
            family.add_metric([*head, printable(category)], count)
    if family.samples:
        yield family
