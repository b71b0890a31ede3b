"""One background thread for all actions that `kerasmem.track` has under way."""

from __future__ import annotations

import os
import threading
import time

from kerasmem.devices.nvml import Nvml, NvmlDevice
from kerasmem.devices.visible import visible_devices
from kerasmem.monitoring.periodic import PeriodicThread
from kerasmem.monitoring.phases import BackgroundReading, PhaseMaxima, largest_known
from kerasmem.monitoring.sampler import MachineReader

_PERIOD = 0.05
_PHASE = "action"


class HostWatch:
    """Reads host and driver while at least one action is under way; its thread and NVML end with the last.

    Each action has a `PhaseMaxima` of its own, to which all readings are of one phase.
    """

    _thread: PeriodicThread | None
    _machine: MachineReader
    _nvml: Nvml | None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[PhaseMaxima] = []
        self._cards: list[NvmlDevice] = []
        self._thread = self._nvml = None

    def open(self, peaks: PhaseMaxima) -> BackgroundReading:
        """Take a reading, and add it and all further ones to `peaks`."""
        with self._lock:
            if not self._open:
                self._begin()
            self._open.append(peaks)
            return self._read()

    def close(self, peaks: PhaseMaxima) -> BackgroundReading:
        """Take a last reading for `peaks`."""
        with self._lock:
            if not self._open:  # a forked child ends an action of its parent's
                self._begin()
            moment = self._read()
            peaks.add(_PHASE, 0, moment)
            self._open = [other for other in self._open if other is not peaks]
            if self._open:
                return moment
            thread, self._thread = self._thread, None
            if self._nvml is not None:
                self._nvml.close()
            self._nvml = None
        if thread is not None:
            thread.stop()  # outside the lock, which its last reading may wait for
        return moment

    def tick(self) -> float | None:
        """Take a reading in the thread; return its cost in seconds of processor time, None to end."""
        start = time.thread_time()
        with self._lock:
            if not self._open:
                return None
            self._read()
        return time.thread_time() - start

    def after_fork(self) -> None:
        """Begin with nothing in a forked child: thread, lock and driver are the parent's."""
        HostWatch.__init__(self)

    def _begin(self) -> None:
        self._machine = MachineReader(self._on_cards, lambda _: None)
        self._nvml, _ = Nvml.open()
        devices = () if self._nvml is None else self._nvml.devices
        self._cards = [match.device for match in visible_devices(devices, os.environ) if match.device is not None]
        self._thread = PeriodicThread("kerasmem track", self.tick, _PERIOD)
        self._thread.start()

    def _on_cards(self) -> int | None:
        if self._nvml is None:
            return None
        told = [self._nvml.memory(card)[0] for card in self._cards]
        return largest_known(memory.used_bytes for memory in told if memory is not None)

    def _read(self) -> BackgroundReading:
        moment = self._machine.read()
        for peaks in self._open:
            peaks.add(_PHASE, 0, moment)
        return moment


host_watch = HostWatch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=host_watch.after_fork)
