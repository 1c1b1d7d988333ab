"""What a record says about where and when it was made."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from expertile.device import Device
from expertile.lab.clocks import Clocks, driver_version
from expertile.lab.record import Env
from expertile.version import __version__, commit


def capture_env(device: Device) -> Env:
    """The processor, driver and package versions of this process; clocks are added per record."""
    return Env(
        gpu=device.name,
        driver=driver_version() if device.kind == "cuda" else None,
        torch=torch.__version__,
        triton=_version("triton"),
        expertile=__version__,
        commit=commit(),
    )


def with_clocks(env: Env, clocks: Clocks) -> Env:
    """`env` with clock, power and throttle reasons ("" where they were read and there was none)."""
    known = clocks.sm_clock_mhz is not None or clocks.power_w is not None or bool(clocks.throttle)
    throttle = ",".join(clocks.throttle) if known else None
    return replace(env, sm_clock_mhz=clocks.sm_clock_mhz, power_w=clocks.power_w, throttle=throttle)


def same_machine(first: Env, second: Env) -> bool:
    """Whether two records may belong to one run: the same processor, driver, versions and commit."""
    keys = ("gpu", "driver", "torch", "triton", "expertile", "commit")
    return all(getattr(first, key) == getattr(second, key) for key in keys)


def new_run_id() -> str:
    """Eight hexadecimal digits."""
    return secrets.token_hex(4)


def timestamp() -> str:
    """Now, in UTC, to the second (ISO 8601)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
