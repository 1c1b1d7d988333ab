"""Int4Weight: the weights of all experts in 4 bits, w ≈ (q − zero) · scale, in the layout that the kernels read.

q is unsigned, 0 … 15. One scale (and one zero point, or the fixed 8 where the weights are symmetric) belongs to
`group_size` values along K of one row n, as in GPTQ (Frantar et al., arXiv:2210.17323) and AWQ (Lin et al.,
arXiv:2306.00978). Rounding to nearest is off by at most about scale / 2, with scale = max|w| / 7.5 (symmetric) or
(max − min) / 15: normally distributed weights come back with a relative Frobenius error of 0.111 (0.101 with zero
points) at group 128, 0.103 (0.091) at 64 and 0.095 (0.081) at 32.

Bytes for each value: 1/2, and 2 / group_size for a scale (twice that with zero points). At group 128 that is 3.88 times
less than bfloat16, not 4, and 3.76 times with zero points.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from expertile.formats.int4.packing import half_block, pack, unpack
from expertile.formats.quantized import KernelLayout, QuantizedWeight, found, validate_floating, validate_nibbles

GROUP_SIZES = (32, 64, 128)
SCALE_DTYPES = (torch.bfloat16, torch.float16)
SYMMETRIC_ZERO = 8
SCALE_LIMIT = 2.0**27  # in magnitude, exclusive


@dataclass(frozen=True, eq=False)
class Int4Weight(QuantizedWeight):
    """Weights [G, N, K] (G experts, N outputs, K inputs: as `torch.nn.Linear` stores them) in 4 bits.

    packed: uint8 [G, N, K/2], nibbles as `expertile.formats.int4.packing` says.
    scales: bfloat16 or float16 [G, K/group_size, N], N contiguous: the dtype of the activations to come.
        Below 2^27 in magnitude; below about 2^-94 kernels may lose digits of a weight (`SCALE_LIMIT`; values are not
        looked at here).
    zeros: like `scales`, the zero point as a number; None: symmetric, zero = 8.
    group_size: 32, 64, 128, or K (one scale for a row, "per channel").

    K is a multiple of 64 and of group_size; all tensors are contiguous and on one device. ValueError otherwise, naming
    the field.
    """

    format: ClassVar[str] = "int4"

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int

    def __post_init__(self) -> None:
        _validate(self.packed, self.scales, self.zeros, self.group_size)
        self._check_place()

    def __repr__(self) -> str:
        kind = "symmetric" if self.zeros is None else "with zero points"
        return (
            f"Int4Weight({list(self.shape)}, group_size={self.group_size}, {kind}, dtype={self.dtype}, "
            f"device={self.device})"
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, N, K), in values."""
        g, n, half_k = self.packed.shape
        return g, n, 2 * half_k

    @property
    def half(self) -> int:
        """Bytes of a block of the packed layout: 64 or 32."""
        return half_block(self.shape[2], self.group_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the scales, and so of the activations."""
        return self.scales.dtype

    @staticmethod
    def kernel_layout(k: int, group_size: int) -> KernelLayout:
        return KernelLayout(half_block(k, group_size), k // 2, group_size, None)

    @classmethod
    def of_tensors(cls, packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, k: int) -> Self:
        """The weight of these fields; K is told by `packed`."""
        return cls(packed, scales, zeros, group_size)

    @staticmethod
    def quantize(
        w: Tensor, group_size: int | None = 128, symmetric: bool = True, dtype: torch.dtype | None = None
    ) -> "Int4Weight":
        """`w` [G, N, K] or [N, K] (one expert), floating point, rounded to nearest.

        `group_size` None: one scale for each row. `dtype` of the scales: that of `w` if it is bfloat16 or float16, else
        bfloat16. Values are rounded against the scale as stored. A group of zeros has scale 1; NaN and infinities make
        their group's scale NaN or infinite. ValueError where a finite group's scale is above what `dtype` holds. None
        is below its smallest normal number: float16 rounds groups of less than 2^-15 to zeros. Works an expert at a
        time, in float32.
        """
        validate_floating("w", w, (2, 3), "[G, N, K] or [N, K]")
        w = w if w.dim() == 3 else w[None]
        g, n, k = w.shape
        group_size = k if group_size is None else group_size
        dtype = dtype or (w.dtype if w.dtype in SCALE_DTYPES else torch.bfloat16)
        if dtype not in SCALE_DTYPES:
            raise ValueError(f"dtype: expected torch.bfloat16 or torch.float16, got {dtype!r}")
        validate_groups(k, group_size)
        packed = torch.empty(g, n, k // 2, dtype=torch.uint8, device=w.device)
        scales = torch.empty(g, k // group_size, n, dtype=dtype, device=w.device)
        zeros = None if symmetric else torch.empty_like(scales)
        half = half_block(k, group_size)
        for e in range(g):
            q, scale, zero = _quantize_rows(w[e].float().unflatten(-1, (-1, group_size)), symmetric, dtype)
            packed[e] = pack(q.flatten(-2), half)
            scales[e] = scale.t()
            if zeros is not None:
                zeros[e] = zero.t()
        return Int4Weight(packed, scales, zeros, group_size)

    @staticmethod
    def of_values(values: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> "Int4Weight":
        """From unpacked `values` [G, N, K] (integers 0 … 15), with scales and zeros [G, K/group_size, N]."""
        validate_nibbles("values", values)
        validate_groups(values.shape[2], group_size)
        packed = pack(values.to(torch.uint8).contiguous(), half_block(values.shape[2], group_size))
        return Int4Weight(packed, scales.contiguous(), None if zeros is None else zeros.contiguous(), group_size)

    def values(self) -> Tensor:
        """q, uint8 0 … 15 [G, N, K]."""
        return unpack(self.packed, self.half)

    def _in_float32(self) -> Tensor:
        q = self.values().unflatten(-1, (-1, self.group_size)).float()
        zero = float(SYMMETRIC_ZERO) if self.zeros is None else self.zeros.mT.float()[..., None]
        return ((q - zero) * self.scales.mT.float()[..., None]).flatten(-2)

    def check_numbers(self, dtype: torch.dtype) -> None:
        """ValueError unless scales and zero points are finite and scales, for bfloat16 activations, below 2^27."""
        for name, x in (("scales", self.scales), ("zeros", self.zeros)):
            bad = 0 if x is None else int((~torch.isfinite(x)).sum())
            if bad:
                raise ValueError(f"{name}: expected finite numbers, got {bad} that are NaN or infinite")
        large = int((self.scales.abs() >= SCALE_LIMIT).sum()) if dtype is torch.bfloat16 else 0
        if large:
            raise ValueError(f"scales: expected magnitudes below 2^27, got {large} larger ones")

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Int4Weight":
        """On another device, or with scales of another dtype (which rounds them; zero points stay whole numbers)."""
        packed = self.packed.to(device=device)
        scales = self.scales.to(device=device, dtype=dtype)
        zeros = None if self.zeros is None else self.zeros.to(device=device, dtype=dtype)
        if packed is self.packed and scales is self.scales:
            return self
        return replace(self, packed=packed, scales=scales, zeros=zeros)

    def with_zeros(self) -> "Int4Weight":
        """The same weights with zero points, of 8, written out where they are symmetric."""
        return self if self.zeros is not None else replace(self, zeros=torch.full_like(self.scales, SYMMETRIC_ZERO))


# So that torch.load(weights_only=True) takes them.
torch.serialization.add_safe_globals([Int4Weight])


def _quantize_rows(groups: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [N, K/group, group] -> (q, uint8 of that shape; scale, `dtype`, and zero, float32, both [N, K/group])."""
    if symmetric:
        extent = groups.abs().amax(-1) / 7.5
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        extent = (high - low) / 15
    scale = torch.where(extent == 0, 1.0, extent.clamp(min=torch.finfo(dtype).tiny)).to(dtype)
    stored = scale.float()
    if not extent.is_meta and bool((stored.isinf() & extent.isfinite()).any()):
        largest = extent[extent.isfinite()].max().item()
        raise ValueError(f"w: expected scales of at most {torch.finfo(dtype).max:g} in {dtype}, got one of {largest:g}")
    zero = torch.full_like(stored, SYMMETRIC_ZERO) if symmetric else (-low / stored).round().clamp(0, 15)
    q = (groups / stored[..., None]).round().add(zero[..., None]).clamp(0, 15)
    return q.nan_to_num(0).to(torch.uint8), scale, zero


def validate_groups(k: int, group_size: int) -> None:
    """ValueError unless K can be packed and cut into groups of that size."""
    if k % 64 or k == 0:
        raise ValueError(
            f"K: expected a positive multiple of 64 (bytes pair values 32 or 64 apart), got {k}; pad the weights and "
            "the activations with zeros"
        )
    if not isinstance(group_size, int) or group_size not in (*GROUP_SIZES, k):
        raise ValueError(f"group_size: expected 32, 64, 128 or K = {k} (per channel), got {group_size}")
    if k % group_size:
        raise ValueError(f"group_size: expected a divisor of K = {k}, got {group_size}; 32 and 64 always divide it")


def _validate(packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> None:
    if not isinstance(packed, Tensor) or packed.dtype is not torch.uint8 or packed.dim() != 3:
        raise ValueError(f"packed: expected uint8 [G, N, K/2], got {found(packed)}")
    g, n, half_k = packed.shape
    validate_groups(2 * half_k, group_size)
    shape = (g, 2 * half_k // group_size, n)
    if not isinstance(scales, Tensor) or scales.dtype not in SCALE_DTYPES:
        raise ValueError(f"scales: expected dtype torch.bfloat16 or torch.float16, got {found(scales)}")
    if tuple(scales.shape) != shape:
        raise ValueError(f"scales: expected shape {list(shape)} (G, K/group_size, N), got {list(scales.shape)}")
    if zeros is not None and not (
        isinstance(zeros, Tensor) and tuple(zeros.shape) == shape and zeros.dtype is scales.dtype
    ):
        raise ValueError(f"zeros: expected {scales.dtype} {list(shape)} as scales, got {found(zeros)}")
