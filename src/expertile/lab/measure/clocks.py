"""Clocks, power and throttle reasons of a GPU, read through NVML and never set. A chip that its power limit holds back
runs the same product 15 % slower than a moment before: a time without these readings looks like a slower kernel."""

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h). An idle chip and clocks that were set by hand are
# reasons in NVML's eyes, but hold nothing back that the run could have had.
_REASONS = {
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake",
    0x100: "display_clock",
}


@dataclass(frozen=True)
class Clocks:
    """One reading, or the summary of several. None where the machine does not say."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] = ()
    load: float | None = None


NO_CLOCKS = Clocks()
ClockReader = Callable[[], Clocks]


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """NVML's clock-event bits -> the names of those that slow the chip down."""
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


def summarize(readings: Sequence[Clocks]) -> Clocks:
    """The median clock, power and load of `readings`, and every throttle reason that any of them saw."""

    def median(name: str) -> float | None:
        known = [value for r in readings if (value := getattr(r, name)) is not None]
        return statistics.median(known) if known else None

    seen = {reason for r in readings for reason in r.throttle}
    reasons = tuple(sorted(seen, key=[*_REASONS.values(), *sorted(seen)].index))
    return Clocks(median("sm_clock_mhz"), median("power_w"), reasons, median("load"))


def clock_reader(device: torch.device) -> ClockReader:
    """A function that reads the clocks of `device`. On a CPU, or where NVML is absent, it returns empty readings."""
    if device.type != "cuda":
        return Clocks
    try:
        handle, nvml = _handle(device)
    except Exception:  # no driver, no NVML, or a container that hides it: figures without clocks beat no figures
        return Clocks
    return lambda: _read(nvml, handle)


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None without one."""
    try:
        return str(_nvml().nvmlSystemGetDriverVersion())
    except Exception:
        return None


def _nvml() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pynvml
    pynvml.nvmlInit()
    return pynvml


def _handle(device: torch.device) -> tuple[Any, Any]:
    nvml = _nvml()
    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    # By UUID, because NVML's indices ignore CUDA_VISIBLE_DEVICES.
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return nvml.nvmlDeviceGetHandleByUUID(name), nvml


def _read(nvml: Any, handle: Any) -> Clocks:
    def ask(query: str, *args: Any) -> Any:
        try:
            return getattr(nvml, query)(handle, *args)
        except Exception:  # each query may be missing from a driver or refused under virtualisation
            return None

    clock = ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
    milliwatts = ask("nvmlDeviceGetPowerUsage")
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:
        bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return Clocks(
        None if clock is None else float(clock),
        None if milliwatts is None else milliwatts / 1000.0,
        throttle_reasons(bits or 0),
    )
