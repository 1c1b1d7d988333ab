"""Mxfp4Weight: the weights of all experts in MXFP4 (OCP Microscaling Formats 1.0), in the layout that the kernels read.

A value is an e2m1 code, sign, two exponent bits and one mantissa bit: ±0, 0.5, 1, 1.5, 2, 3, 4, 6. 32 values along K
share a scale e8m0, the power of two 2^(byte - 127); the byte 255 is NaN, and refused. So a value takes 4.25 bits.

From floating point, the scale's exponent is floor(log2(max|w|)) - 2. Values are rounded to nearest, ties to the even
code, and saturate at 6: normally distributed weights come back with a relative Frobenius error of 0.115.

**Where the bits lie.** A row is cut into blocks of 64 values, 32 bytes or 8 little-endian words. Word 4j + t has values
16j + 2t, 2t + 1, 2t + 8 and 2t + 9 of the block's first 32 (registers 0 and 1 of a lane of a 16-bit matrix product:
two neighbours each) and of its last 32 (registers 2 and 3). bfloat16 keeps its sign in bit 15 and its exponent's low
bits and first mantissa bit in bits 8, 7 and 6, so the four bits of a code go there. Bits of the first of two neighbours
(the second one's are 16 higher, modulo 32), for a code s e1 e0 m:

    register    s   e1  e0   m      in place after
        0       15   8   7   6      nothing
        1       21  14  13  12      a rotation to the right by 6
        2       11   4   3   2      a shift to the left by 4
        3        9  10   1   0      a shift to the left by 6, of e1 to the right by 2

K need only be a multiple of 32: an odd last half block is filled with zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from expertile.formats.int4.packing import words as words_of
from expertile.formats.quantized import KernelLayout, QuantizedWeight, found, validate_floating, validate_nibbles

BLOCK = 32  # values that share a scale
BIAS = 127
NAN_SCALE = 255
# Largest scale bytes with which kernels decode exactly, by the activations' dtype: 2^33 and 2.
LARGEST_SCALE = {torch.bfloat16: BIAS + 33, torch.float16: BIAS + 1}

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PADDING_SCALE = BIAS
# For each register: (bits of the code, where the lowest of them lies for the first of two neighbours).
_PLACES = (((8, 15), (7, 6)), ((8, 21), (7, 12)), ((8, 11), (7, 2)), ((8, 9), (4, 10), (3, 0)))
_FIELDS = ("weight_packed", "weight_scale")


@dataclass(frozen=True, repr=False, eq=False)
class Mxfp4Layout(QuantizedWeight):
    """What both layouts of MXFP4 weights share: codes in the bytes of rows, and scales in words of four a row."""

    zeros = None
    group_size = BLOCK
    filled_to: ClassVar[int] = BLOCK  # values of a row are filled up to a multiple of this
    scales_of_row: ClassVar[int] = 0  # further words of a row, behind those of its blocks

    packed: torch.Tensor
    scales: torch.Tensor
    k: int

    def __post_init__(self) -> None:
        packed, scales, layout = self.packed, self.scales, self.kernel_layout(self.k, BLOCK)
        of_bytes = isinstance(packed, torch.Tensor) and packed.dtype is torch.uint8
        if not of_bytes or packed.dim() != 3 or packed.shape[2] != layout.row_bytes:
            raise ValueError(f"packed: expected uint8 [G, N, {layout.row_bytes}] for K = {self.k}, got {found(packed)}")
        shape = self._shape_of_scales(packed.shape[0], packed.shape[1], self.k)
        if not isinstance(scales, torch.Tensor) or scales.dtype is not torch.uint8 or tuple(scales.shape) != shape:
            more = f" + {self.scales_of_row}" if self.scales_of_row else ""
            raise ValueError(
                f"scales: expected uint8 {list(shape)} (G, K/128{more}, N, 4), got {found(scales)}; "
                "Mxfp4Weight.from_blocks takes scales [G, N, K/32]"
            )
        self._check_place()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, N, K), in values."""
        return self.packed.shape[0], self.packed.shape[1], self.k

    @classmethod
    def kernel_layout(cls, k: int, group_size: int) -> KernelLayout:
        """Scales are loaded as words of four."""
        if not isinstance(k, int) or k % BLOCK or k <= 0:
            raise ValueError(
                f"K: expected a positive multiple of {BLOCK} (values that share a scale), got {k}; pad the weights and "
                "the activations with zeros"
            )
        row_bytes = -(-k // cls.filled_to) * cls.filled_to // 2
        return KernelLayout(BLOCK, row_bytes, 4 * BLOCK, torch.int32, cls.scales_of_row)

    @classmethod
    def of_tensors(
        cls, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, k: int
    ) -> Self:
        """The weight of these fields; `zeros` and `group_size` are those of every such weight."""
        return cls(packed, scales, k)

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device) -> Self:
        """Weights of that shape with any values."""
        g, n, k = shape
        packed = torch.empty(g, n, cls.kernel_layout(k, BLOCK).row_bytes, dtype=torch.uint8, device=device)
        return cls(packed, torch.empty(cls._shape_of_scales(g, n, k), dtype=torch.uint8, device=device), k)

    def _fill_scales(self, expert: int, scales: torch.Tensor, padding: int) -> None:
        """Write those of one expert's blocks: bytes [N, K/32]."""
        filled = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4), value=padding)
        words = filled.unflatten(-1, (-1, 4)).movedim(0, 1)
        self.scales[expert, : len(words)] = words

    def _bytes_of_blocks(self) -> torch.Tensor:
        """Those of scales, uint8 [G, N, K/32]."""
        words = self.scales.shape[1] - self.scales_of_row
        return self.scales[:, :words].movedim(1, 2).flatten(2)[..., : self.k // BLOCK].contiguous()

    @classmethod
    def _shape_of_scales(cls, g: int, n: int, k: int) -> tuple[int, ...]:
        return g, -(-k // (4 * BLOCK)) + cls.scales_of_row, n, 4


@dataclass(frozen=True, repr=False, eq=False)
class Mxfp4Weight(Mxfp4Layout):
    """Weights [G, N, K] (G experts, N outputs, K inputs: as `torch.nn.Linear` stores them) in MXFP4.

    packed: uint8 [G, N, K/2], K rounded up to a multiple of 64; bits as the module says.
    scales: uint8 [G, K/128, N, 4], K/128 rounded up: that of values 32i … 32i + 31 of row n is [g, i // 4, n, i % 4].
    k: K, a multiple of 32.

    All tensors are contiguous and on one device. ValueError otherwise, naming the field. Values are not looked at here.
    A value takes 4.25 bits where 128 divides K. Kernels decode exactly with scales from 2^-93 to 2^33 where activations
    are bfloat16, and from 2^-23 to 2 where they are float16, which rounds smaller weights and has no room for larger
    ones.
    """

    format: ClassVar[str] = "mxfp4"
    filled_to: ClassVar[int] = 2 * BLOCK

    @staticmethod
    def quantize(w: torch.Tensor) -> "Mxfp4Weight":
        """`w` [G, N, K] or [N, K] (one expert), finite and floating point, rounded as the module says.

        A block of zeros has scale 1. Works an expert at a time, in float32. ValueError for NaN and infinities.
        """
        validate_floating("w", w, (2, 3), "[G, N, K] or [N, K]")
        w = w if w.dim() == 3 else w[None]
        made = Mxfp4Weight.empty(tuple(w.shape), w.device)
        for e in range(w.shape[0]):
            codes, scales = _rounded(w[e].float().unflatten(-1, (-1, BLOCK)))
            made._fill(e, codes.flatten(-2), scales)
        return made

    @staticmethod
    def of_codes(codes: torch.Tensor, scales: torch.Tensor) -> "Mxfp4Weight":
        """From `codes` [G, N, K] (integers 0 … 15) and scale bytes [G, N, K/32]. ValueError for scales of 255."""
        validate_nibbles("codes", codes)
        made = Mxfp4Weight.empty(tuple(codes.shape), codes.device)
        scales = _scale_bytes("scales", scales, (*codes.shape[:2], made.k // BLOCK))
        for e in range(codes.shape[0]):
            made._fill(e, codes[e], scales[e])
        return made

    @staticmethod
    def from_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> "Mxfp4Weight":
        """gpt-oss's tensors: `*_blocks` uint8 [G, N, K/32, 16], the even value in the low nibble, and `*_scales` uint8
        (or float8_e8m0fnu) [G, N, K/32]. Rearranged, not rounded; `blocks` and `scale_bytes` give them back."""
        of_bytes = isinstance(blocks, torch.Tensor) and blocks.dtype is torch.uint8
        if not of_bytes or blocks.dim() != 4 or blocks.shape[-1] != BLOCK // 2:
            raise ValueError(f"blocks: expected uint8 [G, N, K/32, 16], got {found(blocks)}")
        made = Mxfp4Weight.empty((*blocks.shape[:2], BLOCK * blocks.shape[2]), blocks.device)
        scales = _scale_bytes("scales", scales, tuple(blocks.shape[:3]))
        for e in range(blocks.shape[0]):
            packed = blocks[e].flatten(-2)
            made._fill(e, torch.stack([packed & 15, packed >> 4], -1).flatten(-2), scales[e])
        return made

    @staticmethod
    def from_compressed_tensors(tensors: Mapping[str, torch.Tensor]) -> "Mxfp4Weight":
        """One layer of a compressed-tensors checkpoint in the format "mxfp4-pack-quantized" -> [1, N, K].

        weight_packed uint8 [N, K/2], the even value in the low nibble; weight_scale uint8 [N, K/32].
        """
        if not isinstance(tensors, Mapping):
            raise ValueError(f"tensors: expected tensors by name, got {type(tensors).__name__}")
        missing = [name for name in _FIELDS if name not in tensors]
        if missing:
            there = ", ".join(sorted(tensors)) or "none"
            raise ValueError(f"{missing[0]}: expected a tensor of that name, got only {there}")
        packed, scales = (tensors[name] for name in _FIELDS)
        if packed.dtype is not torch.uint8 or packed.dim() != 2 or packed.shape[1] % (BLOCK // 2):
            raise ValueError(f"weight_packed: expected uint8 [N, K/2], got {packed.dtype} {list(packed.shape)}")
        blocks = packed.unflatten(1, (-1, BLOCK // 2))
        scales = _scale_bytes("weight_scale", scales, tuple(blocks.shape[:2]))
        return Mxfp4Weight.from_blocks(blocks[None], scales[None])

    def to_compressed_tensors(self, expert: int = 0) -> dict[str, torch.Tensor]:
        """The tensors of one expert, as `from_compressed_tensors` takes them."""
        one = self.part(expert, expert + 1)
        return dict(zip(_FIELDS, (one.blocks()[0].flatten(1), one.scale_bytes()[0]), strict=True))

    def codes(self) -> torch.Tensor:
        """e2m1 codes, uint8 0 … 15 [G, N, K]."""
        return _unpacked(self.packed)[..., : self.k]

    def scale_bytes(self) -> torch.Tensor:
        """e8m0 scales, uint8 [G, N, K/32]."""
        return self._bytes_of_blocks()

    def blocks(self) -> torch.Tensor:
        """What `from_blocks` took: uint8 [G, N, K/32, 16]."""
        codes = self.codes()
        return (codes[..., ::2] | codes[..., 1::2] << 4).unflatten(-1, (-1, BLOCK // 2))

    def _in_float32(self) -> torch.Tensor:
        values = values_of_codes(self.codes()).unflatten(-1, (-1, BLOCK))
        return (values * _powers(self.scale_bytes())[..., None]).flatten(-2)

    def check_numbers(self, dtype: torch.dtype) -> None:
        """ValueError where a scale is more than kernels with activations of `dtype` decode."""
        most = LARGEST_SCALE[dtype]
        large = int((self.scales > most).sum())
        if large:
            raise ValueError(f"scales: expected at most 2^{most - BIAS} with {dtype}, got {large} larger ones")

    def _fill(self, expert: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write one expert: codes [N, K] and scale bytes [N, K/32]."""
        padded = torch.nn.functional.pad(codes, (0, 2 * self.packed.shape[2] - self.k))
        self.packed[expert] = _packed(padded)
        self._fill_scales(expert, scales, _PADDING_SCALE)


# So that torch.load(weights_only=True) takes them.
torch.serialization.add_safe_globals([Mxfp4Weight])


def _scale_bytes(name: str, scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Scales as bytes. ValueError unless they are of that shape and none is NaN."""
    given = scales
    if isinstance(scales, torch.Tensor) and scales.dtype is torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if not isinstance(scales, torch.Tensor) or scales.dtype is not torch.uint8 or tuple(scales.shape) != shape:
        raise ValueError(f"{name}: expected uint8 {list(shape)} (…, N, K/32), got {found(given)}")
    bad = 0 if scales.is_meta else int((scales == NAN_SCALE).sum())
    if bad:
        raise ValueError(f"{name}: expected bytes below {NAN_SCALE}, which is e8m0's NaN, got {bad} of them")
    return scales


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes -> 2^(byte - 127), float32; that of 0 is subnormal."""
    bits = scales.to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)


def _rounded(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, K/32, 32] -> (e2m1 codes, uint8 of that shape; scale bytes, uint8 [N, K/32])."""
    largest = w.abs().amax(-1)
    if not w.is_meta and not bool(torch.isfinite(largest).all()):
        raise ValueError("w: expected finite values, got NaN or infinities, for which e2m1 has no code")
    exponent = torch.frexp(largest).exponent - 3  # floor(log2(largest)) - 2
    scales = torch.where(largest == 0, BIAS, (exponent + BIAS).clamp(0, 2 * BIAS)).to(torch.uint8)
    return rounded_codes(w / _powers(scales)[..., None]), scales


def rounded_codes(values: torch.Tensor) -> torch.Tensor:
    """e2m1 codes, uint8, of values in units of their scale: to nearest, ties to the even code, at most 6."""
    size = values.abs()
    codes = (size > 0.25).to(torch.uint8)
    # Halfway between an even code and the next one: the even one.
    for code in range(1, 7):
        middle = (_VALUES[code] + _VALUES[code + 1]) / 2
        codes += size >= middle if code % 2 else size > middle
    return codes + 8 * torch.signbit(values)


def values_of_codes(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e2m1 codes, in their shape."""
    return torch.tensor([*_VALUES, *(-v for v in _VALUES)], device=codes.device)[codes.int()]


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., K] -> bytes [..., K/2], K a multiple of 64, in the kernels' order."""
    x = codes.to(torch.int32).unflatten(-1, (-1, 2, 2, 2, 4, 2))  # block, half, sixteen, 8 further, t, neighbour
    words = torch.zeros_like(x[..., 0, :, 0, :, 0])
    for register, pieces in enumerate(_PLACES):
        for neighbour in range(2):
            of_register = x[..., register // 2, :, register % 2, :, neighbour]
            for bits, place in pieces:
                lowest = (bits & -bits).bit_length() - 1
                words |= ((of_register & bits) >> lowest) << (place + 16 * neighbour) % 32
    return words.flatten(-3).contiguous().view(torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_packed`; uint8."""
    words = words_of(packed).unflatten(-1, (-1, 2, 4))
    x = torch.zeros(*words.shape[:-2], 2, 2, 2, 4, 2, dtype=torch.uint8, device=packed.device)
    for register, pieces in enumerate(_PLACES):
        for neighbour in range(2):
            of_register = x[..., register // 2, :, register % 2, :, neighbour]
            for bits, place in pieces:
                lowest = (bits & -bits).bit_length() - 1
                found = words >> (place + 16 * neighbour) % 32 & bits >> lowest
                of_register |= (found << lowest).to(torch.uint8)
    return x.flatten(-6)
