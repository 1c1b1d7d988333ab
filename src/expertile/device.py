"""What one processor can do at most: frozen facts about a GPU or CPU, by name or from the driver.

Peaks are *dense* (no structured sparsity) FLOP/s with float32 accumulation where the hardware offers a choice,
at the highest clock the part may boost to, so that a measured time can never honestly fall below them.
Sources: NVIDIA architecture whitepapers and datasheets (Volta 2017, Ampere GA100/GA102 2020, Ada 2022, Hopper 2022,
Blackwell 2024); per-SM rates from the CUDA C++ Programming Guide's arithmetic-throughput table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # the facts of a device need no torch: `expertile audit` starts without it

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")

_TORCH_KEYS = {
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float8_e4m3fn": "fp8",
    "torch.float8_e5m2": "fp8",
    "torch.int8": "int8",
}


def dtype_key(dtype: torch.dtype, allow_tf32: bool = False) -> str:
    """The key of `Device.peak_flops` for matrix products of `dtype`; float32 is "tf32" where that is allowed.

    Raises ValueError for a dtype that no matrix unit multiplies.
    """
    key = _TORCH_KEYS.get(str(dtype))
    if key is None:
        raise ValueError(f"dtype: expected one of {', '.join(_TORCH_KEYS)}, got {dtype}")
    return "tf32" if key == "fp32" and allow_tf32 else key


@dataclass(frozen=True)
class Device:
    """Facts of one processor. Bytes, hertz, FLOP/s and bytes/s; `memory_bps` is None where nobody states it."""

    name: str
    kind: str  # "cuda" | "cpu"
    capability: tuple[int, int] | None
    sm_count: int  # cores on a CPU
    max_clock_hz: float
    smem_bytes: int  # shared memory that one block may use
    l2_bytes: int
    memory_bytes: int
    memory_bps: float | None
    peak_flops: Mapping[str, float] = field(hash=False)
    aliases: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Lower-case name with dashes, as used for folders: "NVIDIA H200" -> "nvidia-h200"."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def peak(self, key: str) -> float | None:
        """Dense peak FLOP/s for a dtype key, or None where the part has no such unit."""
        return self.peak_flops.get(key)

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether this is a CUDA device of that compute capability or later."""
        return self.kind == "cuda" and self.capability is not None and self.capability >= (major, minor)

    @staticmethod
    def by_name(name: str) -> Device:
        """The known device that `name` means ("rtx 4090", "V100-SXM2-32GB"). ValueError lists those known."""
        # "rtx4090" means what "rtx 4090" does.
        found = find_in_text(name) or find_in_text(re.sub(r"(?i)(rtx|gtx)(?=\d)", r"\1 ", name))
        if not found:
            raise ValueError(f"gpu: no known device in {name!r}; known: {', '.join(d.name for d in known_devices())}")
        return found[0]

    @staticmethod
    def current(torch_device: torch.device | str | int | None = None) -> Device:
        """The device that tensors on `torch_device` live on; by default the first GPU, else the CPU."""
        import torch

        if torch_device is None:
            torch_device = "cuda" if torch.cuda.is_available() else "cpu"
        dev = torch.device(torch_device)
        if dev.type == "cuda":
            return _cuda(dev.index if dev.index is not None else torch.cuda.current_device())
        return _cpu()


def _gpu(
    name: str,
    capability: tuple[int, int],
    sms: int,
    ghz: float,
    smem_kib: int,
    l2_mib: float,
    mem_gb: float,
    tbps: float,
    per_sm: Mapping[str, int],
    aliases: tuple[str, ...] = (),
) -> Device:
    peaks = {k: v * sms * ghz * 1e9 for k, v in per_sm.items()}
    return Device(
        name, "cuda", capability, sms, ghz * 1e9, smem_kib * 1024, int(l2_mib * 2**20), int(mem_gb * 1e9), tbps * 1e12,
        MappingProxyType(peaks), aliases,
    )  # fmt: skip


