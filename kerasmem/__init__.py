"""kerasmem: memory answers for people who train Keras/TensorFlow models.

`import kerasmem` is cheap: each public name is loaded on first use, and TensorFlow only with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC = {
    "estimate": "kerasmem.estimation.facade",
    "MemoryReport": "kerasmem.estimation.report",
    "measure": "kerasmem.estimation.probe.measurement",
    "max_batch_size": "kerasmem.estimation.sizing",
    "find_batch_size": "kerasmem.estimation.sizing",
    "SearchResult": "kerasmem.estimation.search",
    "summary": "kerasmem.front",
    "MemoryLogger": "kerasmem.monitoring.logger",
    "LeakWatch": "kerasmem.monitoring.leak_watch",
    "Timeline": "kerasmem.monitoring.timeline",
    "read_timeline": "kerasmem.monitoring",
    "track": "kerasmem.front_track",
    "tracked": "kerasmem.front_track",
    "explain_oom": "kerasmem.recovery.explaining",
    "fit": "kerasmem.front_fit.fitting",
    "advise": "kerasmem.recovery.advising.facade",
    "Advice": "kerasmem.recovery.advising.advice",
    "run_isolated": "kerasmem.recovery.isolation.running",
    "IsolatedRun": "kerasmem.recovery.isolation.results",
    "BestWeights": "kerasmem.recovery.isolation.best",
    "recompute": "kerasmem.recovery.segments.building",
    "enable_memory_growth": "kerasmem.devices.growth",
    "H5ChunkSequence": "kerasmem.streaming.sequence",
    "ResumeTraining": "kerasmem.streaming.resume",
    "inspect_data": "kerasmem.streaming.inspecting.inspection",
    "convert_data": "kerasmem.streaming.converting.conversion",
    "repack_data": "kerasmem.streaming.converting.repacking",
    "data_stats": "kerasmem.streaming.inspecting.statistics",
    "bench_data": "kerasmem.streaming.inspecting.benching",
    "KerasmemError": "kerasmem.errors",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from kerasmem.devices.growth import enable_memory_growth as enable_memory_growth
    from kerasmem.errors import KerasmemError as KerasmemError
    from kerasmem.estimation.facade import estimate as estimate
    from kerasmem.estimation.probe.measurement import measure as measure
    from kerasmem.estimation.report import MemoryReport as MemoryReport
    from kerasmem.estimation.search import SearchResult as SearchResult
    from kerasmem.estimation.sizing import find_batch_size as find_batch_size
    from kerasmem.estimation.sizing import max_batch_size as max_batch_size
    from kerasmem.front import summary as summary
    from kerasmem.front_fit.fitting import fit as fit
    from kerasmem.front_track import track as track
    from kerasmem.front_track import tracked as tracked
    from kerasmem.monitoring import read_timeline as read_timeline
    from kerasmem.monitoring.leak_watch import LeakWatch as LeakWatch
    from kerasmem.monitoring.logger import MemoryLogger as MemoryLogger
    from kerasmem.monitoring.timeline import Timeline as Timeline
    from kerasmem.recovery.advising.advice import Advice as Advice
    from kerasmem.recovery.advising.facade import advise as advise
    from kerasmem.recovery.explaining import explain_oom as explain_oom
    from kerasmem.recovery.isolation.best import BestWeights as BestWeights
    from kerasmem.recovery.isolation.results import IsolatedRun as IsolatedRun
    from kerasmem.recovery.isolation.running import run_isolated as run_isolated
    from kerasmem.recovery.segments.building import recompute as recompute
    from kerasmem.streaming.converting.conversion import convert_data as convert_data
    from kerasmem.streaming.converting.repacking import repack_data as repack_data
    from kerasmem.streaming.inspecting.benching import bench_data as bench_data
    from kerasmem.streaming.inspecting.inspection import inspect_data as inspect_data
    from kerasmem.streaming.inspecting.statistics import data_stats as data_stats
    from kerasmem.streaming.resume import ResumeTraining as ResumeTraining
    from kerasmem.streaming.sequence import H5ChunkSequence as H5ChunkSequence


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kerasmem' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
