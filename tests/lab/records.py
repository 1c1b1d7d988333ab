"""Records for tests: valid ones, of which a test changes what it is about."""

from pathlib import Path
from typing import Any

from expertile.lab.measure.env import Env
from expertile.lab.race.record import Record, shipped_root


def timed(time_s: float = 1e-3, spread: float = 0.01, **changes: Any) -> Record:
    """An "ok" record of `time_s` seconds with a 95 % interval of ±`spread`."""
    values: dict[str, Any] = {
        "op": "grouped_mm",
        "workload": "w",
        "shape": {"groups": 2, "group_sizes": [3, 4]},
        "dtype": "bf16",
        "backend": "loop",
        "config": {},
        "policy": "graph",
        "value": time_s,
        "ci95": (time_s * (1 - spread), time_s * (1 + spread)),
        "flops": 1e9,
        "nbytes": 1e6,
        "bound": 1e-6,
        "limiter": "compute",
        "rel_error": 1e-3,
        "max_error": 1e-2,
        "status": "ok",
        "reason": "",
        "env": Env("NVIDIA H200", "580.1", "2.11", "3.6", "0.1", "0123abcd4567", 1700.0, 690.0, ""),
        "run": "r1",
        "date": "2026-11-21",
    }
    return Record(**values | changes)


def untimed(status: str, reason: str = "because", **changes: Any) -> Record:
    """A record without a time."""
    base = timed(**changes).__dict__
    nothing = dict.fromkeys(("value", "ci95", "rel_error", "max_error"))
    return Record(**{**base, **nothing, "status": status, "reason": reason})


def record_files(root: Path | None = None) -> list[Path]:
    """All files of records under `root` (the shipped ones by default), sorted."""
    return sorted((root or shipped_root()).glob("*/*.jsonl*"))
