"""Times candidates against each other: interleaved round by round, until their medians are known or time is up. One
that fails becomes a `Failure` with a reason; the others go on."""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from expertile.lab.measure.clocks import NO_CLOCKS, ClockReader, Clocks, clock_reader, summarize
from expertile.lab.measure.cpu import cpu_reader
from expertile.lab.measure.stats import median_ci95, turn_order
from expertile.timers import Call, Sampler, Timer, timer_for

_CAPTURE = ("stream is capturing", "graph capture")  # what CUDA and torch say of work that no graph can hold
LEAST_ROUNDS = 3  # made whatever the budget says: fewer give no interval worth the name


@dataclass(frozen=True)
class Measurement:
    """Seconds per call: median over rounds, 95 % interval of the median, one sample per round."""

    time_s: float
    ci95_s: tuple[float, float]
    samples: tuple[float, ...]
    calls_per_sample: int
    clocks: Clocks = NO_CLOCKS


@dataclass(frozen=True)
class Failure:
    """Why a candidate has no time. `kind`: "memory", "capture" (CUDA refuses to hold it in a graph), "limit" (its own),
    "error", "fatal" when it took the device down with it, or "stranded" when another one did."""

    kind: str
    reason: str

    @property
    def status(self) -> str:
        """How a record calls it: "failed" for a fault of its own, "unsupported" where device or policy set a limit."""
        return "failed" if self.kind in ("error", "fatal") else "unsupported"


Outcome = Measurement | Failure


@dataclass(frozen=True)
class Budget:
    """When to stop: all intervals within `rel_ci` (half width / median) after `min_rounds`, or `seconds` spent."""

    seconds: float = 3.0
    min_rounds: int = 9
    max_rounds: int = 201
    rel_ci: float = 0.004


def time_interleaved(
    calls: Mapping[str, Call],
    *,
    policy: str,
    device: torch.device,
    num_sets: int = 1,
    budget: Budget = Budget(),
    timer: Timer | None = None,
    read_clocks: ClockReader | None = None,
    on_round: Callable[[int, Mapping[str, float]], None] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Outcome]:
    """Time `calls` under `policy` ("graph" or "eager") and return one outcome per name, in the order given. `call(i)`
    computes once on input set i, 0 <= i < `num_sets`.

    All are warmed up (and captured) first; then each makes one sample per round, in an order that changes from round to
    round (`turn_order`); the first round is thrown away. `read_clocks` is called once a round, beside the first
    candidate in the order; `on_round(round, {name: median so far})` reports progress. ValueError for an unknown
    policy."""
    timer = timer or timer_for(policy, device)
    read_clocks = read_clocks or (clock_reader(device) if device.type == "cuda" else cpu_reader())
    runs = _prepare(calls, timer, num_sets, device)
    all_clocks = _rounds(runs, budget, read_clocks, on_round, now, device)
    return {run.name: run.outcome(all_clocks) for run in runs}


@dataclass
class _Run:
    """One candidate while it is being measured."""

    name: str
    sampler: Sampler | None = None
    failure: Failure | None = None
    samples: list[float] = field(default_factory=list)
    clocks: list[Clocks] = field(default_factory=list)

    def outcome(self, all_clocks: Sequence[Clocks]) -> Outcome:
        """`all_clocks`: readings beside any candidate, for one beside which none was made."""
        if self.failure is not None:
            return self.failure
        if len(self.samples) < LEAST_ROUNDS:
            return Failure("error", f"stopped before {LEAST_ROUNDS} rounds were measured")
        calls = self.sampler.calls if self.sampler else 1
        return Measurement(*median_ci95(self.samples), tuple(self.samples), calls, summarize(self.clocks or all_clocks))


