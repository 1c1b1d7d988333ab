"""Stopwatches: each prepares one call over rotating input sets and then yields one sample at a time, in seconds.
`GraphTimer` replays a CUDA graph of many calls: what the kernels take. `EventTimer` puts CUDA events around single
calls on an idle stream: what a caller waits, launch cost included. `HostTimer` does the same on a CPU."""

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

# calls(i) computes once on input set i; what it returns is kept alive until that set comes round again, so
# that outputs rotate among as many addresses as inputs do.
Call = Callable[[int], Any]
During = Callable[[], None]  # runs while the timed work is in flight

POLICIES = ("graph", "eager")


class Sampler(Protocol):
    """One prepared candidate: each call makes one sample and returns seconds per call."""

    calls: int  # calls behind one sample

    def __call__(self, during: During | None = None) -> float: ...


class Timer(Protocol):
    """Warms a call up and makes it ready to be sampled."""

    def prepare(self, call: Call, num_sets: int) -> Sampler: ...


def timer_for(policy: str, device: torch.device) -> Timer:
    """The stopwatch of a policy. ValueError for an unknown policy, or for graphs without CUDA."""
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    if device.type == "cuda":
        return GraphTimer(device) if policy == "graph" else EventTimer(device)
    if policy == "graph":
        raise ValueError(f"policy: graph needs a CUDA device, got {device}; use eager")
    return HostTimer()


