"""Why a rival can't compute a workload on a device: what several of them have in common."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from expertile.device import Device
from expertile.lab.race.operator import Workload

Supports = Callable[[Workload, Device], str | None]


def anywhere(w: Workload, device: Device) -> str | None:
    return None


def on_gpu(w: Workload, device: Device) -> str | None:
    return None if device.kind == "cuda" else "needs a CUDA GPU"


def on_hopper(w: Workload, device: Device) -> str | None:
    if device.kind != "cuda" or device.capability is None or device.capability < (9, 0):
        return "needs compute capability 9.0 or later"
    return None


def installed(package: str, then: Supports, named: str = "") -> Supports:
    """`then`, if `package` (`named` so by its installer) can be imported."""

    def supports(w: Workload, device: Device) -> str | None:
        return f"{named or package} is not installed" if find_spec(package) is None else then(w, device)

    return supports