def _prepare(calls: Mapping[str, Call], timer: Timer, num_sets: int, device: torch.device) -> list[_Run]:
    runs = [_Run(name) for name in calls]
    for run in runs:
        try:
            with torch.no_grad():
                run.sampler = timer.prepare(calls[run.name], num_sets)
        except Exception as error:
            run.failure = failure_of(error, device)
            if run.failure.kind == "fatal":
                _strand(runs, run.name)
                break
    return runs


def _rounds(
    runs: list[_Run],
    budget: Budget,
    read_clocks: ClockReader,
    on_round: Callable[[int, Mapping[str, float]], None] | None,
    now: Callable[[], float],
    device: torch.device,
) -> list[Clocks]:
    """Every reading of the clocks."""
    all_clocks: list[Clocks] = []
    start = now()
    for index in range(budget.max_rounds + 1):
        live = [r for r in runs if r.failure is None and r.sampler is not None]
        if not live or _enough(live, budget, now() - start):
            break
        for place, turn in enumerate(turn_order(len(live), index)):
            run = live[turn]
            readings: list[Clocks] = []
            during = (lambda kept=readings: kept.append(read_clocks())) if place == 0 else None
            try:
                assert run.sampler is not None
                with torch.no_grad():
                    sample = run.sampler(during)
            except Exception as error:
                run.failure = failure_of(error, device)
                run.sampler = None
                if run.failure.kind == "fatal":
                    _strand(runs, run.name)
                    return all_clocks
                continue
            if index > 0:
                run.samples.append(sample)
            run.clocks.extend(readings)
            all_clocks.extend(readings)
        if on_round is not None and index > 0:
            on_round(index, {r.name: median_ci95(r.samples)[0] for r in live if r.samples})
    return all_clocks


def _enough(live: Sequence[_Run], budget: Budget, spent_s: float) -> bool:
    rounds = min(len(r.samples) for r in live)
    if rounds < LEAST_ROUNDS:
        return False
    if spent_s >= budget.seconds:
        return True
    found = (median_ci95(r.samples) for r in live)
    return rounds >= budget.min_rounds and all(max(hi - m, m - lo) <= budget.rel_ci * m for m, (lo, hi) in found)


def _strand(runs: Sequence[_Run], culprit: str) -> None:
    """The device is gone: candidates with enough samples keep them, the others have no time."""
    for run in runs:
        if run.failure is None and len(run.samples) < LEAST_ROUNDS:
            run.failure = Failure("stranded", f"not measured: {culprit} left the device unusable")


def failure_of(error: BaseException, device: torch.device) -> Failure:
    """What an exception means for a candidate; frees cached memory after an out-of-memory error. A capture that fails
    raises a second time when it is ended; the first exception is the one that tells."""
    if "during capture" in str(error) and isinstance(error.__context__, Exception):
        inner = failure_of(error.__context__, device)
        if inner.kind not in ("error", "capture"):
            return inner
        return Failure("capture", f"cannot be captured: {inner.reason.removeprefix('cannot be captured: ')}")
    reason = f"{type(error).__name__}: {_first_line(error)}"
    if is_out_of_memory(error):
        error.__traceback__ = None  # its frames hold the tensors that filled the memory
        release(device)
        return Failure("memory", f"out of memory: {_first_line(error)}")
    if not device_alive(device):
        return Failure("fatal", f"{reason}; the device is unusable afterwards")
    if any(text in reason for text in _CAPTURE):
        return Failure("capture", f"cannot be captured: {reason}")
    return Failure("error", reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a GPU's or the host's memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("not enough memory", "CUDA out of memory", "can't allocate memory")
    )


def release(device: torch.device) -> None:
    """Give unreferenced memory back to the device; one that no longer answers has none to give."""
    gc.collect()
    if device.type == "cuda":
        with suppress(Exception):
            torch.cuda.empty_cache()


def device_alive(device: torch.device) -> bool:
    """Whether the device still computes: an illegal access leaves a CUDA context that refuses everything."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        return math.isclose(float(torch.ones(2, device=device).sum()), 2.0)
    except Exception:
        return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:300]
