"""A step compiled by XLA through Keras on JAX, for devices that are not here, and what XLA's plan says of it."""