def sets_for(set_nbytes: int, l2_bytes: int, free_bytes: float, most: int = 128) -> int:
    """How many input sets of `set_nbytes` (inputs and output that a call touches) to rotate: enough for three caches
    full, at most `most`, and no more than fit."""
    wanted = math.ceil(3 * l2_bytes / max(set_nbytes, 1))
    fit = int(free_bytes // max(set_nbytes, 1))
    return max(1, min(wanted, most, fit))


class HostTimer:
    """`time.perf_counter` around single calls, each sample the median of enough of them to last `sample_s`."""

    def __init__(self, sample_s: float = 2e-3, most: int = 25, now: Callable[[], float] = time.perf_counter) -> None:
        self.sample_s, self.most, self.now = sample_s, most, now

    def prepare(self, call: Call, num_sets: int) -> Sampler:
        ring = _Ring(call, num_sets)
        warm = [self._one(ring) for _ in range(num_sets + 1)]
        return _Singles(lambda during: self._one(ring, during), _repeats(min(warm), self.sample_s, self.most))

    def _one(self, ring: "_Ring", during: During | None = None) -> float:
        start = self.now()
        ring.step()
        spent = self.now() - start
        if during is not None:
            during()
        return spent


class EventTimer:
    """CUDA events around single calls, the stream idle at the start of each: launch and compute together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, call: Call, num_sets: int) -> Sampler:
        with torch.cuda.device(self.device):
            ring = _Ring(call, num_sets)
            for _ in range(num_sets + 1):
                ring.step()
            torch.cuda.synchronize()
            estimate = min(_event_time(ring.step) for _ in range(3))
        return _Singles(lambda during: _event_time(ring.step, during), _repeats(estimate, 3e-4, 10), self.device)


class _Singles:
    """A sample is the median of several timings of single calls, on a GPU each from an idle stream."""

    def __init__(self, one: Callable[[During | None], float], calls: int, device: torch.device | None = None) -> None:
        self.one, self.calls, self.device = one, calls, device

    def __call__(self, during: During | None = None) -> float:
        if self.device is None:
            return self._median(during)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            return self._median(during)

    def _median(self, during: During | None) -> float:
        # The reading of clocks takes host time: only beside the last call, after its end is on the stream.
        return statistics.median([self.one(during if i == self.calls - 1 else None) for i in range(self.calls)])


def _event_time(work: Callable[[], Any], during: During | None = None) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    if during is not None:
        during()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


class GraphTimer:
    """Replays of a CUDA graph that holds several calls over all input sets; a sample is elapsed time / calls.

    A replay lasts about `replay_s`. Before each timed one a buffer of several caches is read: that hides the latency of
    the graph's launch, and leaves the cache in the same state for every candidate, without dirty lines. Graphs of one
    timer share a memory pool: they never run at the same time, and their results are not read."""

    def __init__(self, device: torch.device, replay_s: float = 1e-3, most: int = 512) -> None:
        self.device, self.replay_s, self.most = device, replay_s, most
        self._pool: Any = None
        self._flush: torch.Tensor | None = None

    def prepare(self, call: Call, num_sets: int) -> Sampler:
        with torch.cuda.device(self.device):
            if self._flush is None:
                cache = torch.cuda.get_device_properties(self.device).L2_cache_size
                self._flush = torch.zeros(max(4 * cache, 128 << 20) // 4, device=self.device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                ring = _Ring(call, num_sets)
                for _ in range(num_sets + 1):
                    ring.step()
                stream.synchronize()
                estimate = _event_time(ring.step)
                ring.clear()
            return self._capture(call, num_sets, estimate, stream)

    def _capture(self, call: Call, num_sets: int, estimate: float, stream: torch.cuda.Stream) -> "_GraphSampler":
        assert self._flush is not None
        calls = _whole_rounds(estimate, self.replay_s, num_sets, self.most)
        sampler = _GraphSampler(self.device, self._graph(call, num_sets, calls, stream), calls, self._flush)
        # The estimate held launch cost: without it a replay may be far shorter than asked for.
        better = _whole_rounds(min(sampler() for _ in range(2)), self.replay_s, num_sets, self.most)
        if better >= 2 * calls:
            # The first graph lives until the second is captured: a pool without a graph must not be used
            # again.
            graph = self._graph(call, num_sets, better, stream)
            sampler = _GraphSampler(self.device, graph, better, self._flush)
            sampler()
        return sampler

    def _graph(self, call: Call, num_sets: int, calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": another thread that reads clocks or draws progress must not spoil the capture.
            # A capture that fails also warns that its graph is empty: the exception says all there is to say.
            with (
                warnings.catch_warnings(action="ignore", category=UserWarning),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                ring = _Ring(call, num_sets)
                for _ in range(calls):
                    ring.step()
                ring.clear()
        except Exception:
            self._pool = None  # a broken capture may leave the pool in an unknown state
            raise
        torch.cuda.synchronize()
        return graph


class _GraphSampler:
    def __init__(self, device: torch.device, graph: torch.cuda.CUDAGraph, calls: int, flush: torch.Tensor) -> None:
        self.device, self.graph, self.calls, self.flush = device, graph, calls, flush
        self.sink = torch.empty((), device=device)

    def __call__(self, during: During | None = None) -> float:
        with torch.cuda.device(self.device):
            torch.sum(self.flush, 0, out=self.sink)
            return _event_time(self.graph.replay, during) / self.calls


class _Ring:
    """Calls on set 0, 1, 2, … in turn; keeps the last result of each set."""

    def __init__(self, call: Call, num_sets: int) -> None:
        self.call, self.num_sets, self.next = call, num_sets, 0
        self.results: list[Any] = [None] * num_sets

    def step(self) -> None:
        i = self.next
        self.results[i] = self.call(i)
        self.next = (i + 1) % self.num_sets

    def clear(self) -> None:
        self.results = [None] * self.num_sets


def _repeats(estimate_s: float, sample_s: float, most: int) -> int:
    """Calls in one sample: enough to last `sample_s`, odd so that their median is one of them."""
    wanted = max(1, min(most, math.ceil(sample_s / max(estimate_s, 1e-9))))
    return wanted if wanted % 2 else max(wanted - 1, 1)


def _whole_rounds(estimate_s: float, replay_s: float, num_sets: int, most: int) -> int:
    """Calls in one graph: whole rounds over all sets, enough to last `replay_s`, at most about `most`."""
    rounds = math.ceil(replay_s / max(estimate_s, 1e-9) / num_sets)
    return num_sets * max(1, min(rounds, most // num_sets))


@contextmanager
def quick_collections() -> Iterator[Callable[[], None]]:
    """Inside, garbage is looked for only among what was made since: a graph's capture collects, and all that torch has
    made takes 0.1 to 0.3 s each time. Yields what a caller calls between two problems, so that modules that the first
    one imported are not searched for the second. What the caller has frozen stays so."""
    if gc.get_freeze_count():
        yield gc.freeze
        return
    gc.collect()
    gc.freeze()
    try:
        yield gc.freeze
    finally:
        gc.unfreeze()
