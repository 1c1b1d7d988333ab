"""The machine and software that a record names; torch is not imported, as the build of the package reads this."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertile.lab.measure.clocks import Clocks


OF_CPU = ("cores", "threads", "quota", "load")  # keys that records of a CPU alone have


def with_clocks(env: "Env", clocks: "Clocks") -> "Env":
    """`env` with clock, power, load and throttle reasons ("" where they were read and there was none)."""
    read = (clocks.sm_clock_mhz, clocks.power_w, clocks.load)
    known = any(value is not None for value in read) or bool(clocks.throttle)
    throttle = ",".join(clocks.throttle) if known else None
    return replace(env, sm_clock_mhz=clocks.sm_clock_mhz, power_w=clocks.power_w, throttle=throttle, load=clocks.load)


def timestamp() -> str:
    """Now, in UTC, to the second (ISO 8601)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Env:
    """The machine and software of a record; None for what is not there (a driver on a CPU) or could not be read. `gpu`
    is the name of the device measured on. `sm_clock_mhz` and `power_w` are medians over the rounds, `throttle` the
    reasons seen, separated by commas. Of a CPU alone: the `cores` that this process may use, `threads` of torch,
    `quota`, the cores that a cgroup grants, and `load`, the runnable threads of the machine."""

    gpu: str
    driver: str | None = None
    torch: str | None = None
    triton: str | None = None
    expertile: str | None = None
    commit: str | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    throttle: str | None = None
    cores: int | None = None
    threads: int | None = None
    quota: float | None = None
    load: float | None = None

    def __post_init__(self) -> None:
        check_text("env.gpu", self.gpu)
        for name in ("driver", "torch", "triton", "expertile", "commit", "throttle"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"env.{name}: expected a string or null, got {value!r}")
        for name in ("sm_clock_mhz", "power_w", *OF_CPU):
            check_number(f"env.{name}", getattr(self, name), optional=True)


def known_keys(where: str, data: Mapping[str, Any], known: Collection[str]) -> None:
    """ValueError for a key of `data` that is not among those known."""
    for key in data:
        if key not in known:
            raise ValueError(f"{where}{key}: unknown key; expected {', '.join(known)}")


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected a non-empty string, got {value!r}")


def check_number(name: str, value: Any, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: expected a finite number of 0 or more, got {value!r}")
