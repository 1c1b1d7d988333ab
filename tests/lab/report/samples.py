"""Made-up records that obey the record format: an invented device, seeded random times, no measurement."""

import random
from collections.abc import Sequence
from typing import Any

from expertile.lab.measure.env import Env
from expertile.lab.race.record import Record

PEAK_FLOPS = 500e12
MEMORY_BPS = 2e12
RIVALS = ("triton_tma", "triton_pointer", "torch_grouped", "cublas_grouped", "quack", "padded_bmm", "loop")
DEVICE = "Imaginary GPU"


def record(
    workload: str = "moe-ffn/up",
    backend: str = "loop",
    time_s: float | None = 100e-6,
    *,
    policy: str = "graph",
    groups: int = 8,
    rows: int = 16384,
    n: int = 4096,
    k: int = 1024,
    run: str = "run-a",
    status: str = "ok",
    reason: str = "",
    spread: float = 0.002,
    bounded: bool = True,
    device: str = DEVICE,
    dtype: str = "bf16",
    **more: Any,
) -> Record:
    """One record of a ragged-M product; `spread` is half the interval as a share of the time."""
    flops, nbytes = 2.0 * rows * n * k, 2.0 * (rows * k + groups * n * k + rows * n)
    compute, memory = flops / PEAK_FLOPS, nbytes / MEMORY_BPS
    time = time_s if status == "ok" else None
    env = {"gpu": device, "driver": "1.2.3", "torch": "2.13.0", "triton": "3.6.0", "expertile": "0.1.0"}
    env |= {"commit": "0123abcd4567", "sm_clock_mhz": 1700, "power_w": 600, "throttle": ""}
    fields = {
        "op": "grouped_mm",
        "workload": workload,
        "shape": {
            "layout": "ragged_m",
            "groups": groups,
            "m": rows,
            "n": n,
            "k": k,
            "group_sizes": [rows // groups] * groups,
            "a_layout": "mk",
            "b_layout": "nk",
            "routing": "uniform",
        },
        "dtype": dtype,
        "backend": backend,
        "config": {"block_m": 128, "num_warps": 8} if backend.startswith("triton") else {},
        "policy": policy,
        "metric": "seconds",
        "value": time,
        "ci95": [time * (1 - spread), time * (1 + spread)] if time else None,
        "flops": flops,
        "nbytes": nbytes,
        "bound": max(compute, memory) if bounded else 0.0,
        "limiter": ("compute" if compute >= memory else "memory") if bounded else "unknown",
        "rel_error": 2e-3 if status in ("ok", "wrong") else None,
        "max_error": 0.03 if status in ("ok", "wrong") else None,
        "status": status,
        "reason": reason,
        "details": {},
        "env": Env(**env | more.pop("env", {})),
        "run": run,
        "date": "2026-01-02T03:04:05Z",
    }
    fields |= more
    if fields["status"] == "ok":  # none is better than its bound
        fields["bound"] = min(fields["bound"], fields["value"])
    return Record(**fields)


def lab(
    seed: int = 0,
    workloads: int = 6,
    backends: Sequence[str] = (*RIVALS, "dense", "copy"),
    policies: Sequence[str] = ("graph", "eager"),
    preset: str = "moe-ffn",
    **more: Any,
) -> list[Record]:
    """A whole run: `workloads` × `backends` × `policies`, with a tie, a wrong, a refused and an unsupported row."""
    draw = random.Random(seed)
    found = []
    for index in range(workloads):
        groups = draw.choice((8, 64, 128))
        size = {
            "groups": groups,
            "rows": groups * draw.choice((8, 64, 512, 1024)),
            "n": 1024 * draw.randint(1, 12),
            "k": 1024 * draw.randint(1, 7),
        }
        if index < 4:
            size = {"groups": 64, "rows": 64 * 4 ** (index + 1), "n": 4096, "k": 2048}
        name = f"{preset}/{size['groups']}x{size['rows'] // size['groups']}-n{size['n']}-k{size['k']}-{index}"
        floor = record(name, **size, **more).bound or 20e-6
        for backend in backends:
            share = {"loop": 0.3, "padded_bmm": 0.6, "dense": 0.93, "copy": 0.9}.get(backend, 0.8)
            time = floor / (share * draw.uniform(0.8, 1.06))
            launch = draw.uniform(20e-6, 40e-6) * (groups if backend == "loop" else 1)
            for policy in policies:
                cost = time if policy == "graph" else max(time, launch) + draw.uniform(1e-6, 8e-6)
                fields = {"policy": policy, **size, **more}
                if backend == "cublas_grouped" and index % 3 == 2:
                    reason = "K × 2 bytes is no multiple of 16 (expected for every group)"
                    found.append(record(name, backend, None, status="unsupported", reason=reason, **fields))
                elif backend == "quack" and index == 1:
                    reason = "relative error 0.31 is above 0.01"
                    found.append(record(name, backend, None, status="wrong", reason=reason, **fields))
                elif backend == "loop" and index == 3 and policy == "graph":
                    reason = "CUDA out of memory: 12.0 GB asked for"
                    found.append(record(name, backend, None, status="refused", reason=reason, **fields))
                else:
                    found.append(record(name, backend, cost, spread=draw.uniform(0.0005, 0.004), **fields))
    return found
