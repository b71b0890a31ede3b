"""Log the memory of a running `fit`.

============= =======================================================================
logger        `MemoryLogger`, the Keras callback: translates Keras's hooks
recorder      turns beginnings and ends of runs, epochs and batches into samples
run_log       the samples, in memory and in the log file; the cost of logging
device_reader readings of devices and driver, with true peaks
sampler       background thread for readings between hooks, phase by phase
epoch_maxima  the largest sizes of an epoch
timeline      `Sample` and `Timeline`: the result
logfile       CSV and JSON lines that survive a crash, written and read back
log_summary   peaks, means and growth of each run
curves        sizes over time, thinned for charts
tracking      `track`: the memory that one action takes
leak_watch    `LeakWatch`: distinguishes lasting growth from warm-up and noise
evidence      objects that grow with the memory: containers of arrays, graphs, tracings
============= =======================================================================

`Timeline`, `Sample` and `read_timeline` are imported here, without TensorFlow.
"""

from __future__ import annotations

from kerasmem.monitoring.logfile import read_timeline
from kerasmem.monitoring.timeline import Sample, Timeline

__all__ = ["Sample", "Timeline", "read_timeline"]
