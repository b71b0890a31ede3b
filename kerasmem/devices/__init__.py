"""Devices: the catalogue of cards, and this machine's.

================ =================================================================================
catalogue        cards by name, a source for each
growth           ask TensorFlow to take GPU memory as it needs it, instead of all at once
allocator        what TensorFlow's or JAX's allocator has handed out
tracked_devices  the devices that training uses, each with its allocator
cards            the rows of the catalogue and the hardware of each card, from data/cards.json
recording        what TensorFlow's profiler recorded of the allocator, event by event
nvml             what the NVIDIA driver sees (the only module that touches NVML)
visible          which NVML device a CUDA ordinal is
host             what this process and this machine use
limits           what this job may have: control groups, Slurm
processes        what processes and those under them hold, which files they have open, who is on the cards
doctor           does TensorFlow see the GPU, and why not (doctor_child asks it)
live             all of it as plain results, without TensorFlow
training_device  the device that this process trains on: its allocator's limit, bytes in use, kernels
================ =================================================================================
"""

from __future__ import annotations