# FLOP per clock and SM, a multiply-add counted as two.
_VOLTA = {"fp32": 128, "fp16": 1024}
_TURING = {"fp32": 128, "fp16": 1024, "int8": 2048}
_GA100 = {"fp32": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048, "int8": 4096}
_GA102 = {"fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "int8": 2048}
_AD102 = {"fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "fp8": 1024, "int8": 2048}
_L40S = {"fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024, "fp8": 2048, "int8": 2048}
_HOPPER = {"fp32": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192, "int8": 8192}
_B200 = {"fp32": 256, "tf32": 4096, "fp16": 8192, "bf16": 8192, "fp8": 16384, "int8": 16384}

# GeForce parts run float32-accumulated tensor products at half rate; the whitepapers' higher figures
# (142 TFLOP/s fp16 on the 3090, 330 on the 4090) accumulate in float16. See `generous_peak`.
_KNOWN = (
    _gpu("NVIDIA H200", (9, 0), 132, 1.98, 227, 60, 141, 4.8, _HOPPER, ("h200", "h200 sxm")),
    _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 227, 50, 80, 3.35, _HOPPER, ("h100 sxm", "h100 sxm5", "h100", "h100 80gb")),
    _gpu("NVIDIA H100 PCIe", (9, 0), 114, 1.755, 227, 50, 80, 2.04, _HOPPER, ("h100 pcie",)),
    _gpu("NVIDIA H100 NVL", (9, 0), 132, 1.785, 227, 50, 94, 3.938, _HOPPER, ("h100 nvl",)),
    _gpu("NVIDIA H800", (9, 0), 132, 1.98, 227, 50, 80, 3.35, _HOPPER, ("h800",)),
    _gpu("NVIDIA H20", (9, 0), 78, 1.98, 227, 60, 96, 4.0, {k: v // 4 if k not in ("fp32",) else v for k, v in _HOPPER.items()}, ("h20",)),
    _gpu("NVIDIA GH200", (9, 0), 132, 1.98, 227, 60, 96, 4.0, _HOPPER, ("gh200",)),
    _gpu("NVIDIA B200", (10, 0), 148, 1.965, 227, 126, 180, 8.0, _B200, ("b200",)),
    _gpu("NVIDIA GB200", (10, 0), 152, 1.965, 227, 126, 186, 8.0, _B200, ("gb200",)),
    _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 163, 40, 80, 2.039, _GA100, ("a100 80gb", "a100 sxm4 80gb", "a100", "a100 sxm", "a100 sxm4")),
    _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41, 163, 40, 40, 1.555, _GA100, ("a100 40gb", "a100 sxm4 40gb", "a100 pcie 40gb")),
    _gpu("NVIDIA A100 80GB PCIe", (8, 0), 108, 1.41, 163, 40, 80, 1.935, _GA100, ("a100 pcie 80gb", "a100 80gb pcie", "a100 pcie")),
    _gpu("NVIDIA A800", (8, 0), 108, 1.41, 163, 40, 80, 2.039, _GA100, ("a800",)),
    _gpu("NVIDIA A10", (8, 6), 72, 1.695, 99, 6, 24, 0.6, {**_GA102, "tf32": 512, "fp16": 1024, "bf16": 1024}, ("a10", "a10g")),
    _gpu("NVIDIA A40", (8, 6), 84, 1.74, 99, 6, 48, 0.696, {**_GA102, "tf32": 512, "fp16": 1024, "bf16": 1024}, ("a40",)),
    _gpu("NVIDIA RTX A6000", (8, 6), 84, 1.8, 99, 6, 48, 0.768, {**_GA102, "tf32": 512, "fp16": 1024, "bf16": 1024}, ("a6000", "rtx a6000")),
    _gpu("NVIDIA GeForce RTX 3060", (8, 6), 28, 1.777, 99, 3, 12, 0.36, _GA102, ("rtx 3060",)),
    _gpu("NVIDIA GeForce RTX 3070", (8, 6), 46, 1.725, 99, 4, 8, 0.448, _GA102, ("rtx 3070", "3070")),
    _gpu("NVIDIA GeForce RTX 3080", (8, 6), 68, 1.71, 99, 5, 10, 0.76, _GA102, ("rtx 3080",)),
    _gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695, 99, 6, 24, 0.936, _GA102, ("rtx 3090", "3090")),
    _gpu("NVIDIA GeForce RTX 3090 Ti", (8, 6), 84, 1.86, 99, 6, 24, 1.008, _GA102, ("rtx 3090 ti", "3090 ti")),
    _gpu("NVIDIA GeForce RTX 4060", (8, 9), 24, 2.46, 99, 24, 8, 0.272, _AD102, ("rtx 4060",)),
    _gpu("NVIDIA GeForce RTX 4070", (8, 9), 46, 2.475, 99, 36, 12, 0.504, _AD102, ("rtx 4070",)),
    _gpu("NVIDIA GeForce RTX 4080", (8, 9), 76, 2.505, 99, 64, 16, 0.717, _AD102, ("rtx 4080",)),
    _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 99, 72, 24, 1.008, _AD102, ("rtx 4090", "4090")),
    _gpu("NVIDIA L4", (8, 9), 58, 2.04, 99, 48, 24, 0.3, _L40S, ("l4",)),
    _gpu("NVIDIA L40S", (8, 9), 142, 2.52, 99, 96, 48, 0.864, _L40S, ("l40s",)),
    _gpu("NVIDIA L40", (8, 9), 142, 2.49, 99, 96, 48, 0.864, {**_L40S, "fp8": 1024, "fp16": 512, "bf16": 512, "tf32": 256}, ("l40",)),
    _gpu("NVIDIA L20", (8, 9), 92, 2.52, 99, 96, 48, 0.864, _AD102, ("l20",)),
    _gpu("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 2.505, 99, 96, 48, 0.96, _L40S, ("rtx 6000 ada", "6000 ada")),
    _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 99, 96, 32, 1.792, {**_AD102, "int8": 2048}, ("rtx 5090", "5090")),
    _gpu("Tesla V100-SXM2-32GB", (7, 0), 80, 1.53, 96, 6, 32, 0.9, _VOLTA, ("v100 sxm2", "v100 sxm2 32gb", "v100", "v100 sxm2 16gb")),
    _gpu("Tesla V100-PCIE-16GB", (7, 0), 80, 1.38, 96, 6, 16, 0.9, _VOLTA, ("v100 pcie",)),
    _gpu("Tesla T4", (7, 5), 40, 1.59, 64, 4, 16, 0.32, _TURING, ("t4", "tesla t4")),
    _gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 1.545, 64, 5.5, 11, 0.616, {**_TURING, "fp16": 512}, ("rtx 2080 ti", "2080 ti")),
    _gpu("Tesla P100-PCIE-16GB", (6, 0), 56, 1.328, 48, 4, 16, 0.732, {"fp32": 128, "fp16": 256}, ("p100",)),
)  # fmt: skip


