"""How much memory is it using? A running fit → a Timeline.

======== ================================================================================
logger   `MemoryLogger`, the Keras callback: which hook means what
calls    which fit, evaluate or predict a hook comes from
meter    one reading of all devices, the driver and the host; peaks of batch, epoch and run
peaks    one allocator's peaks, shared by all who read it
arguments what is wrong with its arguments
cost     what the logger itself costs
timeline `Sample` and `Timeline`: the result, and its plain-data form
rows     samples in compact columns, for runs of a million batches
logfile  CSV and JSON lines that survive a crash, written and read back
board    scalars for TensorBoard
======== ================================================================================

`Timeline`, `Sample` and `read_timeline` are here too; none of them needs TensorFlow.
"""

from __future__ import annotations

from kerasmem.monitoring.logfile import read_timeline
from kerasmem.monitoring.timeline import EpochPeaks, Sample, Timeline

__all__ = ["EpochPeaks", "Sample", "Timeline", "read_timeline"]
