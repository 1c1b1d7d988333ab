"""What one processor can do at most: frozen facts about a GPU or CPU, by name or from the driver.

Peaks are *dense* (no structured sparsity) FLOP/s, with float32 accumulation where the hardware offers a choice, at the
highest clock the part may boost to. So a measured time can never honestly fall below them. `gpus` has the parts that
are known by name, and the sources.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from expertile.gpus import AMD, NVIDIA
from expertile.suggest import did_you_mean

if TYPE_CHECKING:
    import torch  # the facts of a device need no torch: `expertile audit` starts without it

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")

_TORCH_KEYS = {
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float8_e4m3fn": "fp8",
    "torch.float8_e5m2": "fp8",
    "torch.int8": "int8",
}


def dtype_key(dtype: "torch.dtype", allow_tf32: bool = False) -> str:
    """The key of `Device.peak_flops` for matrix products of `dtype`; float32 is "tf32" where that is allowed.

    Raises ValueError for a dtype that no matrix unit multiplies.
    """
    key = _TORCH_KEYS.get(str(dtype))
    if key is None:
        raise ValueError(f"dtype: expected one of {', '.join(_TORCH_KEYS)}, got {dtype}")
    return "tf32" if key == "fp32" and allow_tf32 else key


_NAMED = 8  # GPUs that an error lists


@dataclass(frozen=True)
class Device:
    """Facts of one processor. Bytes, hertz, FLOP/s and bytes/s; `memory_bps` is None where nobody states it."""

    name: str
    kind: str  # "cuda" | "rocm" | "cpu"
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

    def sparse_peak(self, key: str) -> float | None:
        """Peak FLOP/s for a dtype key with 2:4 structured sparsity (of one operand); None where the part has none."""
        dense = self.peak_flops.get(key)
        has_it = self.at_least(8) or (self.kind == "rocm" and "fp8" in self.peak_flops)
        return 2 * dense if dense and has_it and key not in ("fp64", "fp32") else None

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether this is a CUDA device of that compute capability or later."""
        return self.kind == "cuda" and self.capability is not None and self.capability >= (major, minor)

    @staticmethod
    def by_name(name: str) -> "Device":
        """The known device that `name` means ("rtx 4090", "V100-SXM2-32GB"). ValueError lists those known."""
        if not isinstance(name, str):
            raise ValueError(f"gpu: expected the name of a device, got {name!r}")
        # Where a GPU is asked for, "4090" is one; in a text it may be a time.
        found = find_in_text(name) or find_in_text(f"rtx {name}")
        if not found:
            known = {alias: d.name for d in known_devices() for alias in (*d.aliases, d.name)}
            names = list(dict.fromkeys(known.values()))
            others = f"; known: {', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
            raise ValueError(f"gpu: no known device in {name!r}{did_you_mean(name, known) or others}")
        return found[0]

    @staticmethod
    def current(torch_device: "torch.device | str | int | None" = None) -> "Device":
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
    memory = (smem_kib * 1024, int(l2_mib * 2**20), int(mem_gb * 1e9), tbps * 1e12)
    return Device(name, "cuda", capability, sms, ghz * 1e9, *memory, MappingProxyType(peaks), aliases)


def _amd(
    name: str,
    units: int,
    ghz: float,
    cache_mib: float,
    mem_gb: float,
    tbps: float,
    tflops: Mapping[str, float],
    aliases: tuple[str, ...],
) -> Device:
    peaks = {key: value * 1e12 for key, value in tflops.items()}
    memory = (64 * 1024, int(cache_mib * 2**20), int(mem_gb * 1e9), tbps * 1e12)
    return Device(name, "rocm", None, units, ghz * 1e9, *memory, MappingProxyType(peaks), aliases)


_KNOWN = (*(_gpu(*row) for row in NVIDIA), *(_amd(*row) for row in AMD))


def known_devices() -> tuple[Device, ...]:
    """Every GPU that can be named without being present."""
    return _KNOWN


# Bytes/s of one PCIe lane in one direction, by generation.
PCIE_LANES = {"3": 0.985e9, "4": 1.969e9, "5": 3.938e9, "6": 7.563e9}
# Bytes/s of a part's NVLink, both directions together; NVIDIA data sheets.
NVLINK = {
    part: both
    for both, parts in (
        (112.5e9, "A6000 A40 3090"),
        (200e9, "A30"),
        (300e9, "V100"),
        (400e9, "A800 H800"),
        (600e9, "A100"),
        (900e9, "H100 H200 H20 GH200"),
        (1800e9, "B200 GB200 B300"),
    )
    for part in parts.split()
}
# Hopper's peaks with 2:4 sparsity as the data sheet has them, at a clock below the highest that the part boosts to.
SPARSE_SHEET = {"fp16": 1979e12, "bf16": 1979e12, "tf32": 989e12, "fp8": 3958e12, "int8": 3958e12}


def generous_peak(device: Device, key: str) -> float | None:
    """The highest peak anybody states for `key`: float16 accumulation doubles it on GeForce parts (GA102, AD102,
    GB202 whitepapers). For judging figures whose accumulation type is not stated."""
    peak = device.peak(key)
    if peak is not None and "GeForce" in device.name and key in ("fp16", "fp8"):
        return 2 * peak
    return peak


def _words(text: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", text.lower())
    if not re.search("[0-9]", words):
        return f" {words.strip()} "
    # As people write them: "RTX4060Ti", "A100 80 GB", "A100-80G", "MI 300X".
    words = re.sub(r"\b(rtx|gtx)(?=a?\d)", r"\1 ", words)
    words = re.sub(r"\b([2-5]0[5-9]0|1[06][5-8]0)(ti|super|d)\b", r"\1 \2", words)
    words = re.sub(r"\b(\d+) ?gb?\b", r"\1gb", words)
    return " " + re.sub(r"\bmi (?=\d)", "mi", words).strip() + " "


@lru_cache(maxsize=1)
def _aliases() -> Mapping[str, list[tuple[list[str], Device]]]:
    """The words of every alias and whose it is, by the first of them, the longest first."""
    by_first: dict[str, list[tuple[list[str], Device]]] = {}
    owner = {_words(alias).strip(): device for device in _KNOWN for alias in (*device.aliases, device.name)}
    for alias in sorted(owner, key=len, reverse=True):
        by_first.setdefault(alias.split()[0], []).append((alias.split(), owner[alias]))
    return by_first


_OTHER_PART = {"ti", "super", "xt", "xtx"}  # "GTX 1650 Ti" is no GTX 1650; where the part is not known it is none


def find_in_text(text: str) -> list[Device]:
    """Known devices that `text` names, in order of appearance; the longest alias at a place wins, so "A100 40GB" is
    not also "A100"."""
    aliases, words = _aliases(), _words(text).split()
    found, past = dict[Device, None](), 0
    for i in (i for i, word in enumerate(words) if word in aliases):
        named = ((i + len(alias), device) for alias, device in aliases[words[i]] if words[i : i + len(alias)] == alias)
        ends = ((end, device) for end, device in named if _OTHER_PART.isdisjoint(words[end : end + 1]))
        if i >= past and (first := next(ends, None)):
            past = first[0]
            found[first[1]] = None
    return list(found)


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
