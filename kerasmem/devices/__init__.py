"""Devices: the catalogue of cards, and what this machine has.

========== ==============================================================================
catalogue  cards by name, a source for each
growth     ask TensorFlow to take GPU memory as it needs it, instead of all at once
allocator  what TensorFlow's allocator has handed out, device by device
nvml       what the NVIDIA driver sees (the only module that touches NVML)
visible    which NVML device a CUDA ordinal is
host       what this process and this machine use (the only module that touches psutil)
live       all of it as plain results, without TensorFlow
========== ==============================================================================
"""

from __future__ import annotations
