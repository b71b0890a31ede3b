"""XLA's plan of a step: read from XLA's messages, or compiled through Keras on JAX."""
