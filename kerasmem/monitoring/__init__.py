"""How much memory is it using? A running fit → a Timeline.

============ ================================================================================
logger       `MemoryLogger`, the Keras callback; hooks: which of Keras's hooks means what
one_profile  the profile of one batch inside a logged run; profiling has how that is made
calls        which fit, evaluate or predict a hook comes from
batches      what a hook catches, and how samples are made of it later
meter        one reading of all devices, the driver and the host; peaks of batch, epoch and run
peaks        one allocator's peaks, shared by all who read it
arguments    what is wrong with its arguments
cost         what the logger itself costs
timeline     `Sample` and `Timeline`: the result, and its plain-data form
rows         samples in compact columns, for runs of a million batches
workers      which of several processes this is; ranks, merging: their logs side by side
outputs      the file and the board that a recorder writes to
logfile      CSV and JSON lines that survive a crash, written and read back
board        scalars for TensorBoard
results      what a logger has found, beside the hooks by which it finds it
sampler      the background thread: what is too slow for a hook, and what happens between hooks
phases       the phase of training that a reading falls in, and the largest sizes of each
inputs       arrays handed to fit that take twice the bytes they need
epoch_health how whole the allocators' free memory was, epoch by epoch
tracking     `track`: what one action cost; host_watch, the thread that reads beside it
growth       does a series of sizes grow on and on, or settle
evidence     what grows beside the memory: graphs, tracings, constants, kinds of objects
leak_watch   `LeakWatch`: samples of a loop, and the report on them
scene        one look at a machine, for `kerasmem watch`
============ ================================================================================

`Timeline`, `Sample` and `read_timeline` are here too; none of them needs TensorFlow.
"""

from __future__ import annotations

from kerasmem.monitoring.logfile import read_timeline
from kerasmem.monitoring.timeline import Sample, Timeline

__all__ = ["Sample", "Timeline", "read_timeline"]
