"""The formats of weights in few bits, by name.

A new one is a class, here in `AnyQuantizedWeight` and `WEIGHTS`, and a public name in `expertile/__init__.py`. How a
word is unpacked stands beside `ops/weight_only_mm/triton_mxfp4.py`, with a branch in `dequantize.py` and one in
`backends/_triton_kernel.py`. For wgmma: a file like `_gluon_mxfp4.py`, branches in `_gluon_multiply.py` and
`_gluon_config.py`. One for FP8 activations alone: `_w4a8_unpack.py`, `_w4a8_kernel.py` and `dequantize.py`.
"""

from functools import lru_cache
from typing import Any, get_args

import torch

from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4.weight import GROUP_SIZES, Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
from expertile.formats.quantized import KernelLayout

AnyQuantizedWeight = Int4Weight | Mxfp4Weight | Mxfp4Fp8Weight
WeightBeside16Bits = Int4Weight | Mxfp4Weight
WeightBesideFp8 = Int4Weight | Mxfp4Fp8Weight
WEIGHTS: dict[str, type[AnyQuantizedWeight]] = {w.format: w for w in (Int4Weight, Mxfp4Weight, Mxfp4Fp8Weight)}
# Which formats meet activations of 16 bits, and which those in FP8.
WITH_16_BITS = tuple(w.format for w in get_args(WeightBeside16Bits))
WITH_FP8 = tuple(w.format for w in get_args(WeightBesideFp8))
NAMES = " or ".join(WEIGHTS[name].__name__ for name in WITH_16_BITS)


def weight_of(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, format: str, group_size: int, k: int
) -> AnyQuantizedWeight:
    """The weight [G, N, K] of these `parts`."""
    return WEIGHTS[format].of_tensors(packed, scales, zeros, group_size, k)


@lru_cache(maxsize=4096)
def kernel_layout(format: str, k: int, group_size: int) -> KernelLayout:
    """How rows of K values of that format lie in memory."""
    return WEIGHTS[format].kernel_layout(k, group_size)


def takes_fp8(w: object) -> bool:
    """Whether `w` is a weight beside which a layer rounds activations to FP8: its class says so."""
    return isinstance(w, Fp8Blocks) or (isinstance(w, AnyQuantizedWeight) and w.format not in WITH_16_BITS)


FORMATS = ("mxfp4", "mxfp4_fp8", "int4", "fp8")  # by the names that users give


def quantize(w: torch.Tensor, format: str) -> Any:
    """`w` [G, N, K] as an Mxfp4Weight, an Mxfp4Fp8Weight, an Int4Weight or Fp8Blocks of 128×128, rounded to nearest.

    INT4 has no zero points, and the largest of the groups of 128, 64 and 32 that divides K. ValueError for another
    format, or a K that it does not take.
    """
    if format == "mxfp4":
        return Mxfp4Weight.quantize(w)
    if format == "mxfp4_fp8":
        return rearranged(Mxfp4Weight.quantize(w), format)
    if format == "int4":
        group = next((size for size in sorted(GROUP_SIZES, reverse=True) if w.shape[-1] % size == 0), min(GROUP_SIZES))
        return Int4Weight.quantize(w, group)
    if format == "fp8":
        return Fp8Blocks.quantize(w, (128, 128))
    raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")


def rearranged(w: Any, format: str | None) -> Any:
    """`w` in the order of `format`, where that has the same values in another order; else `w`."""
    return Mxfp4Fp8Weight.of(w) if isinstance(w, Mxfp4Weight) and format == Mxfp4Fp8Weight.format else w
