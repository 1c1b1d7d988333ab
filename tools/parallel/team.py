"""The ranks of a run: what they decide together, and how they time steps that need all of them. Decisions go through
the store of the rendezvous and need no GPU, so that a rank whose kernel failed can still say so."""

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from expertile.lab.measure.clocks import Clocks, clock_reader, summarize
from expertile.lab.measure.interleaved import Measurement
from expertile.lab.measure.stats import median_ci95, turn_order

Call = Callable[[], object]
_SAMPLE_S = 3e-3  # what the calls of one sample last at least
_MOST_CALLS = 20
LEAST_ROUNDS = 3


class Team:
    """This rank of `world`. `started` and `deadline` are of time.monotonic, which processes of one host share.
    `remaining()` differs from rank to rank: only `leader_says` decides by it."""

    def __init__(self, rank: int, world: int, device: torch.device, store: dist.Store, started: float, deadline: float):
        self.rank, self.world, self.device = rank, world, device
        self.started, self.deadline = started, deadline
        self._store = dist.PrefixStore("measure", store)
        self._said = 0
        self._one = torch.zeros(1, device=device)
        self._read_clocks = clock_reader(device)

    def remaining(self) -> float:
        return self.deadline - time.monotonic()

    def gather(self, value: Any) -> list[Any]:
        """What each rank says (what json can write), by rank. Every rank must call it. RuntimeError if one does not
        until the deadline."""
        self._said += 1
        self._store.set(f"{self._said}/{self.rank}", json.dumps(value))
        keys = [f"{self._said}/{r}" for r in range(self.world)]
        self._store.wait(keys, timedelta(seconds=max(1.0, self.remaining())))
        return [json.loads(self._store.get(key)) for key in keys]

    def leader_says(self, value: Any) -> Any:
        """Rank 0's value."""
        return self.gather(value if self.rank == 0 else None)[0]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def align(self) -> None:
        """No rank goes on before all have come: on a GPU its current stream, by a reduction of one number."""
        if self.device.type == "cuda":
            dist.all_reduce(self._one)
        else:
            dist.barrier()

    def sample(self, call: Call, calls: int, during: Call | None = None) -> float:
        """Seconds of one of `calls` calls on this rank, from a start that all ranks make together. `during` is called
        on a GPU's host while the last one runs."""
        if self.device.type != "cuda":
            self.align()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begin) / calls
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.synchronize()
        self.align()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        if during is not None:
            during()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    def _named_sample(self, name: tuple[str, ...], call: Call, calls: int, during: Call | None = None) -> float:
        """`sample`; an error has a note of whose it is."""
        try:
            return self.sample(call, calls, during)
        except Exception as error:
            error.add_note(f"timing {'|'.join(name)}")
            raise

    def slowest(self, seconds: list[float]) -> list[float]:
        """The maximum over ranks of each."""
        worst = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.tolist()

    def race(
        self, calls: Mapping[tuple[str, ...], Call], most_rounds: int, seconds: float
    ) -> dict[tuple[str, ...], Measurement]:
        """Time all `calls` in turns, in an order that changes from round to round, for about `seconds` at most; every
        rank calls this with the same names in the same order. A sample is that of the slowest rank, the clocks are
        those of rank 0's GPU. Nothing if there is no time for `LEAST_ROUNDS`."""
        names = list(calls)
        if not names:
            return {}
        begin = time.monotonic()
        warm = self.slowest([self._named_sample(name, calls[name], 1) for name in names])
        count = {n: max(1, min(_MOST_CALLS, round(_SAMPLE_S / max(w, 1e-9)))) for n, w in zip(names, warm, strict=True)}
        rounds: list[list[float]] = []
        readings: list[Clocks] = []

        def read() -> None:
            readings.append(self._read_clocks())

        for index in range(most_rounds):
            spent = time.monotonic() - begin
            a_round = spent / (index + 1)  # the warm-up was one
            enough = index >= LEAST_ROUNDS and spent + a_round > seconds
            if self.leader_says(enough or a_round > self.remaining()):
                break
            times = dict.fromkeys(names, 0.0)
            for turn, place in enumerate(turn_order(len(names), index)):
                name = names[place]
                times[name] = self._named_sample(name, calls[name], count[name], None if turn else read)
            rounds.append(self.slowest(list(times.values())))
        if len(rounds) < LEAST_ROUNDS:
            return {}
        return {
            name: Measurement(*median_ci95(column), column, count[name], summarize(readings))
            for name, column in zip(names, zip(*rounds, strict=True), strict=True)
        }
