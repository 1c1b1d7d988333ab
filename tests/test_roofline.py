import pytest

from expertile.device import Device
from expertile.roofline import Bound, Work, bound

H200 = Device.by_name("H200")


def test_compute_bound():
    work = Work(flops=1e15, nbytes=1e6)
    assert bound(work, H200, "bf16") == Bound(1e15 / H200.peak("bf16"), "compute")


def test_memory_bound():
    assert bound(Work(1e6, 4.8e9), H200, "bf16") == Bound(pytest.approx(1e-3), "memory")


def test_the_cpu_states_no_bandwidth_so_only_compute_bounds():
    cpu = Device.current("cpu")
    assert bound(Work(1e9, 1e15), cpu, "fp32").limiter == "compute"


def test_nothing_known_bounds_nothing():
    assert bound(Work(0.0, 1e9), Device.current("cpu"), "fp8") == Bound(0.0, "unknown")


def test_work_adds_and_knows_its_intensity():
    assert (Work(2, 3) + Work(4, 5)) == Work(6, 8)
    assert Work(8, 2).intensity == 4
    assert Work(1, 0).intensity == float("inf")
