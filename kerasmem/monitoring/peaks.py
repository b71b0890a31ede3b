"""The peaks of one allocator, shared by all who read it in this process.

An allocator has one peak, that since the last reset, and whoever resets it takes it from all others. So every
reading and reset goes through the device's ledger, which adds what it finds to the account of everybody who
is recording: each has the peak since its own last reading, however many there are.
"""

from __future__ import annotations

import os
import threading

from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.devices.tracked_devices import Allocator, tracked_devices

_NOTHING = -1  # below any number of bytes


class LedgerAccount:
    """One reader's account of a ledger: what has happened since its last reading.

    Attributes:
        peak: the largest known peak since then.
        bound: what the peak may have been where it is not known (it had been that high before).
    """

    __slots__ = ("bound", "peak")

    def __init__(self) -> None:
        self.peak = self.bound = _NOTHING


class PeakLedger:
    """All readings of one allocator. Use `ledger_of` to have the one of this process.

    Attributes:
        process_peak: the largest peak read since the process began, by anybody; None before the first.
        refusal: the error of the latest reset that did not work.
    """

    __slots__ = ("_accounts", "_fresh", "_lock", "_seen", "process_peak", "refusal")

    def __init__(self) -> None:
        self.process_peak: int | None = None
        self.refusal: Exception | None = None
        self._lock = threading.RLock()
        self._accounts: list[LedgerAccount] = []
        self._fresh = False  # nobody has read since the last reset, so the allocator's peak is new
        self._seen = _NOTHING  # the allocator's peak when it was last read without a reset

    def join(self, account: LedgerAccount) -> None:
        """Add what happens from now on to an account, until it leaves."""
        with self._lock:
            account.peak = account.bound = _NOTHING
            self._accounts = [*(other for other in self._accounts if other is not account), account]

    def leave(self, account: LedgerAccount) -> None:
        """Add nothing to an account any more."""
        with self._lock:
            self._accounts = [other for other in self._accounts if other is not account]

    def take(self, allocator: Allocator, account: LedgerAccount, resets: bool) -> tuple[int, int | None, int | None]:
        """Read the allocator, and reset its peak if `resets`; `refusal` tells whether that did not work.

        It runs twice a batch, each time with cold caches, so it calls as little as it can.

        Args:
            allocator: what to read; one of those equal to the ledger's.
            account: the reader's.
            resets: whether to start a new peak.

        Returns:
            In use, the peak since the account's last reading (None where it is not known) and reserved.
        """
        with self._lock:
            in_use, peak, reserved = allocator.read()
            is_new = self._fresh or peak > self._seen
            for other in self._accounts:
                if is_new:
                    if peak > other.peak:
                        other.peak = peak
                elif self._seen > other.bound:  # it may have come up to there again
                    other.bound = self._seen
            if self.process_peak is None or peak > self.process_peak:
                self.process_peak = peak
            self._fresh, self._seen = False, peak
            if resets:
                try:
                    allocator.reset()
                    self._fresh = True
                except Exception as error:  # not every allocator can; the reading is good all the same
                    self.refusal = error
            own = account.peak if account.peak >= account.bound else _NOTHING
            account.peak = account.bound = _NOTHING
            return in_use, None if own == _NOTHING else own, reserved


_ledgers: dict[Allocator, PeakLedger] = {}


def ledger_of(allocator: Allocator) -> PeakLedger:
    """Return the ledger of an allocator in this process; equal allocators have the same."""
    return _ledgers.setdefault(allocator, PeakLedger())


def running_allocators() -> list[Allocator]:
    """Return the allocators of this process, without loading TensorFlow or making it start its devices."""
    if not devices_are_started():
        return []
    found, _ = tracked_devices()
    return [device.allocator for device in found if device.allocator is not None]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ledgers.clear)  # a lock may have been held
