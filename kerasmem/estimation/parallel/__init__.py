"""Bytes per device past one device: replicas that exchange gradients, weights or optimizer states in shards."""
