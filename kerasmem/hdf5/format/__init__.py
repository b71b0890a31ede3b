"""The HDF5 format: layouts, chunk indexes and filters. No module here opens a file."""
