"""The peaks of one allocator, shared by all who read it in this process.

An allocator has one peak, that since the last reset, and whoever resets it takes it from all others. So every
reading and reset goes through the device's ledger, which adds what it finds to the account of everybody who
is recording: each has the peak since its own last reading, however many there are.
"""

from __future__ import annotations

import os
import threading

from kerasmem.compat.tensorflow_runtime import devices_are_started
from kerasmem.devices.training_devices import Allocator, tracked_devices


class LedgerAccount:
    """One reader's account of a ledger: the largest peak since its last reading, in bytes."""

    __slots__ = ("peak",)

    def __init__(self) -> None:
        self.peak = 0


class PeakLedger:
    """All readings of one allocator. Use `ledger_of` to have the one of this process.

    Attributes:
        refusal: the error of a reset that did not work; peaks are unknown from then on.
    """

    __slots__ = ("_accounts", "_lock", "refusal")

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self._lock = threading.RLock()
        self._accounts: list[LedgerAccount] = []

    def join(self, account: LedgerAccount) -> None:
        """Add what happens from now on to an account, until it leaves."""
        with self._lock:
            account.peak = 0
            self._accounts.append(account)

    def leave(self, account: LedgerAccount) -> None:
        """Add nothing to an account any more."""
        with self._lock:
            self._accounts = [other for other in self._accounts if other is not account]

    def take(self, allocator: Allocator, account: LedgerAccount) -> tuple[int, int | None, int | None]:
        """Read the allocator and reset its peak.

        It runs twice a batch, each time with cold caches, so it calls as little as it can.

        Args:
            allocator: what to read; one of those equal to the ledger's.
            account: the reader's.

        Returns:
            In use, the peak since the account's last reading (None if the allocator cannot reset it) and reserved.
        """
        with self._lock:
            in_use, peak, reserved = allocator.read()
            if self.refusal is not None:
                return in_use, None, reserved
            for other in self._accounts:
                if peak > other.peak:
                    other.peak = peak
            try:
                allocator.reset()
            except Exception as error:  # not every allocator can; the reading is good all the same
                self.refusal = error
                return in_use, None, reserved
            own, account.peak = account.peak, 0
            return in_use, own, reserved


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
