"""`kerasmem profile`: real steps in a process of their own, recorded, beside what the estimate says of them.

It joins rooms that do not know one another: estimation's process that runs steps, XLA's plan and the allocator's
simulation, and monitoring's replay of the recording.
"""