def known_devices() -> tuple[Device, ...]:
    """Every GPU that can be named without being present."""
    return _KNOWN


def generous_peak(device: Device, key: str) -> float | None:
    """The highest peak anybody states for `key`: float16 accumulation doubles it on GeForce parts (GA102, AD102,
    GB202 whitepapers). For judging figures whose accumulation type is not stated."""
    peak = device.peak(key)
    if peak is not None and "GeForce" in device.name and key in ("fp16", "fp8"):
        return 2 * peak
    return peak


def _words(text: str) -> str:
    return " " + re.sub(r"[^a-z0-9]+", " ", text.lower()).strip() + " "


def find_in_text(text: str) -> list[Device]:
    """Known devices that `text` names, in order of appearance; the longest alias at a place wins, so "A100 40GB" is
    not also "A100"."""
    words = _words(text)
    hits: list[tuple[int, int, Device]] = []
    for device in _KNOWN:
        for alias in {_words(device.name).strip(), *device.aliases}:
            for match in re.finditer(rf"(?<= ){re.escape(alias)}(?= )", words):
                hits.append((match.start(), match.end(), device))
    hits.sort(key=lambda h: (h[0] - h[1], h[0]))
    taken: list[tuple[int, int, Device]] = []
    for start, end, device in hits:
        if all(end <= s or start >= e for s, e, _ in taken):
            taken.append((start, end, device))
    found: list[Device] = []
    for _, _, device in sorted(taken, key=lambda h: h[0]):
        if device not in found:
            found.append(device)
    return found


