"""How much memory is it using? A running fit → a Timeline.

============= ===============================================================================
logger        `MemoryLogger`, the Keras callback: which of Keras's hooks means what
recorder      beginnings and ends of runs, epochs and batches → samples, in memory and in the log file
device_reader one reading of all devices and the driver; peaks of batch and run
peaks         one allocator's peaks, shared by all who read it
epoch_maxima  the largest sizes of an epoch
cost          what the logger itself costs
timeline      `Sample` and `Timeline`: the result
logfile       CSV and JSON lines that survive a crash, written and read back
log_summary   a log in brief; curves: its sizes over time
sampler       a thread for what is too slow for a hook, and what happens between hooks
phases        the phase of training that a reading falls in, and the largest sizes of each
tracking      `track`: what one action cost
evidence      what grows beside the memory: containers of arrays, graphs, tracings
leak_watch    `LeakWatch`: samples of a loop, whether they grow on and on, and the report on them
============= ===============================================================================

`Timeline`, `Sample` and `read_timeline` are here too; none of them needs TensorFlow.
"""

from __future__ import annotations

from kerasmem.monitoring.logfile import read_timeline
from kerasmem.monitoring.timeline import Sample, Timeline

__all__ = ["Sample", "Timeline", "read_timeline"]
