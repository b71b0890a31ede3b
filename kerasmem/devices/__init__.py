"""Devices: the catalogue of cards, and this machine's.

================ =================================================================================
catalogue        cards by name with their hardware, from data/cards.json, and their usable memory
growth           ask TensorFlow to take GPU memory as it needs it, instead of all at once
training_devices the devices that training uses, the allocator of each and its limit
kernels          the kernels that compute a step, which decide its scratch memory
recording        what TensorFlow's profiler recorded of the allocator, event by event
nvml             what the NVIDIA driver sees (the only module that touches NVML)
machine          this machine's GPUs and which of them is a CUDA ordinal, without TensorFlow
host             memory of this process, its children and this machine; limits of control groups and Slurm
doctor           does TensorFlow see the GPU, and why not
================ =================================================================================
"""

from __future__ import annotations
