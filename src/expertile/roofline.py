"""The least time that work can take on a device: max(FLOPs / peak FLOP/s, bytes / memory bytes/s).

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

from dataclasses import dataclass

from expertile.device import Device


@dataclass(frozen=True)
class Work:
    """Useful floating-point operations, and algorithmic bytes: each input read once, each output written once."""

    flops: float
    nbytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.nbytes if self.nbytes else float("inf")

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class Bound:
    """No run is faster than `seconds`; `limiter` is what sets it: "compute", "memory" or "unknown"."""

    seconds: float
    limiter: str


def bound(work: Work, device: Device, dtype_key: str) -> Bound:
    """The roofline bound of `work` on `device` for products of dtype `dtype_key` (a key of `Device.peak_flops`).

    A peak or bandwidth that the device does not state bounds nothing; with neither, seconds is 0 and "unknown".
    """
    peak = device.peak(dtype_key)
    compute = work.flops / peak if peak else 0.0
    memory = work.nbytes / device.memory_bps if device.memory_bps else 0.0
    if compute == 0.0 and memory == 0.0:
        return Bound(0.0, "unknown")
    return Bound(compute, "compute") if compute >= memory else Bound(memory, "memory")