@lru_cache(maxsize=16)
def _cuda(index: int) -> Device:
    import torch

    p = torch.cuda.get_device_properties(index)
    capability = (p.major, p.minor)
    exact = next((d for d in _KNOWN if d.name == p.name), None)
    near = exact or next((d for d in find_in_text(p.name) if d.capability == capability), None)
    clock, bandwidth = _driver_limits(index)
    clock = clock or (near.max_clock_hz if near else 2.0e9)
    per_sm = _per_sm(near, capability)
    return Device(
        name=p.name,
        kind="cuda",
        capability=capability,
        sm_count=p.multi_processor_count,
        max_clock_hz=clock,
        smem_bytes=getattr(p, "shared_memory_per_block_optin", near.smem_bytes if near else 48 * 1024),
        l2_bytes=p.L2_cache_size,
        memory_bytes=p.total_memory,
        memory_bps=near.memory_bps if near else bandwidth,
        peak_flops=MappingProxyType({k: v * p.multi_processor_count * clock for k, v in per_sm.items()}),
        aliases=near.aliases if near else (),
    )


def _per_sm(near: Device | None, capability: tuple[int, int]) -> dict[str, float]:
    if near is not None:
        return {k: v / near.sm_count / near.max_clock_hz for k, v in near.peak_flops.items()}
    # An unlisted part: the highest rate of its architecture, so that no true time is refused as impossible.
    same = [d for d in _KNOWN if d.capability and d.capability <= capability]
    best = max(same, key=lambda d: d.capability or (0, 0), default=_KNOWN[0])
    family = [d for d in same if d.capability == best.capability]
    return {k: max(d.peak_flops.get(k, 0.0) / d.sm_count / d.max_clock_hz for d in family) for k in best.peak_flops}


def _driver_limits(index: int) -> tuple[float | None, float | None]:
    """Highest SM clock (Hz) and memory bandwidth (bytes/s) as the driver states them; None where it does not."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            sm = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6
            memory = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM) * 1e6
            bus_bits = pynvml.nvmlDeviceGetMemoryBusWidth(handle)
        except Exception:  # no NVML, or a driver that refuses the query: the table's figures serve
            return None, None
    return sm, memory * 2 * bus_bits / 8


@lru_cache(maxsize=1)
def _cpu() -> Device:
    info = _read("/proc/cpuinfo")
    name = _first(r"model name\s*:\s*(.+)", info) or os.uname().machine
    flags = set((_first(r"flags\s*:\s*(.+)", info) or "").split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    khz = _first(r"(\d+)", _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    # Virtual machines hide the boost clock; no part sold to date sustains 6 GHz, so this bound is loose but safe.
    clock = float(khz) * 1e3 if khz else 6.0e9
    # Two FMA ports of the widest vector unit; AMX does 16x16x32 bf16 (x64 int8) multiply-adds in 16 clocks.
    fp32 = 64.0 if "avx512f" in flags else 32.0 if "fma" in flags or "avx2" in flags else 16.0
    bf16 = 1024.0 if "amx_bf16" in flags else 2 * fp32
    fp16 = 2 * fp32 if "avx512_fp16" in flags else fp32
    int8 = 2048.0 if "amx_int8" in flags else 4 * fp32
    per_core = {"fp32": fp32, "bf16": bf16, "fp16": max(fp16, fp32), "int8": int8}
    return Device(
        name=name.strip(),
        kind="cpu",
        capability=None,
        sm_count=cores,
        max_clock_hz=clock,
        smem_bytes=0,
        l2_bytes=_cache_bytes(),
        memory_bytes=_memory_bytes(),
        memory_bps=None,
        peak_flops=MappingProxyType({k: v * cores * clock for k, v in per_core.items()}),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _cache_bytes() -> int:
    """The last-level cache: what rotating inputs must exceed."""
    sizes = [_read(str(p)) for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20}
    found = [int(s.strip()[:-1]) * units[s.strip()[-1]] for s in sizes if s.strip()[-1:] in units]
    return max(found, default=32 * 2**20)


def _memory_bytes() -> int:
    kib = _first(r"MemTotal:\s*(\d+)", _read("/proc/meminfo"))
    return int(kib) * 1024 if kib else 0
