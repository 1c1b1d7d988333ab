"""What one processor can do at most: frozen facts about a GPU or CPU, by name or from the driver.

Peaks are *dense* (no structured sparsity) FLOP/s with float32 accumulation where the hardware offers a choice,
at the highest clock the part may boost to, so that a measured time can never honestly fall below them.
Sources: NVIDIA architecture whitepapers and datasheets (Volta 2017, Ampere GA100/GA102 2020, Ada 2022, Hopper 2022,
Blackwell 2024 and RTX Blackwell 2025); per-SM rates from the CUDA C++ Programming Guide's arithmetic-throughput table;
AMD CDNA whitepapers and Instinct and Radeon data sheets (MI100 2020 to MI355X 2025).
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


def dtype_key(dtype: torch.dtype, allow_tf32: bool = False) -> str:
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
    def by_name(name: str) -> Device:
        """The known device that `name` means ("rtx 4090", "V100-SXM2-32GB"). ValueError lists those known."""
        # Where a GPU is asked for, "4090" is one; in a text it may be a time.
        found = find_in_text(name) or find_in_text(f"rtx {name}")
        if not found:
            known = {alias: d.name for d in known_devices() for alias in (*d.aliases, d.name)}
            names = list(dict.fromkeys(known.values()))
            others = f"; known: {', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
            raise ValueError(f"gpu: no known device in {name!r}{did_you_mean(name, known) or others}")
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
        name,
        "cuda",
        capability,
        sms,
        ghz * 1e9,
        smem_kib * 1024,
        int(l2_mib * 2**20),
        int(mem_gb * 1e9),
        tbps * 1e12,
        MappingProxyType(peaks),
        aliases,
    )


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
    return Device(
        name,
        "rocm",
        None,
        units,
        ghz * 1e9,
        64 * 1024,
        int(cache_mib * 2**20),
        int(mem_gb * 1e9),
        tbps * 1e12,
        MappingProxyType(peaks),
        aliases,
    )


def _cdna(fp64: float, fp32: float, fp16: float, tf32: float = 0, fp8: float = 0, fp4: float = 0) -> dict[str, float]:
    found = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": fp16, "fp8": fp8, "fp4": fp4}
    return {key: value for key, value in {**found, "int8": fp8 or fp16}.items() if value}


def _rdna(fp32: float, fp16: float, fp8: float = 0) -> dict[str, float]:
    found = {"fp32": fp32, "fp16": fp16, "bf16": fp16, "fp8": fp8, "int8": fp8 or fp16}
    return {key: value for key, value in found.items() if value}


# FLOP per clock and SM, a multiply-add counted as two.
_KEPLER = {"fp64": 128, "fp32": 384}
_PASCAL = {"fp64": 8, "fp32": 256}
_VOLTA = {"fp64": 64, "fp32": 128, "fp16": 1024}
_TURING = {"fp64": 4, "fp32": 128, "fp16": 1024, "int8": 2048}
_TU_GEFORCE = {**_TURING, "fp16": 512}
_GA100 = {"fp64": 128, "fp32": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048, "int8": 4096}
_GA102 = {"fp64": 4, "fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "int8": 2048}
_GA_PRO = {**_GA102, "tf32": 512, "fp16": 1024, "bf16": 1024}
_AD102 = {"fp64": 4, "fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "fp8": 1024, "int8": 2048}
_L40S = {"fp64": 4, "fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024, "fp8": 2048, "int8": 2048}
_HOPPER = {"fp64": 256, "fp32": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192, "int8": 8192}
_B200 = {"fp64": 128, "fp32": 256, "tf32": 4096, "fp16": 8192, "bf16": 8192, "fp8": 16384, "fp4": 32768, "int8": 16384}
_B300 = {**_B200, "fp64": 4, "fp4": 52000, "int8": 1024}
_GB202 = {**_AD102, "fp4": 4096}
_GB_PRO = {**_L40S, "fp4": 4096}

# GeForce parts run float32-accumulated tensor products at half rate; the whitepapers' higher figures
# (142 TFLOP/s fp16 on the 3090, 330 on the 4090) accumulate in float16. See `generous_peak`.
# fmt: off
_KNOWN = (
    _gpu("NVIDIA H200", (9, 0), 132, 1.98, 227, 60, 141, 4.8, _HOPPER, ("h200", "h200 sxm")),
    _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 227, 50, 80, 3.35, _HOPPER, ("h100 sxm", "h100 sxm5", "h100", "h100 80gb", "h100 sxm 80gb", "h100 sxm5 80gb", "h100 80gb sxm", "h100 80gb sxm5")),
    _gpu("NVIDIA H100 PCIe", (9, 0), 114, 1.755, 227, 50, 80, 2.04, _HOPPER, ("h100 pcie", "h100 80gb pcie", "h100 pcie 80gb")),
    _gpu("NVIDIA H100 NVL", (9, 0), 132, 1.785, 227, 50, 94, 3.938, _HOPPER, ("h100 nvl",)),
    _gpu("NVIDIA H800", (9, 0), 132, 1.98, 227, 50, 80, 3.35, _HOPPER, ("h800",)),
    _gpu("NVIDIA H20", (9, 0), 78, 1.98, 227, 60, 96, 4.0, {**{k: v // 4 for k, v in _HOPPER.items()}, "fp32": 256}, ("h20",)),
    _gpu("NVIDIA GH200", (9, 0), 132, 1.98, 227, 60, 96, 4.0, _HOPPER, ("gh200",)),
    _gpu("NVIDIA B200", (10, 0), 148, 1.965, 227, 126, 180, 8.0, _B200, ("b200",)),
    _gpu("NVIDIA GB200", (10, 0), 152, 1.965, 227, 126, 186, 8.0, _B200, ("gb200",)),
    _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 163, 40, 80, 2.039, _GA100, ("a100 80gb", "80gb a100", "a100 sxm4 80gb", "a100 sxm 80gb", "a100 80gb sxm", "a100 80gb sxm4", "a100", "a100 sxm", "a100 sxm4")),
    _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41, 163, 40, 40, 1.555, _GA100, ("a100 40gb", "40gb a100", "a100 sxm4 40gb", "a100 sxm 40gb", "a100 40gb sxm", "a100 40gb sxm4", "a100 pcie 40gb", "a100 40gb pcie")),
    _gpu("NVIDIA A100 80GB PCIe", (8, 0), 108, 1.41, 163, 40, 80, 1.935, _GA100, ("a100 pcie 80gb", "a100 80gb pcie", "a100 pcie")),
    _gpu("NVIDIA A800", (8, 0), 108, 1.41, 163, 40, 80, 2.039, _GA100, ("a800",)),
    _gpu("NVIDIA A10", (8, 6), 72, 1.695, 99, 6, 24, 0.6, _GA_PRO, ("a10", "a10g")),
    _gpu("NVIDIA A40", (8, 6), 84, 1.74, 99, 6, 48, 0.696, _GA_PRO, ("a40",)),
    _gpu("NVIDIA RTX A6000", (8, 6), 84, 1.8, 99, 6, 48, 0.768, _GA_PRO, ("a6000", "rtx a6000")),
    _gpu("NVIDIA GeForce RTX 3060", (8, 6), 28, 1.777, 99, 3, 12, 0.36, _GA102, ("rtx 3060",)),
    _gpu("NVIDIA GeForce RTX 3070", (8, 6), 46, 1.725, 99, 4, 8, 0.448, _GA102, ("rtx 3070",)),
    _gpu("NVIDIA GeForce RTX 3080", (8, 6), 68, 1.71, 99, 5, 10, 0.76, _GA102, ("rtx 3080",)),
    _gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695, 99, 6, 24, 0.936, _GA102, ("rtx 3090",)),
    _gpu("NVIDIA GeForce RTX 3090 Ti", (8, 6), 84, 1.86, 99, 6, 24, 1.008, _GA102, ("rtx 3090 ti", "3090 ti")),
    _gpu("NVIDIA GeForce RTX 4060", (8, 9), 24, 2.46, 99, 24, 8, 0.272, _AD102, ("rtx 4060",)),
    _gpu("NVIDIA GeForce RTX 4070", (8, 9), 46, 2.475, 99, 36, 12, 0.504, _AD102, ("rtx 4070",)),
    _gpu("NVIDIA GeForce RTX 4080", (8, 9), 76, 2.505, 99, 64, 16, 0.717, _AD102, ("rtx 4080",)),
    _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 99, 72, 24, 1.008, _AD102, ("rtx 4090",)),
    _gpu("NVIDIA L4", (8, 9), 58, 2.04, 99, 48, 24, 0.3, _L40S, ("l4",)),
    _gpu("NVIDIA L40S", (8, 9), 142, 2.52, 99, 96, 48, 0.864, _L40S, ("l40s",)),
    _gpu("NVIDIA L40", (8, 9), 142, 2.49, 99, 96, 48, 0.864, _AD102, ("l40",)),
    _gpu("NVIDIA L20", (8, 9), 92, 2.52, 99, 96, 48, 0.864, _AD102, ("l20",)),
    _gpu("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 2.505, 99, 96, 48, 0.96, _L40S, ("rtx 6000 ada", "6000 ada", "a6000 ada", "rtx a6000 ada")),
    _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 99, 96, 32, 1.792, _GB202, ("rtx 5090",)),
    _gpu("Tesla V100-SXM2-32GB", (7, 0), 80, 1.53, 96, 6, 32, 0.9, _VOLTA, ("v100 sxm2", "v100 sxm2 32gb", "v100", "v100 sxm2 16gb")),
    _gpu("Tesla V100-PCIE-16GB", (7, 0), 80, 1.38, 96, 6, 16, 0.9, _VOLTA, ("v100 pcie",)),
    _gpu("Tesla T4", (7, 5), 40, 1.59, 64, 4, 16, 0.32, _TURING, ("t4", "tesla t4", "nvidia t4")),
    _gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 1.545, 64, 5.5, 11, 0.616, _TU_GEFORCE, ("rtx 2080 ti", "2080 ti")),
    _gpu("Tesla P100-PCIE-16GB", (6, 0), 56, 1.328, 48, 4, 16, 0.732, {"fp64": 64, "fp32": 128, "fp16": 256}, ("p100", "p100 pcie")),
    _gpu("NVIDIA H200 NVL", (9, 0), 132, 1.785, 227, 60, 141, 4.8, _HOPPER, ("h200 nvl",)),
    _gpu("NVIDIA GH200 144G HBM3e", (9, 0), 132, 1.98, 227, 60, 144, 4.9, _HOPPER, ("gh200 144g", "gh200 144gb")),
    _gpu("NVIDIA B300", (10, 3), 148, 1.965, 227, 126, 288, 8.0, _B300, ("b300",)),
    _gpu("NVIDIA GB300", (10, 3), 152, 1.965, 227, 126, 288, 8.0, _B300, ("gb300",)),
    _gpu("NVIDIA GB10", (12, 1), 48, 2.5, 99, 24, 128, 0.273, _GB_PRO, ("gb10", "dgx spark")),
    _gpu("NVIDIA A30", (8, 0), 56, 1.44, 163, 24, 24, 0.933, _GA100, ("a30",)),
    _gpu("NVIDIA A2", (8, 6), 10, 1.77, 99, 2, 16, 0.2, _GA_PRO, ("nvidia a2", "a2 gpu")),
    _gpu("NVIDIA RTX A2000", (8, 6), 26, 1.2, 99, 6, 12, 0.288, _GA_PRO, ("a2000", "rtx a2000")),
    _gpu("NVIDIA RTX A4000", (8, 6), 48, 1.56, 99, 6, 16, 0.448, _GA_PRO, ("a4000", "rtx a4000")),
    _gpu("NVIDIA RTX A4500", (8, 6), 56, 1.65, 99, 6, 20, 0.64, _GA_PRO, ("a4500", "rtx a4500")),
    _gpu("NVIDIA RTX A5000", (8, 6), 64, 1.695, 99, 6, 24, 0.768, _GA_PRO, ("a5000", "rtx a5000")),
    _gpu("NVIDIA RTX A5500", (8, 6), 80, 1.665, 99, 6, 24, 0.768, _GA_PRO, ("a5500", "rtx a5500")),
    _gpu("NVIDIA GeForce RTX 3050", (8, 6), 20, 1.777, 99, 6, 8, 0.224, _GA102, ("rtx 3050",)),
    _gpu("NVIDIA GeForce RTX 3060 Ti", (8, 6), 38, 1.665, 99, 6, 8, 0.448, _GA102, ("rtx 3060 ti", "3060 ti")),
    _gpu("NVIDIA GeForce RTX 3070 Ti", (8, 6), 48, 1.77, 99, 6, 8, 0.608, _GA102, ("rtx 3070 ti", "3070 ti")),
    _gpu("NVIDIA GeForce RTX 3080 12GB", (8, 6), 70, 1.71, 99, 6, 12, 0.912, _GA102, ("rtx 3080 12gb",)),
    _gpu("NVIDIA GeForce RTX 3080 Ti", (8, 6), 80, 1.665, 99, 6, 12, 0.912, _GA102, ("rtx 3080 ti", "3080 ti")),
    _gpu("NVIDIA GeForce RTX 3060 Laptop GPU", (8, 6), 30, 1.703, 99, 6, 6, 0.336, _GA102, ("rtx 3060 laptop gpu", "rtx 3060 laptop")),
    _gpu("NVIDIA GeForce RTX 3070 Laptop GPU", (8, 6), 40, 1.62, 99, 6, 8, 0.448, _GA102, ("rtx 3070 laptop gpu", "rtx 3070 laptop")),
    _gpu("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), 48, 1.71, 99, 6, 16, 0.448, _GA102, ("rtx 3080 laptop gpu", "rtx 3080 laptop")),
    _gpu("NVIDIA GeForce RTX 3080 Ti Laptop GPU", (8, 6), 58, 1.59, 99, 6, 16, 0.512, _GA102, ("rtx 3080 ti laptop gpu", "rtx 3080 ti laptop")),
    _gpu("NVIDIA GeForce RTX 4050 Laptop GPU", (8, 9), 20, 2.37, 99, 12, 6, 0.192, _AD102, ("rtx 4050 laptop gpu", "rtx 4050 laptop")),
    _gpu("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), 24, 2.37, 99, 32, 8, 0.256, _AD102, ("rtx 4060 laptop gpu", "rtx 4060 laptop")),
    _gpu("NVIDIA GeForce RTX 4070 Laptop GPU", (8, 9), 36, 2.175, 99, 32, 8, 0.256, _AD102, ("rtx 4070 laptop gpu", "rtx 4070 laptop")),
    _gpu("NVIDIA GeForce RTX 4080 Laptop GPU", (8, 9), 58, 2.28, 99, 48, 12, 0.432, _AD102, ("rtx 4080 laptop gpu", "rtx 4080 laptop")),
    _gpu("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 76, 2.04, 99, 64, 16, 0.576, _AD102, ("rtx 4090 laptop gpu", "rtx 4090 laptop")),
    _gpu("NVIDIA GeForce RTX 4060 Ti", (8, 9), 34, 2.535, 99, 32, 16, 0.288, _AD102, ("rtx 4060 ti", "4060 ti")),
    _gpu("NVIDIA GeForce RTX 4070 SUPER", (8, 9), 56, 2.475, 99, 48, 12, 0.504, _AD102, ("rtx 4070 super", "4070 super")),
    _gpu("NVIDIA GeForce RTX 4070 Ti", (8, 9), 60, 2.61, 99, 48, 12, 0.504, _AD102, ("rtx 4070 ti", "4070 ti")),
    _gpu("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), 66, 2.61, 99, 48, 16, 0.672, _AD102, ("rtx 4070 ti super", "4070 ti super")),
    _gpu("NVIDIA GeForce RTX 4080 SUPER", (8, 9), 80, 2.55, 99, 64, 16, 0.736, _AD102, ("rtx 4080 super", "4080 super")),
    _gpu("NVIDIA GeForce RTX 4090 D", (8, 9), 114, 2.52, 99, 72, 24, 1.008, _AD102, ("rtx 4090 d",)),
    _gpu("NVIDIA RTX 4000 Ada Generation", (8, 9), 48, 2.175, 99, 48, 20, 0.36, _L40S, ("rtx 4000 ada",)),
    _gpu("NVIDIA RTX 5000 Ada Generation", (8, 9), 100, 2.55, 99, 72, 32, 0.576, _L40S, ("rtx 5000 ada",)),
    _gpu("NVIDIA GeForce RTX 5060", (12, 0), 30, 2.497, 99, 32, 8, 0.448, _GB202, ("rtx 5060",)),
    _gpu("NVIDIA GeForce RTX 5060 Ti", (12, 0), 36, 2.572, 99, 32, 16, 0.448, _GB202, ("rtx 5060 ti",)),
    _gpu("NVIDIA GeForce RTX 5070", (12, 0), 48, 2.512, 99, 48, 12, 0.672, _GB202, ("rtx 5070",)),
    _gpu("NVIDIA GeForce RTX 5070 Ti", (12, 0), 70, 2.452, 99, 48, 16, 0.896, _GB202, ("rtx 5070 ti",)),
    _gpu("NVIDIA GeForce RTX 5080", (12, 0), 84, 2.617, 99, 64, 16, 0.96, _GB202, ("rtx 5080",)),
    _gpu("NVIDIA GeForce RTX 5090 Laptop GPU", (12, 0), 82, 2.16, 99, 64, 24, 0.896, _GB202, ("rtx 5090 laptop gpu", "rtx 5090 laptop")),
    _gpu("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 2.617, 99, 128, 96, 1.792, _GB_PRO, ("rtx pro 6000", "pro 6000 blackwell")),
    _gpu("Tesla V100S-PCIE-32GB", (7, 0), 80, 1.597, 96, 6, 32, 1.134, _VOLTA, ("v100s",)),
    _gpu("NVIDIA TITAN V", (7, 0), 80, 1.455, 96, 4.5, 12, 0.653, _VOLTA, ("titan v",)),
    _gpu("NVIDIA TITAN RTX", (7, 5), 72, 1.77, 64, 6, 24, 0.672, _TURING, ("titan rtx",)),
    _gpu("Quadro RTX 6000", (7, 5), 72, 1.77, 64, 6, 24, 0.672, _TURING, ("quadro rtx 6000",)),
    _gpu("Quadro RTX 8000", (7, 5), 72, 1.77, 64, 6, 48, 0.672, _TURING, ("quadro rtx 8000", "rtx 8000")),
    _gpu("NVIDIA GeForce RTX 2060", (7, 5), 30, 1.68, 64, 4, 6, 0.336, _TU_GEFORCE, ("rtx 2060",)),
    _gpu("NVIDIA GeForce RTX 2060 SUPER", (7, 5), 34, 1.65, 64, 4, 8, 0.448, _TU_GEFORCE, ("rtx 2060 super",)),
    _gpu("NVIDIA GeForce RTX 2070", (7, 5), 36, 1.62, 64, 4, 8, 0.448, _TU_GEFORCE, ("rtx 2070",)),
    _gpu("NVIDIA GeForce RTX 2070 SUPER", (7, 5), 40, 1.77, 64, 4, 8, 0.448, _TU_GEFORCE, ("rtx 2070 super",)),
    _gpu("NVIDIA GeForce RTX 2080", (7, 5), 46, 1.71, 64, 4, 8, 0.448, _TU_GEFORCE, ("rtx 2080",)),
    _gpu("NVIDIA GeForce RTX 2080 SUPER", (7, 5), 48, 1.815, 64, 4, 8, 0.496, _TU_GEFORCE, ("rtx 2080 super",)),
    _gpu("NVIDIA GeForce GTX 1650", (7, 5), 14, 1.665, 64, 1, 4, 0.128, {"fp64": 4, "fp32": 128, "fp16": 256}, ("gtx 1650",)),
    _gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5), 24, 1.77, 64, 1.5, 6, 0.288, {"fp64": 4, "fp32": 128, "fp16": 256}, ("gtx 1660 ti",)),
    _gpu("Tesla P100-SXM2-16GB", (6, 0), 56, 1.48, 48, 4, 16, 0.732, {"fp64": 64, "fp32": 128, "fp16": 256}, ("p100 sxm2",)),
    _gpu("Tesla P40", (6, 1), 30, 1.531, 48, 3, 24, 0.347, {**_PASCAL, "int8": 1024}, ("p40",)),
    _gpu("Tesla P4", (6, 1), 20, 1.114, 48, 2, 8, 0.192, {**_PASCAL, "int8": 1024}, ("tesla p4",)),
    _gpu("NVIDIA TITAN Xp", (6, 1), 30, 1.582, 48, 3, 12, 0.548, _PASCAL, ("titan xp",)),
    _gpu("NVIDIA TITAN X (Pascal)", (6, 1), 28, 1.531, 48, 3, 12, 0.48, _PASCAL, ("titan x", "pascal titan x", "titan x pascal")),
    _gpu("NVIDIA GeForce GTX 1060", (6, 1), 10, 1.708, 48, 2, 6, 0.192, _PASCAL, ("gtx 1060",)),
    _gpu("NVIDIA GeForce GTX 1070", (6, 1), 15, 1.683, 48, 2, 8, 0.256, _PASCAL, ("gtx 1070",)),
    _gpu("NVIDIA GeForce GTX 1080", (6, 1), 20, 1.733, 48, 2, 8, 0.32, _PASCAL, ("gtx 1080",)),
    _gpu("NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 1.582, 48, 2, 11, 0.484, _PASCAL, ("gtx 1080 ti", "1080 ti")),
    _gpu("NVIDIA GeForce GTX 980", (5, 2), 16, 1.216, 48, 2, 4, 0.224, _PASCAL, ("gtx 980",)),
    _gpu("NVIDIA GeForce GTX TITAN X", (5, 2), 24, 1.075, 48, 3, 12, 0.337, _PASCAL, ("gtx titan x", "maxwell titan x", "titan x maxwell")),
    _gpu("Tesla M40", (5, 2), 24, 1.112, 48, 3, 24, 0.288, _PASCAL, ("tesla m40",)),
    _gpu("Tesla K80", (3, 7), 13, 0.875, 48, 1.5, 12, 0.24, _KEPLER, ("k80",)),
    _gpu("Tesla K40", (3, 5), 15, 0.875, 48, 1.5, 12, 0.288, _KEPLER, ("k40", "k40m")),
    _gpu("NVIDIA Jetson AGX Orin", (8, 7), 16, 1.3, 163, 4, 64, 0.2048, {**_GA100, "fp64": 4, "fp32": 256}, ("agx orin", "jetson orin", "jetson agx orin")),
    _amd("AMD Instinct MI50", 60, 1.725, 4, 32, 1.024, {"fp64": 6.6, "fp32": 13.3, "fp16": 26.5}, ("mi50",)),
    _amd("AMD Instinct MI60", 64, 1.8, 4, 32, 1.024, {"fp64": 7.4, "fp32": 14.7, "fp16": 29.5}, ("mi60",)),
    _amd("AMD Instinct MI100", 120, 1.502, 8, 32, 1.229, {"fp64": 11.5, "fp32": 46.1, "fp16": 184.6, "bf16": 92.3, "int8": 184.6}, ("mi100",)),
    _amd("AMD Instinct MI210", 104, 1.7, 16, 64, 1.638, _cdna(45.3, 45.3, 181), ("mi210",)),
    _amd("AMD Instinct MI250", 208, 1.7, 16, 128, 3.277, _cdna(90.5, 90.5, 362.1), ("mi250",)),
    _amd("AMD Instinct MI250X", 220, 1.7, 16, 128, 3.277, _cdna(95.7, 95.7, 383), ("mi250x",)),
    _amd("AMD Instinct MI300A", 228, 2.1, 256, 128, 5.3, _cdna(122.6, 122.6, 980.6, 490.3, 1961.2), ("mi300a",)),
    _amd("AMD Instinct MI300X", 304, 2.1, 256, 192, 5.3, _cdna(163.4, 163.4, 1307.4, 653.7, 2614.9), ("mi300x", "mi300")),
    _amd("AMD Instinct MI325X", 304, 2.1, 256, 256, 6.0, _cdna(163.4, 163.4, 1307.4, 653.7, 2614.9), ("mi325x", "mi325")),
    _amd("AMD Instinct MI350X", 256, 2.2, 256, 288, 8.0, _cdna(72.1, 144.2, 2306.9, 0, 4613.7, 9227.5), ("mi350x", "mi350")),
    _amd("AMD Instinct MI355X", 256, 2.4, 256, 288, 8.0, _cdna(78.6, 157.3, 2516.6, 0, 5033.2, 10066.3), ("mi355x", "mi355")),
    _amd("AMD Radeon RX 6800 XT", 72, 2.25, 128, 16, 0.512, _rdna(20.7, 41.5), ("rx 6800 xt",)),
    _amd("AMD Radeon RX 6900 XT", 80, 2.25, 128, 16, 0.512, _rdna(23.0, 46.1), ("rx 6900 xt",)),
    _amd("AMD Radeon RX 7600", 32, 2.655, 32, 8, 0.288, _rdna(21.8, 43.5), ("rx 7600",)),
    _amd("AMD Radeon RX 7700 XT", 54, 2.544, 48, 12, 0.432, _rdna(35.2, 70.3), ("rx 7700 xt",)),
    _amd("AMD Radeon RX 7800 XT", 60, 2.43, 64, 16, 0.624, _rdna(37.3, 74.7), ("rx 7800 xt",)),
    _amd("AMD Radeon RX 7900 GRE", 80, 2.245, 64, 16, 0.576, _rdna(46.0, 91.9), ("rx 7900 gre", "7900 gre")),
    _amd("AMD Radeon RX 7900 XT", 84, 2.4, 80, 20, 0.8, _rdna(51.5, 103), ("rx 7900 xt", "7900 xt")),
    _amd("AMD Radeon RX 7900 XTX", 96, 2.5, 96, 24, 0.96, _rdna(61.4, 122.8), ("rx 7900 xtx", "7900 xtx")),
    _amd("AMD Radeon RX 9060 XT", 32, 3.13, 32, 16, 0.322, _rdna(25.6, 103, 205), ("rx 9060 xt",)),
    _amd("AMD Radeon RX 9070", 56, 2.52, 64, 16, 0.645, _rdna(36.1, 145, 289), ("rx 9070",)),
    _amd("AMD Radeon RX 9070 XT", 64, 2.97, 64, 16, 0.645, _rdna(48.7, 195, 389), ("rx 9070 xt",)),
    _amd("AMD Radeon PRO W7800", 70, 2.5, 64, 32, 0.576, _rdna(45.2, 90.5), ("w7800",)),
    _amd("AMD Radeon PRO W7900", 96, 2.5, 96, 48, 0.864, _rdna(61.3, 122.6), ("w7900",)),
    _amd("AMD Radeon AI PRO R9700", 64, 2.92, 64, 32, 0.645, _rdna(47.8, 191, 383), ("r9700", "ai pro r9700")),
    _amd("AMD Radeon 8060S", 40, 2.9, 32, 128, 0.256, _rdna(29.7, 59.4), ("8060s", "strix halo", "ryzen ai max 395", "ai max 395")),
)
# fmt: on


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
    words = re.sub(r"[^a-z0-9]+", " ", text.lower())
    # As people write them: "RTX4060Ti", "A100 80 GB", "A100-80G", "MI 300X".
    words = re.sub(r"\b(rtx|gtx)(?=a?\d)", r"\1 ", words)
    words = re.sub(r"\b([2-5]0[5-9]0|1[06][5-8]0)(ti|super|d)\b", r"\1 \2", words)
    words = re.sub(r"\b(\d+) ?gb?\b", r"\1gb", words)
    return " " + re.sub(r"\bmi (?=\d)", "mi", words).strip() + " "


@lru_cache(maxsize=1)
def _aliases() -> tuple[re.Pattern[str], Mapping[str, Device], frozenset[str]]:
    """One pattern for every alias, the longest first; whose each is; and the words that they begin with."""
    owner = {_words(alias).strip(): device for device in _KNOWN for alias in (*device.aliases, device.name)}
    longest_first = sorted(owner, key=len, reverse=True)
    # "GTX 1650 Ti" is no GTX 1650; where the part is not known it is none.
    pattern = re.compile(rf"(?<= )(?:{'|'.join(map(re.escape, longest_first))})(?= )(?! (?:ti|super|xtx?) )")
    return pattern, owner, frozenset(alias.split()[0] for alias in owner)


def find_in_text(text: str) -> list[Device]:
    """Known devices that `text` names, in order of appearance; the longest alias at a place wins, so "A100 40GB" is
    not also "A100"."""
    pattern, owner, first_words = _aliases()
    words = _words(text)
    if first_words.isdisjoint(words.split()):
        return []
    return list(dict.fromkeys(owner[match[0]] for match in pattern.finditer(words)))


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
