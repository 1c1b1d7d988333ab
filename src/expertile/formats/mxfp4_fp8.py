"""Mxfp4Fp8Weight: MXFP4 weights in the layout of products with FP8 activations, made of an `Mxfp4Weight`.

FP8 products take both operands in e4m3 (`formats.fp8`). All e2m1 values are e4m3 values, and so is a value times its
block's power of two, relative to a power of two of its row: of 0.5 to 6, e4m3 holds those times 2^-5 to 2^6. So a row
of K has one float32 scale, 64 times smaller than the largest e8m0 scale of its blocks of 32, and each block an exponent
from 1 to 12: 12 for the blocks with the largest scale, and 1 less for each halving. Blocks of zeros do not count.

Exact where no scale of a row is more than 2^11 below the row's largest. A block further below has exponent 1, and its
values are rounded to nearest in e2m1, ties to the even code: off by at most 2^-13 of the row's largest scale.

**Where the bits lie.** A row's 32-bit word 4i + t (little-endian) has eight values of block i: 4t + j of its first 16
and 4t + j of its last 16, j from 0 to 3, which is what lane t of four holds of the block in the first operand of an
8-bit matrix product. Bits 4j to 4j + 2 are the magnitude (e1 e0 m) of value j of the first 16, and bits 16 + 4j to
18 + 4j that of the last 16: selectors of a byte permutation, which looks up e4m3 bytes in a table of eight. Bit 8j + 7
is the sign of value j of the first 16, and bit 8j + 3 that of the last 16.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from expertile.formats.int4.packing import words as words_of
from expertile.formats.mxfp4 import BIAS, BLOCK, Mxfp4Layout, Mxfp4Weight, rounded_codes, values_of_codes

LARGEST_EXPONENT = 12
UNIT = 6  # a block with exponent e has the scale 2^(e - UNIT) of the row's


@dataclass(frozen=True, repr=False, eq=False)
class Mxfp4Fp8Weight(Mxfp4Layout):
    """Weights [G, N, K] in MXFP4, as `scaled_grouped_mm` takes them beside FP8 activations. `of` makes them.

    packed: uint8 [G, N, K/2]; bits as the module says.
    scales: uint8 [G, K/128 + 1, N, 4], K/128 rounded up: the exponent of values 32i … 32i + 31 of row n is
        [g, i // 4, n, i % 4], and the last four bytes of a row are its float32 scale.
    k: K, a multiple of 32.

    All tensors are contiguous and on one device. ValueError otherwise, naming the field. Values are not looked at here.
    A value takes 4.25 bits, and a row 4 bytes, where 128 divides K.
    """

    format: ClassVar[str] = "mxfp4_fp8"
    scales_of_row: ClassVar[int] = 1

    @staticmethod
    def of(w: Mxfp4Weight) -> "Mxfp4Fp8Weight":
        """`w` rearranged, and rounded where scales of a row are more than 2^11 apart. An expert at a time."""
        if not isinstance(w, Mxfp4Weight):
            raise ValueError(f"w: expected an Mxfp4Weight, got {type(w).__name__}")
        made = Mxfp4Fp8Weight.empty(w.shape, w.device)
        for e in range(w.shape[0]):
            one = w.part(e, e + 1)
            codes, exponents, row_scales = _relative(one.codes()[0].unflatten(-1, (-1, BLOCK)), one.scale_bytes()[0])
            made.packed[e] = _packed(codes)
            made._fill_scales(e, exponents, 0)
            made.scales[e, -1] = row_scales[:, None].view(torch.uint8)
        return made

    def row_scales(self) -> torch.Tensor:
        """float32 [G, N]."""
        return self.scales[:, -1].contiguous().view(torch.float32)[..., 0]

    def e4m3(self) -> torch.Tensor:
        """What the tensor cores multiply: float8_e4m3fn [G, N, K], of which `row_scales` make the weights."""
        out = torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=self.device)
        exponents = self._bytes_of_blocks()
        for e in range(self.shape[0]):
            values = values_of_codes(_unpacked(self.packed[e])).unflatten(-1, (-1, BLOCK))
            out[e] = torch.ldexp(values, exponents[e, ..., None].int() - UNIT).flatten(-2).to(out.dtype)
        return out

    def _in_float32(self) -> torch.Tensor:
        return self.e4m3().float() * self.row_scales()[..., None]

    def check_numbers(self, dtype: torch.dtype) -> None:
        """ValueError where an exponent is none that `of` makes, or a row's scale is not finite."""
        exponents = self._bytes_of_blocks()
        bad = int(((exponents < 1) | (exponents > LARGEST_EXPONENT)).sum())
        if bad:
            raise ValueError(f"scales: expected exponents from 1 to {LARGEST_EXPONENT}, got {bad} others")
        infinite = int((~torch.isfinite(self.row_scales())).sum())
        if infinite:
            raise ValueError(f"scales: expected finite ones of rows, got {infinite} that are NaN or infinite")


# So that torch.load(weights_only=True) takes them.
torch.serialization.add_safe_globals([Mxfp4Fp8Weight])


def _relative(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K/32, 32] and e8m0 bytes [N, K/32] -> (codes, exponents [N, K/32] uint8, scales of rows [N])."""
    zero = ((codes & 7) == 0).all(-1)
    largest = torch.where(zero, -1, scales.int()).amax(-1)
    largest = torch.where(largest < 0, BIAS, largest)
    exponents = LARGEST_EXPONENT - (largest[:, None] - scales.int())
    exponents = torch.where(zero, LARGEST_EXPONENT, exponents)
    below = exponents < 1
    if not below.is_meta and bool(below.any()):
        values = torch.ldexp(values_of_codes(codes), torch.where(below, exponents - 1, 0)[..., None])
        codes = rounded_codes(values)
    row_scales = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), largest - BIAS - LARGEST_EXPONENT + UNIT)
    return codes, exponents.clamp(min=1).to(torch.uint8), row_scales.float()


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K/32, 32] -> bytes [N, K/2]."""
    x = codes.int().unflatten(-1, (2, 4, 4))  # [N, block, half, t, j]
    words = torch.zeros_like(x[:, :, 0, :, 0])
    for half in range(2):
        for j in range(4):
            of_place = x[:, :, half, :, j]
            words |= (of_place & 7) << 16 * half + 4 * j
            words |= (of_place >> 3) << 8 * j + 7 - 4 * half
    return words.flatten(-2).contiguous().view(torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_packed`: codes [N, K]."""
    words = words_of(packed).unflatten(-1, (-1, 4))
    x = torch.empty(*words.shape[:-1], 2, 4, 4, dtype=torch.uint8, device=packed.device)
    for half in range(2):
        for j in range(4):
            sign = words >> 8 * j + 7 - 4 * half & 1
            x[:, :, half, :, j] = (words >> 16 * half + 4 * j & 7 | sign << 3).to(torch.uint8)
    return x.flatten(1)
