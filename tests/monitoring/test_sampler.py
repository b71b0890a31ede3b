"""The background thread ends if no hook comes, and says nothing while the interpreter ends."""

import time

from kerasmem.monitoring import sampler as sampler_module
from kerasmem.monitoring.phases import CurrentPhase
from kerasmem.monitoring.sampler import Sampler


def test_a_sampler_gives_up_where_no_hook_comes_and_starts_again_with_the_next_epoch(monkeypatch):
    monkeypatch.setattr(sampler_module, "_PATIENCE", 0.1)
    phase = CurrentPhase()
    sampler = Sampler(phase, lambda: None, lambda text: None, 100.0)
    sampler.start()
    deadline = time.monotonic() + 20
    while sampler._thread._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not sampler._thread._thread.is_alive()
    phase.enter("train batch")
    sampler.start()
    assert sampler._thread._thread.is_alive()
    sampler.stop()
