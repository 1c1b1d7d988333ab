"""Interleaving, stopping, failing, refusing: with samplers that need no clock."""

import itertools

import pytest
import torch

from expertile.lab.measure.clocks import Clocks
from expertile.lab.measure.interleaved import (
    Budget,
    Failure,
    Measurement,
    device_alive,
    failure_of,
    is_out_of_memory,
    time_interleaved,
)
from expertile.lab.measure.stats import turn_order

CPU = torch.device("cpu")


class Samples:
    """A timer whose samples come from an iterator per call; an exception among them is raised."""

    def __init__(self, order=None):
        self.order = [] if order is None else order

    def prepare(self, call, num_sets):
        name, values = call(0)
        if isinstance(values, Exception):
            raise values
        timer, source = self, iter(values)

        class Sampler:
            calls = 3

            def __call__(self, during=None):
                timer.order.append(name)
                value = next(source)
                if isinstance(value, Exception):
                    raise value
                if during is not None:
                    during()
                return value

        return Sampler()


def candidate(name, values):
    return name, lambda i: (name, values)


def steady(value):
    return itertools.repeat(value)


PATIENT = Budget(60.0, min_rounds=6, max_rounds=50)


def measure(*candidates, order=None, budget=PATIENT, **more):
    return time_interleaved(dict(candidates), policy="eager", device=CPU, timer=Samples(order), budget=budget, **more)


def test_rounds_interleave_in_a_changing_order():
    order = []
    measure(candidate("a", steady(1.0)), candidate("b", steady(2.0)), candidate("c", steady(3.0)), order=order)
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == [tuple("abc"[i] for i in turn_order(3, r)) for r in range(len(rounds))]
    assert len(rounds) == 1 + 6  # the first is thrown away


def test_median_interval_and_samples():
    values = [100.0, 1.0, 3.0, 2.0, 5.0, 4.0, 6.0]  # the first round does not count
    result = measure(candidate("a", values), budget=Budget(60.0, min_rounds=6, max_rounds=6))["a"]
    assert result.time_s == 3.5
    assert result.ci95_s == (1.0, 6.0)
    assert result.samples == tuple(values[1:])
    assert result.calls_per_sample == 3


def test_goes_on_until_every_interval_is_tight():
    noisy = [1.0, *[1.0, 2.0] * 5, *[1.5] * 100]
    result = measure(candidate("steady", steady(1.0)), candidate("noisy", noisy))
    # The interval of 20 is the 6th to the 15th in order: five 1.0 and five 2.0 lie outside it, not before.
    assert len(result["noisy"].samples) == 20
    low, high = result["noisy"].ci95_s
    assert high - low <= 2 * 0.004 * 1.5


def test_stops_when_time_is_up_but_not_before_three_rounds():
    clock = itertools.count()
    result = measure(candidate("a", itertools.cycle([1.0, 2.0])), budget=Budget(0.5), now=lambda: next(clock))
    assert len(result["a"].samples) == 3


def test_a_failing_candidate_is_a_reason_and_the_others_go_on():
    result = measure(
        candidate("ok", steady(1.0)),
        candidate("late", [1.0, 1.0, RuntimeError("tile out of range\nlong trace")]),
        candidate("early", ValueError("no kernel image")),
    )
    assert result["late"] == Failure("error", "RuntimeError: tile out of range")
    assert result["early"] == Failure("error", "ValueError: no kernel image")
    assert isinstance(result["ok"], Measurement)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you tried"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_named_and_memory_released(error, monkeypatch):
    released = []
    monkeypatch.setattr("expertile.lab.measure.interleaved.release", released.append)
    assert is_out_of_memory(error)
    result = measure(candidate("big", error), candidate("ok", steady(1.0)))
    assert result["big"].kind == "memory" and result["big"].reason.startswith("out of memory: ")
    assert released == [CPU]
    assert isinstance(result["ok"], Measurement)


def test_a_dead_device_keeps_what_was_measured(monkeypatch):
    monkeypatch.setattr("expertile.lab.measure.interleaved.device_alive", lambda device: False)
    crash = [1.0] * 5 + [RuntimeError("CUDA error: an illegal memory access was encountered")]
    result = measure(candidate("ok", itertools.cycle([1.0, 2.0])), candidate("crash", crash))
    assert isinstance(result["ok"], Measurement) and len(result["ok"].samples) >= 3
    assert result["crash"].kind == "fatal" and "illegal memory access" in result["crash"].reason
    early = measure(candidate("ok", steady(1.0)), candidate("crash", RuntimeError("CUDA error: misaligned address")))
    assert early["ok"] == Failure("stranded", "not measured: crash left the device unusable")


def test_clocks_are_read_once_a_round_beside_changing_candidates():
    readings = itertools.count(1000)
    result = measure(
        candidate("a", steady(1.0)),
        candidate("b", steady(1.0)),
        read_clocks=lambda: Clocks(float(next(readings)), 300.0, ("sw_power_cap",)),
    )
    assert next(readings) == 1000 + 7
    assert result["a"].clocks == Clocks(1003.0, 300.0, ("sw_power_cap",))  # rounds 0, 2, 4, 6
    assert result["b"].clocks.sm_clock_mhz == 1003.0  # rounds 1, 3, 5


def test_progress_is_told():
    seen = []
    measure(candidate("a", steady(1.0)), on_round=lambda i, medians: seen.append((i, medians)))
    assert seen == [(i, {"a": 1.0}) for i in range(1, 7)]


def test_really_times_on_the_cpu():
    x = torch.randn(64, 64)
    small, large = torch.randn(16, 16), torch.randn(768, 768)
    result = time_interleaved(
        {"small": lambda i: small @ small, "large": lambda i: large @ large},
        policy="eager",
        device=CPU,
        budget=Budget(0.3),
    )
    assert device_alive(CPU) and x.isfinite().all()
    assert 0 < result["small"].time_s < result["large"].time_s


def test_failure_of_an_error_without_text():
    assert failure_of(KeyError(), CPU) == Failure("error", "KeyError: no message")


def test_a_failed_capture_is_told_by_what_broke_it():
    def ended(inner):
        try:
            try:
                raise inner
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        except RuntimeError as error:
            return failure_of(error, CPU)

    assert ended(RuntimeError("CUDA error: operation not permitted when stream is capturing")) == Failure(
        "capture", "cannot be captured: RuntimeError: CUDA error: operation not permitted when stream is capturing"
    )
    assert ended(torch.OutOfMemoryError("CUDA out of memory")).kind == "memory"
