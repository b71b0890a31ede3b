"""Devices: the catalogue of cards, and this machine's.

================ =================================================================================
catalogue        cards by name with their hardware, from data/cards.json, and their usable memory
growth           ask TensorFlow to take GPU memory as it needs it, instead of all at once
tracked_devices  the devices that training uses, and the allocator of each
training_device  the device that this process trains on: its allocator's limit, bytes in use
kernels          the kernels that compute a step, which decide its scratch memory
recording        what TensorFlow's profiler recorded of the allocator, event by event
nvml             what the NVIDIA driver sees (the only module that touches NVML)
machine          this machine's GPUs and which of them is a CUDA ordinal, without TensorFlow
host             memory of this process, its children and this machine; limits of control groups and Slurm
doctor           does TensorFlow see the GPU, and why not
================ =================================================================================
"""

from __future__ import annotations
