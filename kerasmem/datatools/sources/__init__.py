"""Sources of a conversion: arrays, tables, images, records and HDF5 files."""
