"""HDF5 files written for streaming, from whatever the data lies in."""
