"""Data files inspected, converted, repacked, summed up and timed."""
