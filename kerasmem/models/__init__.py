"""Any model a user has → a Keras model without weights, ready to be asked for its shapes."""
