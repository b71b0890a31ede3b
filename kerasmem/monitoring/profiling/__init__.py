"""One step, allocation by allocation: what is in memory at its peak, in the words of Keras.

========== ==============================================================================
holdings   what is in memory before and after a step: variables, batch, constants, by address
replaying  the allocator's events replayed: the timeline, the peak, the chunks live at it (pure)
naming     each of those chunks → layer and category (pure)
results    the frozen result, to and from JSON (pure)
assembling from a recording to the result
recorder   begin and end of a profiled batch in a running process
callback   `StepProfiler`, the Keras callback
========== ==============================================================================
"""
