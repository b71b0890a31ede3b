"""kerasmem: memory answers for people who train Keras/TensorFlow models.

`import kerasmem` is fast: each public name is loaded on first use, and TensorFlow with it if needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name → its module
_PUBLIC = {
    "estimate": "kerasmem.estimation.estimating",
    "MemoryReport": "kerasmem.estimation.report",
    "estimate_many": "kerasmem.estimation.many",
    "measure": "kerasmem.estimation.measuring",
    "profile": "kerasmem.estimation.measuring",
    "max_batch_size": "kerasmem.estimation.sizing",
    "rank_cards": "kerasmem.estimation.card_ranking",
    "compare": "kerasmem.estimation.comparing",
    "summary": "kerasmem.display",
    "MemoryLogger": "kerasmem.monitoring.logger",
    "LeakWatch": "kerasmem.monitoring.leak_watch",
    "Timeline": "kerasmem.monitoring.timeline",
    "read_timeline": "kerasmem.monitoring",
    "report_page": "kerasmem.display",
    "track": "kerasmem.monitoring.tracking",
    "explain_oom": "kerasmem.diagnosis.explaining",
    "fit": "kerasmem.training.fitting",
    "find_executable_batch_size": "kerasmem.training.batch_size",
    "advise": "kerasmem.recovery.advising",
    "run_isolated": "kerasmem.training.isolation",
    "recompute": "kerasmem.training.recompute.building",
    "require_fit": "kerasmem.training.batch_size",
    "clear_session": "kerasmem.models.freeing",
    "doctor": "kerasmem.devices.examination",
    "enable_memory_growth": "kerasmem.devices.growth",
    "H5ChunkSequence": "kerasmem.streaming.sequence",
    "H5DataSource": "kerasmem.streaming.data_source",
    "ResumeTraining": "kerasmem.training.resume",
    "KerasmemError": "kerasmem.errors",
    "data": "kerasmem.data",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from kerasmem import data as data
    from kerasmem.devices.examination import doctor as doctor
    from kerasmem.devices.growth import enable_memory_growth as enable_memory_growth
    from kerasmem.diagnosis.explaining import explain_oom as explain_oom
    from kerasmem.display import report_page as report_page
    from kerasmem.display import summary as summary
    from kerasmem.errors import KerasmemError as KerasmemError
    from kerasmem.estimation.card_ranking import rank_cards as rank_cards
    from kerasmem.estimation.comparing import compare as compare
    from kerasmem.estimation.estimating import estimate as estimate
    from kerasmem.estimation.many import estimate_many as estimate_many
    from kerasmem.estimation.measuring import measure as measure
    from kerasmem.estimation.measuring import profile as profile
    from kerasmem.estimation.report import MemoryReport as MemoryReport
    from kerasmem.estimation.sizing import max_batch_size as max_batch_size
    from kerasmem.models.freeing import clear_session as clear_session
    from kerasmem.monitoring import read_timeline as read_timeline
    from kerasmem.monitoring.leak_watch import LeakWatch as LeakWatch
    from kerasmem.monitoring.logger import MemoryLogger as MemoryLogger
    from kerasmem.monitoring.timeline import Timeline as Timeline
    from kerasmem.monitoring.tracking import track as track
    from kerasmem.recovery.advising import advise as advise
    from kerasmem.streaming.data_source import H5DataSource as H5DataSource
    from kerasmem.streaming.sequence import H5ChunkSequence as H5ChunkSequence
    from kerasmem.training.batch_size import find_executable_batch_size as find_executable_batch_size
    from kerasmem.training.batch_size import require_fit as require_fit
    from kerasmem.training.fitting import fit as fit
    from kerasmem.training.isolation import run_isolated as run_isolated
    from kerasmem.training.recompute.building import recompute as recompute
    from kerasmem.training.resume import ResumeTraining as ResumeTraining


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kerasmem' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    return module if name == "data" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
