"""The most generous reading of what the hardware allows: a claim beyond it is impossible, not merely surprising."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertile.device import Device, generous_peak

# Consumer boards boost past the clock on the box (a 4090 sold as 2.52 GHz runs 2.8) and their memory overclocks;
# data-centre parts keep to theirs.
_CLOCK_MARGIN = {"GeForce": 1.15, "": 1.03}
_MEMORY_MARGIN = {"GeForce": 1.10, "": 1.02}


@dataclass(frozen=True)
class Limit:
    """`value` in FLOP/s or B/s, and the words that say how it was read."""

    value: float
    why: str


def compute_limit(
    devices: Sequence[Device], formats: Sequence[str], gpus: int = 1, sparse: bool = False, integers: bool = True
) -> Limit | None:
    """The highest FLOP/s that any of `devices` reaches in any of `formats`.

    Where the text names no format every one counts; those of integers only if `integers` says that it speaks of any.
    """
    best: Limit | None = None
    for device in devices:
        for key, name in _keys(device, formats, integers):
            peak = generous_peak(device, key)
            if not peak:
                continue
            doubled = _doubling(device, name)
            value = peak * doubled * gpus * (2 if sparse else 1)
            if best is None or value * _margin(device, _CLOCK_MARGIN) > best.value:
                best = Limit(
                    value * _margin(device, _CLOCK_MARGIN), _words(device, name, value, gpus, sparse, bool(formats))
                )
    return best


def _keys(device: Device, formats: Sequence[str], integers: bool) -> list[tuple[str, str]]:
    if not formats:
        keys = [k for k in device.peak_flops if integers or k != "int8"]
        extra = [("fp8", "fp4")] if device.at_least(10) else []
        return [(k, k) for k in keys] + extra
    found: list[tuple[str, str]] = []
    for name in formats:
        if name == "fp32":
            found += [("fp32", "fp32"), ("tf32", "fp32 (as tf32)")]
        elif name == "int4":  # weight-only formats compute in a wider one; which, the text need not say
            found += [(k, k) for k in ("fp16", "bf16", "int8", "fp8")] + [("int8", "int4")]
        elif name == "fp4":  # before Blackwell a storage format only
            found += [("fp8", "fp4")] if device.at_least(10) else [(k, k) for k in ("fp16", "bf16", "int8", "fp8")]
        elif name == "int8":
            found += [("int8", "int8"), ("fp16", "fp16"), ("bf16", "bf16")]
        else:
            found.append((name, name))
    return found


def _doubling(device: Device, name: str) -> float:
    if name == "fp4":
        return 2.0
    if name == "int4" and device.capability is not None and (7, 5) <= device.capability < (9, 0):
        return 2.0  # Turing, Ampere and Ada multiply int4 at twice the int8 rate
    return 1.0


def _margin(device: Device, margins: dict[str, float]) -> float:
    return margins["GeForce" if "GeForce" in device.name else ""]


def _words(device: Device, name: str, value: float, gpus: int, sparse: bool, stated: bool) -> str:
    several = f"{gpus} × " if gpus > 1 else ""
    kind = "sparse" if sparse else "dense"
    chosen = "" if stated else ", the fastest format it has"
    margin = _margin(device, _CLOCK_MARGIN)
    clock = f", and {margin - 1:.0%} for a higher boost clock"
    return f"{several}{device.name}'s {kind} {name} peak {value / 1e12:.4g} TFLOP/s{chosen}{clock}"


def memory_limit(devices: Sequence[Device], gpus: int = 1) -> Limit | None:
    """The highest DRAM bandwidth of any of `devices`, times `gpus`."""
    best: Limit | None = None
    for device in devices:
        if device.memory_bps is None:
            return None
        margin = _margin(device, _MEMORY_MARGIN)
        value = device.memory_bps * gpus
        if best is None or value * margin > best.value:
            several = f"{gpus} × " if gpus > 1 else ""
            best = Limit(value * margin, f"{several}{device.name}'s {value / 1e9:.4g} GB/s, and {margin - 1:.0%} more")
    return best


def cache_bytes(devices: Sequence[Device], gpus: int = 1) -> int:
    """The largest second-level cache: bytes that need not come from DRAM if they stay there between runs."""
    return max((d.l2_bytes for d in devices), default=0) * gpus
