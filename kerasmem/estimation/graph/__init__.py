"""The graph method: the traced step, TensorFlow's executor and its allocator, simulated."""
