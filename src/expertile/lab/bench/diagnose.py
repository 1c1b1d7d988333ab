"""Three small experiments that tell launch cost, split work and tensor cores apart, and say what they show.

1. One large product against many small ones at EQUAL FLOPs: 8 x 1024³ = 1 x 2048³ = 1 x (8192 x 1024 x 1024). Beside
   them 2896³, which has as many elements per matrix as the eight together (2896² ~ 8 x 1024²) but 2.83 times their
   FLOPs: a comparison with it measures work, not launches.
2. float16, bfloat16, TF32 and float32 products against the peak of each: a rate above the float32 peak is proof of
   tensor cores, a ratio of two times is not.
3. Cost of a launch: the same 64 calls issued one by one and replayed from a CUDA graph, for products of 256³ and for a
   kernel that does nothing worth mentioning.

`diagnose` measures; `conclude` turns its records, or those of a file, into sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.measure.interleaved import Budget, Failure, Outcome, TimedCall, failure_of, release, time_interleaved
from expertile.lab.measure.timers import POLICIES, sets_for
from expertile.lab.race.case import Site
from expertile.lab.race.gate import check, full_precision
from expertile.lab.race.operands import free_memory
from expertile.lab.race.operator import Verdict
from expertile.lab.race.record import Record, kept, measured
from expertile.roofline import Work, bound

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
LAUNCHES = 64


@dataclass(frozen=True)
class Case:
    """`count` products [m, k] x [k, n], as one `mm`, a `loop` of mm, or one `bmm`; or `count` additions of one element
    ("add"), a kernel with nothing to do.
    """

    how: str
    count: int
    m: int
    n: int
    k: int
    dtype: str

    @property
    def op(self) -> str:
        return "add" if self.how == "add" else "mm"

    @property
    def backend(self) -> str:
        return {"mm": "torch.mm", "loop": "torch.mm loop", "bmm": "torch.bmm", "add": "torch.add loop"}[self.how]

    @property
    def workload(self) -> str:
        if self.how == "add":
            return f"diagnose/{self.count}xadd"
        return f"diagnose/{self.count}x{self.m}x{self.n}x{self.k}"

    @property
    def work(self) -> Work:
        size = _DTYPES[self.dtype].itemsize
        if self.how == "add":
            return Work(float(self.count), 2.0 * self.count * size)
        moved = self.m * self.k + self.k * self.n + self.m * self.n
        return Work(2.0 * self.count * self.m * self.n * self.k, float(self.count * moved * size))

    @property
    def launches(self) -> int:
        return self.count if self.how in ("loop", "add") else 1


def experiments(device: Device) -> tuple[tuple[Case, ...], ...]:
    """The cases that are timed against each other, group by group; smaller ones on a CPU."""
    gpu = device.kind == "cuda"
    small, dtype = (1024, "fp16") if gpu else (256, "fp32")
    unequal = 2896 * small // 1024
    split = (
        Case("mm", 1, 2 * small, 2 * small, 2 * small, dtype),
        Case("mm", 1, 8 * small, small, small, dtype),
        Case("bmm", 8, small, small, small, dtype),
        Case("loop", 8, small, small, small, dtype),
        Case("mm", 1, unequal, unequal, unequal, dtype),
    )
    names = [d for d in ("fp16", "bf16", "tf32", "fp32") if device.peak(d)] if gpu else ["bf16", "fp32"]
    units = tuple(tuple(Case("mm", 1, s, s, s, d) for d in names) for s in ((2048, 4096, 8192) if gpu else (512, 1024)))
    tiny = 256 if gpu else 64
    launch = (
        Case("loop", LAUNCHES, tiny, tiny, tiny, dtype),
        Case("bmm", LAUNCHES, tiny, tiny, tiny, dtype),
        Case("add", LAUNCHES, 1, 1, 1, "fp32"),
    )
    return (split, *units, launch)


def diagnose(
    device: torch.device | str | None = None,
    *,
    policies: Sequence[str] = POLICIES,
    quick: bool = False,
    out_path: str | Path | None = None,
) -> Iterator[Record]:
    """Measure every case under every policy the device has; records go to `out_path` (JSONL) as they are made. A case
    that is wrong or fails is a record with a reason."""
    site = Site.current(device)
    facts, torch_device = site.device, site.torch_device
    env, run_id = capture_env(facts), new_run_id()
    budget = Budget(0.5 if quick else 2.0, min_rounds=7 if quick else 9)
    for group in experiments(facts):
        for policy in policies if torch_device.type == "cuda" else ("eager",):
            yield from kept(_group(group, policy, facts, torch_device, budget, env, run_id), out_path)


def _group(
    cases: Sequence[Case], policy: str, facts: Device, device: torch.device, budget: Budget, env: Env, run_id: str
) -> Iterator[Record]:
    smallest = min(c.work.nbytes for c in cases)
    everything = sum(c.work.nbytes for c in cases)
    fit = 0.3 * (free_memory(device) or everything) * smallest / everything
    count = sets_for(int(smallest), facts.l2_bytes, fit, most=16)
    verdicts: dict[Case, Verdict | Failure] = {}
    candidates = []
    for case in cases:
        try:
            calls = [_prepare(case, device, seed) for seed in range(count)]
            verdicts[case] = _verify(case, calls[0])
            candidates.append(TimedCall(_name(case), lambda i, calls=calls: calls[i][0]()))  # type: ignore[misc]
        except Exception as error:
            verdicts[case] = failure_of(error, device)
    right = [c for c in candidates if any(_name(k) == c.name and _passed(v) for k, v in verdicts.items())]
    outcomes = time_interleaved(right, policy=policy, device=device, num_sets=count, budget=budget)
    del candidates, right
    release(device)
    for case in cases:
        yield _record(case, policy, verdicts[case], outcomes.get(_name(case)), facts, env, run_id)


def _name(case: Case) -> str:
    return f"{case.workload} {case.dtype} {case.backend}"


def _passed(verdict: Verdict | Failure) -> bool:
    return isinstance(verdict, Verdict) and verdict.ok


Prepared = tuple[Callable[[], Any], torch.Tensor, torch.Tensor]


def _prepare(case: Case, device: torch.device, seed: int) -> Prepared:
    """(call, a [count, m, k], b [count, k, n]) on random operands."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = _DTYPES[case.dtype]
    a = torch.randn(case.count, case.m, case.k, dtype=dtype, device=device, generator=generator)
    b = torch.randn(case.count, case.k, case.n, dtype=dtype, device=device, generator=generator).mul_(case.k**-0.5)
    xs, ys = a.unbind(0), b.unbind(0)
    calls: dict[str, Callable[[], Any]] = {
        "mm": lambda: torch.mm(xs[0], ys[0]),
        "bmm": lambda: torch.bmm(a, b),
        "loop": lambda: [torch.mm(x, y) for x, y in zip(xs, ys, strict=True)],
        "add": lambda: [torch.add(x, y) for x, y in zip(xs, ys, strict=True)],
    }
    call = calls[case.how]
    if case.dtype not in ("fp32", "tf32"):
        return call, a, b
    precision = "high" if case.dtype == "tf32" else "highest"

    def with_precision() -> Any:
        with full_precision(precision):
            return call()

    return with_precision, a, b


def _verify(case: Case, prepared: Prepared) -> Verdict:
    call, a, b = prepared
    result = call()
    out = torch.stack(list(result)) if isinstance(result, list) else result.reshape(case.count, case.m, case.n)
    if case.how == "add":
        return check(out.flatten(), (a.double() + b.double()).flatten(), "fp32", 1)
    wide = torch.float64 if case.dtype == "fp32" else torch.float32
    with full_precision():
        reference = torch.bmm(a.to(wide), b.to(wide))
    return check(out, reference, case.dtype, case.k)


def _record(
    case: Case, policy: str, verdict: Verdict | Failure, outcome: Outcome | None, facts: Device, env: Env, run_id: str
) -> Record:
    shape = {"count": case.count, "m": case.m, "n": case.n, "k": case.k, "launches": case.launches}
    return measured(
        op=case.op,
        workload=case.workload,
        shape=shape,
        dtype=case.dtype,
        backend=case.backend,
        config={},
        policy=policy,
        work=case.work,
        limit=bound(case.work, facts, case.dtype),
        outcome=outcome,
        env=env,
        run=run_id,
        verdict=verdict,
    )
