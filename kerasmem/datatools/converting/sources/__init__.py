"""What can be converted: rows out of arrays, tables, images, records and HDF5 files."""
