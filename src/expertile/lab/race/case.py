"""One workload on one device, with its candidates: gated one after another, and bound to inputs."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.measure.interleaved import Failure, Measurement, Outcome, failure_of, release
from expertile.lab.race.baselines import COPIES, Copy, copy_work
from expertile.lab.race.gate import judge
from expertile.lab.race.operands import free_memory
from expertile.lab.race.operator import Blocks, Inputs, Operator, Rival, Verdict, Workload, record_fields
from expertile.lab.race.record import COPY, Record, measured
from expertile.roofline import Bound, Work
from expertile.timers import POLICIES, sets_for

# Share of the free memory for operands and results; the rest is for what backends allocate.
_MEMORY_SHARE = 0.4
_CPU_INTENSITY, _CPU_SETS = 32.0, 3  # FLOP per byte
_REFERENCE_ITEMSIZE = 8  # float64 at most
Expected = tuple[torch.Tensor, ...] | Blocks


@dataclass(frozen=True)
class Site:
    """Where a run takes place: facts of the device, and the device itself."""

    device: Device
    torch_device: torch.device

    @staticmethod
    def current(device: torch.device | str | None = None) -> "Site":
        """`device`, by default the current GPU or, without one, the CPU."""
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if found.type == "cuda" and found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        return Site(Device.current(found), found)


@dataclass(frozen=True)
class Candidate:
    """A row of the table: ready to be timed, timed, or the reason why it has no time. `bind(inputs, policy)` makes one
    call under one of `policies`. `config` is what the record shows; with `sizes_on_host` a call in a graph is given the
    group sizes. `verdict`: what the gate found, or why there was nothing to judge; None before it. `tried`: the configs
    of which it was the fastest. `check_again(inputs, seed)` judges it on inputs that it was timed on."""

    name: str
    work: Work
    config: Mapping[str, Any] = field(default_factory=dict)
    bind: Callable[[Any, str], Callable[[], Any]] | None = None
    sizes_on_host: bool = False
    verdict: Verdict | Failure | None = None
    policies: tuple[str, ...] = POLICIES
    tried: int = 0
    outcome: Outcome | None = None
    check_again: Callable[[Inputs, int], Verdict] | None = None

    def ready(self, policy: str) -> bool:
        """Whether it can be timed under `policy`."""
        return self.bind is not None and policy in self.policies

    @property
    def time_s(self) -> float:
        """Infinite without one."""
        return self.outcome.time_s if isinstance(self.outcome, Measurement) else math.inf

    def shown_config(self, policy: str) -> dict[str, Any]:
        sizes = {"sizes": "host"} if self.sizes_on_host and policy == "graph" else {}
        return {**self.config, **sizes, **({"tried": self.tried} if self.tried else {})}

    def judged(self, verdict: Verdict | Failure) -> "Candidate":
        """With its verdict; without a call to time where the result is wrong or there is none."""
        return replace(self, verdict=verdict, bind=self.bind if verdict.status == "ok" else None)

    def judged_again(self, inputs: Inputs, seed: int) -> "Candidate":
        """Timed on `inputs`; without a time if it gives a wrong result now that other values lie there."""
        if self.check_again is None or not isinstance(self.outcome, Measurement):
            return self
        verdict = self.check_again(inputs, seed)
        if verdict.ok:
            return self
        reason = f"after it was timed, on new values in the same memory: {verdict.reason}"
        return replace(self.judged(replace(verdict, reason=reason)), outcome=None)

    @property
    def status(self) -> str:
        """As a record calls it, before it is timed."""
        return "ok" if self.verdict is None else self.verdict.status

    @property
    def reason(self) -> str:
        return "" if self.verdict is None else self.verdict.reason

    @property
    def fatal(self) -> bool:
        """Whether it took the device down."""
        return isinstance(self.verdict, Failure) and self.verdict.kind == "fatal"


@dataclass(frozen=True)
class Case:
    """One call of `operator` and the rivals that make it; with `all_configs` each with all its configs."""

    workload: Workload
    site: Site
    operator: Operator
    policies: tuple[str, ...] = POLICIES  # a rival that knows none of them is not even gated, which may take minutes
    all_configs: bool = False

    @property
    def work(self) -> Work:
        """What one call must do at least."""
        return self.operator.work(self.workload)

    @property
    def dtype_key(self) -> str:
        """The peak by which FLOPs are judged, a key of `Device.peak_flops`."""
        key = self.operator.dtype_key
        return self.workload.dtype if key is None else key(self.workload)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that are to have a record, the baselines last."""
        return (*(r.name for r in (*self.operator.rivals, *self.operator.baselines)), COPY)

    @property
    def memory_needed(self) -> int:
        """Bytes that gating one rival takes: inputs, two results, a reference, and two steps of its computation; of FP8
        operands, whose references are worked out group by group, as much as of 16-bit ones."""
        if self.operator.memory_nbytes is not None:
            return int(self.operator.memory_nbytes(self.workload))
        nbytes, itemsize = self.work.nbytes, max(self.workload.itemsize, 2)
        return int(2 * nbytes + 3 * _REFERENCE_ITEMSIZE / 2 * nbytes / itemsize)

    def candidates(self, names: Collection[str], seed: int) -> Iterator[Candidate]:
        """The candidates of `names`, gated one after another on inputs of `seed`. May run out of memory."""
        operator, workload = self.operator, self.workload
        rivals = [r for r in (*operator.rivals, *operator.baselines) if r.name in names]
        # First those judged in processes of their own, which need the memory that the inputs would take.
        checked = {r.name: r.check(workload, seed + 1) for r in rivals if r.check is not None}
        inputs = (operator.gate_inputs or operator.make_inputs)(workload, self.site.torch_device, seed)
        shared = cache(lambda: operator.reference(workload, inputs))
        dead = False
        for rival in rivals:
            for candidate in self._of(rival, inputs, shared, checked.get(rival.name)):
                dead = dead or candidate.fatal
                yield candidate
        if COPY in names and not dead:
            yield from map(self._copy, COPIES)

    def input_sets(self, seed: int) -> list[Inputs]:
        """Sets of inputs, together larger than the cache, for the candidates' `bind`. May run out of memory."""
        work, own = self.work, self.operator.set_nbytes
        nbytes = int(work.nbytes if own is None else own(self.workload))
        count = set_count(nbytes, self.site)
        if own is None and self.site.device.kind == "cpu" and work.intensity > _CPU_INTENSITY:
            count = min(count, _CPU_SETS)  # it computes so long that it does not notice where the inputs come from
        return [self.operator.make_inputs(self.workload, self.site.torch_device, seed + i) for i in range(count)]

    def failed(self, name: str, error: Exception) -> Candidate:
        """One that raised `error` in the gate."""
        failure = failure_of(error, self.site.torch_device)
        return Candidate(name, self.work, verdict=replace(failure, reason=f"in the gate: {failure.reason}"))

    def record(
        self, candidate: Candidate, policy: str, limit: Bound, *, env: Env, run: str, unmeasured: str = "not measured"
    ) -> Record:
        """What is known of `candidate` under `policy`."""
        return measured(
            **record_fields(self.workload),
            backend=candidate.name,
            config=candidate.shown_config(policy),
            policy=policy,
            work=candidate.work,
            limit=limit,
            outcome=candidate.outcome,
            verdict=candidate.verdict,
            unmeasured=unmeasured,
            env=env,
            run=run,
        )

    def _of(
        self, rival: Rival, inputs: Inputs, shared: Callable[[], Expected], verdict: Verdict | None
    ) -> Iterator[Candidate]:
        """`rival` with its default config, and with `all_configs` the others as well if the first passed; or the reason
        why it can't take part. `shared` gives the reference of all that have none of their own."""
        work = self.work if rival.work is None else rival.work(self.workload)
        if verdict is not None and not verdict.ok:
            yield Candidate(rival.name, work).judged(verdict)
            return
        try:
            reason = rival.supports(self.workload, self.site.device)
            several = [rival] if reason or rival.configs is None else rival.configs(self.workload, self.site.device)
            several = list(several) if self.all_configs else [next(iter(several))]
        except Exception as error:
            yield self.failed(rival.name, error)
            return
        if reason is not None:
            yield Candidate(rival.name, work, verdict=Failure("limit", reason))
            return
        for index, one in enumerate(several):
            candidate = self._bound(one, work)
            if verdict is not None:
                candidate = candidate.judged(verdict)
            elif set(candidate.policies) & set(self.policies):
                candidate = self._gated(candidate, one, inputs, shared)
            yield candidate
            if candidate.fatal or (not index and candidate.status != "ok"):
                return

    def _gated(self, candidate: Candidate, rival: Rival, inputs: Inputs, shared: Callable[[], Expected]) -> Candidate:
        try:
            reference = shared() if rival.reference is None else rival.reference(self.workload, inputs)
            tolerance = (rival.tolerance or self.operator.tolerance)(self.workload)
            return candidate.judged(judge(rival, self.workload, inputs, reference, tolerance))
        except Exception as error:
            return replace(self.failed(rival.name, error), work=candidate.work, config=candidate.config)
        finally:
            release(self.site.torch_device)

    def _bound(self, rival: Rival, work: Work) -> Candidate:
        """A candidate that has not been gated yet."""
        workload = self.workload

        def bind(inputs: Inputs, policy: str) -> Callable[[], Any]:
            made = rival.bind_on_host if rival.bind_on_host is not None and policy == "graph" else rival.bind
            with torch.enable_grad():
                return made(workload, inputs)

        policies = POLICIES if rival.graph else tuple(p for p in POLICIES if p != "graph")
        on_host = rival.bind_on_host is not None and self.site.device.kind == "cuda"
        again = None if rival.check_again is None else partial(rival.check_again, workload)
        return Candidate(rival.name, work, rival.config, bind, on_host, policies=policies, check_again=again)

    def _copy(self, copy: Copy) -> Candidate:
        nbytes, device = self.work.nbytes, self.site.torch_device
        work = copy_work(nbytes)
        try:
            verdict = copy.check(nbytes, device)
        except Exception as error:
            return replace(self.failed(COPY, error), work=work)
        ready = Candidate(COPY, work, {"way": copy.way}, lambda inputs, policy: copy.call(nbytes, device))
        return ready.judged(verdict)


def set_count(set_nbytes: int, site: Site) -> int:
    """How many sets of `set_nbytes` bytes, inputs and results, exceed the cache and leave room in the memory."""
    free = free_memory(site.torch_device) or 2 * set_nbytes
    return sets_for(set_nbytes, site.device.l2_bytes, _MEMORY_SHARE * free)
