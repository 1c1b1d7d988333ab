"""Stopwatches on the CPU, with a clock that the test turns."""

import gc

import pytest
import torch

from expertile.timers import HostTimer, _repeats, _whole_rounds, quick_collections, sets_for, timer_for


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_host_timer_measures_calls_and_rotates_the_sets():
    clock, seen = Clock(), []

    def call(i):
        seen.append(i)
        clock.now += 1e-3 * (i + 1)

    sampler = HostTimer(sample_s=5e-3, now=clock).prepare(call, 3)
    assert sampler.calls == 5  # the fastest call takes 1 ms
    seen.clear()
    assert sampler() == pytest.approx(2e-3)  # five of 1, 2, 3 ms in turn
    assert seen in ([1, 2, 0, 1, 2], [0, 1, 2, 0, 1], [2, 0, 1, 2, 0])


def test_host_timer_reads_clocks_beside_the_sample_not_inside_it():
    clock = Clock()

    def call(i):
        clock.now += 1e-3

    def during():
        clock.now += 100.0

    sampler = HostTimer(now=clock).prepare(call, 1)
    assert sampler(during) == pytest.approx(1e-3)


def test_results_stay_alive_until_their_set_comes_round():
    class Result:
        alive = 0

        def __init__(self):
            Result.alive += 1

        def __del__(self):
            Result.alive -= 1

    sampler = HostTimer().prepare(lambda i: Result(), 4)
    sampler()
    assert Result.alive == 4


@pytest.mark.parametrize(
    ("set_bytes", "l2", "free", "count"),
    [(10, 100, 1e9, 30), (1000, 100, 1e9, 1), (10, 100, 55, 5), (10, 100, 0, 1), (1, 10**9, 1e12, 128)],
)
def test_sets_exceed_three_caches_within_memory(set_bytes, l2, free, count):
    assert sets_for(set_bytes, l2, free) == count


def test_calls_per_graph_are_whole_rounds_and_last_long_enough():
    assert _whole_rounds(10e-6, 1e-3, 7, 512) == 105  # 15 rounds of 7: 1.05 ms
    assert _whole_rounds(5e-3, 1e-3, 3, 512) == 3
    assert _whole_rounds(1e-9, 1e-3, 100, 512) == 500


def test_calls_per_sample_are_odd():
    assert _repeats(1e-3, 4e-3, 25) == 3
    assert _repeats(1.0, 1e-3, 25) == 1
    assert _repeats(1e-9, 1e-3, 25) == 25


def test_policies_are_named():
    assert isinstance(timer_for("eager", torch.device("cpu")), HostTimer)
    with pytest.raises(ValueError, match="graph needs a CUDA device"):
        timer_for("graph", torch.device("cpu"))
    with pytest.raises(ValueError, match="expected one of graph, eager, got 'warm'"):
        timer_for("warm", torch.device("cpu"))


def test_objects_are_frozen_inside_and_the_callers_stay_so():
    gc.unfreeze()
    with quick_collections():
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    gc.freeze()
    with quick_collections():
        pass
    assert gc.get_freeze_count()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("policy", ["graph", "eager"])
def test_a_copy_takes_about_as_long_as_its_bytes_say(policy):
    """1 GiB read and written at 30 to 100 % of the stated bandwidth."""
    from expertile.device import Device

    device = torch.device("cuda", 0)
    source = torch.randn(1 << 28, device=device)
    sampler = timer_for(policy, device).prepare(lambda i: source.clone(), 1)
    seconds = min(sampler() for _ in range(5))
    bandwidth = Device.current(device).memory_bps
    assert bandwidth is not None
    assert 2 * source.nbytes / bandwidth < seconds < 2 * source.nbytes / (0.3 * bandwidth)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_graph_hides_the_launch_of_tiny_kernels():
    device = torch.device("cuda", 0)
    x = torch.zeros(1, device=device)
    samplers = {p: timer_for(p, device).prepare(lambda i: x + 1, 1) for p in ("graph", "eager")}
    times = {p: sorted(s() for _ in range(9))[4] for p, s in samplers.items()}
    assert times["graph"] < 4e-6 < times["eager"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_call_that_cannot_be_captured_fails_alone():
    device = torch.device("cuda", 0)
    x = torch.ones(1000, device=device)
    timer = timer_for("graph", device)
    with pytest.raises(RuntimeError):
        timer.prepare(lambda i: x.sum().item(), 1)
    assert 0 < timer.prepare(lambda i: x * 2, 1)() < 1e-3
