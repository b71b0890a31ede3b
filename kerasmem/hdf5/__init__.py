"""HDF5 datasets as rows, in three layers: `rows` imports `io`, and `io` imports `format`."""
