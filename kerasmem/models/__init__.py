"""Models: from a file, function or Keras object to a Keras model without weights and its training step."""
