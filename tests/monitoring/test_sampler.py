"""The background thread ends if no hook comes, and says nothing while the interpreter ends."""

from waiting import until

from kerasmem.monitoring.sampler import CurrentPhase, Sampler


def test_a_sampler_gives_up_where_no_hook_comes_and_starts_again_with_the_next_epoch():
    phase = CurrentPhase()
    sampler = Sampler(phase, lambda: None, lambda text: None, 100.0, patience=0.1)
    sampler.start()
    until(lambda: not sampler.is_running)
    phase.enter("train batch")
    sampler.start()
    assert sampler.is_running
    sampler.stop()
