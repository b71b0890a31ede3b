"""The catalogue of cards, and the devices of this machine.

================ =================================================================================
catalogue        cards by name, with their hardware and usable memory, from data/cards.json
growth           `enable_memory_growth`
training_devices the devices of training, their allocators and limits
kernels          kernels of a step, which determine its scratch memory
recording        events of the allocator, recorded by TensorFlow's profiler
nvml             the NVIDIA driver (the only module that uses NVML)
machine          this machine's GPUs and their CUDA ordinals, without TensorFlow
host             memory of this process, its children and this machine; limits of jobs
examination      `kerasmem doctor`: whether TensorFlow sees the GPU
================ =================================================================================
"""

from __future__ import annotations
