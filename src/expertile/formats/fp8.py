"""Quantised tensors: values and their scales. x ≈ values · scale, with one float32 scale for each block.

e4m3 (float8_e4m3fn: 4 exponent bits, 3 mantissa bits, largest value 448, smallest normal 2⁻⁶; Micikevicius et al., "FP8
formats for deep learning", arXiv:2209.05433). A block's scale is its largest magnitude over 448, so that magnitude is
reached exactly and nothing saturates. Rounding to nearest makes a relative error of at most 2⁻⁴ for elements down to
2⁻⁶ · scale, and an absolute one of at most 2⁻¹⁰ · scale below; normally distributed data come back with a relative
Frobenius error of about 2.6 %. Scales rounded up to powers of two cost up to one bit of the small elements' range.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from expertile.formats.quantized import QuantizedWeight, changed, found, validate_dtype, validate_floating

E4M3_MAX = 448.0
TOKEN_BLOCK = 128  # tokens that share a scale where a product sums over tokens

_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True, eq=False)
class Fp8Blocks:
    """A matrix (or a stack of them) in e4m3 with one scale for each block of `block` = (rows, columns).

    values: [..., R, C] float8_e4m3fn; scales: [..., ceil(R / rows), ceil(C / columns)] float32. What is passed to
    `scaled_grouped_mm` is `values` and `scales` of activations [T, K] with block (1, 128), and of weights [G, N, K]
    with block (128, 128), the latter as `values.transpose(-2, -1)`. ValueError names a field that does not fit.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int] = (1, 128)

    def __post_init__(self) -> None:
        values, scales, block = self.values, self.scales, self.block
        _check_block(block)
        if not isinstance(values, Tensor) or values.dtype is not torch.float8_e4m3fn or values.dim() < 2:
            raise ValueError(f"values: expected float8_e4m3fn [..., R, C], got {found(values)}")
        *others, rows, cols = values.shape
        shape = (*others, -(-rows // block[0]), -(-cols // block[1]))
        fits = isinstance(scales, Tensor) and scales.dtype is torch.float32
        # Without values any shape will do: a row of none has a scale.
        if not fits or (values.numel() and scales.shape != shape):
            raise ValueError(f"scales: expected float32 {list(shape)} for blocks of {block}, got {found(scales)}")
        if scales.device != values.device:
            raise ValueError(f"scales: expected device {values.device} as values has, got {scales.device}")

    def __repr__(self) -> str:
        return f"Fp8Blocks({list(self.values.shape)}, block={self.block}, device={self.values.device})"

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: torch pickles no tensor of float8 (2.13), though it saves them.
        return _of_bytes, (self.values.view(torch.uint8), self.scales, self.block)

    def to(self, device: torch.device | str | None = None) -> "Fp8Blocks":
        """On another device; itself if it is there already."""
        moved = changed(self, lambda x: x.to(device=device))
        return self if moved.values is self.values and moved.scales is self.scales else moved

    @staticmethod
    def quantize(x: Tensor, block: tuple[int, int] = (1, 128), power_of_two: bool = False) -> "Fp8Blocks":
        """`x` [..., R, C], floating point -> blocks of `block`; the last ones may be cut off by the tensor's edge.

        A block of zeros has the scale 1. NaN and infinities make their block's scale NaN or infinite. With
        `power_of_two` scales are rounded up to powers of two, so that multiplying by them is exact.
        """
        if not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
            raise ValueError(f"x: expected a floating-point [..., R, C], got {found(x)}")
        block = tuple(block) if isinstance(block, list) else block
        _check_block(block)
        rows, cols = x.shape[-2:]
        tiles = _tiled(x.float(), block)
        amax = tiles.abs().amax(dim=(-3, -1))
        # By a tensor: on a GPU torch divides by a number by multiplying with its rounded reciprocal.
        scales = torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=_SMALLEST_NORMAL))
        if power_of_two:
            mantissa, exponent = torch.frexp(scales)  # scales = mantissa · 2^exponent, mantissa in [1/2, 1)
            up = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))
            scales = torch.where(torch.isfinite(scales), up, scales)
        values = (tiles / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
        values = values.flatten(-4, -3).flatten(-2, -1)[..., :rows, :cols]
        return Fp8Blocks(values.contiguous(), scales, block)

    @staticmethod
    def quantize_tokens(x: Tensor, offs: Tensor, power_of_two: bool = False) -> "tuple[Fp8Blocks, torch.Tensor]":
        """`x` [T, C] and the end of each group of rows, `offs` [G] int32 -> (xᵀ in blocks of 128 tokens, its offs).

        That is an operand of wgrad, which sums over the tokens of each group: values [C, P], scales [C, P / 128] with
        P = 128 · floor((T + 127 G) / 128), room for every group to begin on a multiple of 128 whatever its size. Behind
        each group stand zeros; the returned offs (int32, on the device, multiples of 128) count them in. Rows past
        offs[-1] are dropped. Never waits for the GPU.
        """
        validate_floating("x", x, (2,), "[T, C]")
        if not isinstance(offs, Tensor) or offs.dtype is not torch.int32 or offs.dim() != 1 or not len(offs):
            raise ValueError(f"offs: expected int32 [G] of at least one group, got {found(offs)}")
        tokens, channels = x.shape
        groups = offs.shape[0]
        room = (tokens + (TOKEN_BLOCK - 1) * groups) // TOKEN_BLOCK * TOKEN_BLOCK
        ends = aligned_offs(offs)
        rows = torch.arange(tokens, device=x.device, dtype=offs.dtype)
        group = torch.searchsorted(offs, rows, right=True)
        here = group.clamp(max=groups - 1)
        start = offs - torch.diff(offs, prepend=offs.new_zeros(1))
        aligned_start = ends - torch.diff(ends, prepend=ends.new_zeros(1))
        # Rows of no group go to one more row, which is cut off.
        target = torch.where(group < groups, aligned_start[here] + rows - start[here], room)
        spread = x.new_zeros(room + 1, channels)
        spread[target.long()] = x
        return Fp8Blocks.quantize(spread[:room].t(), (1, TOKEN_BLOCK), power_of_two), ends

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """values · scales, [..., R, C]."""
        validate_dtype(dtype)
        return dequantize(self.values, self.scales, self.block, dtype)

    def transposed(self) -> "Fp8Blocks":
        """The same matrix, transposed in memory: dgrad's weights, from those of the forward pass.

        Exact, and quantised nothing anew; so only for blocks whose transpose is a block of the same shape.
        """
        if self.block[0] != self.block[1]:
            raise ValueError(
                f"block: expected a square one, such as (128, 128), got {self.block}; quantise x.T instead"
            )
        values = self.values.transpose(-2, -1).contiguous()
        return Fp8Blocks(values, self.scales.transpose(-2, -1).contiguous(), self.block)


def _check_block(block: Any) -> None:
    whole = (int, torch.SymInt)
    pair = isinstance(block, tuple) and len(block) == 2
    if not pair or not isinstance(block[0], whole) or not isinstance(block[1], whole) or min(block) < 1:
        raise ValueError(f"block: expected (rows, columns), integers of at least 1, got {block!r}")


def _of_bytes(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Fp8Blocks:
    return Fp8Blocks(values.view(torch.float8_e4m3fn), scales, block)


# So that torch.load(weights_only=True) takes them.
torch.serialization.add_safe_globals([_of_bytes])


class QuantizedBuffers(torch.nn.Module):
    """A module that holds one quantised weight (`Fp8Blocks`, `Int4Weight`, `Mxfp4Weight`); buffers are its tensors.

        self.up = QuantizedBuffers(Int4Weight.quantize(w))      and in forward      moe_mlp(x, self.up.weight, …)

    `state_dict`, `load_state_dict`, `.to(device)`, `to_empty` and `copy.deepcopy` reach the buffers. `.half()`,
    `.bfloat16()` and `.to(dtype)` leave their dtypes alone: FP8 values, packed values and scales are not to be rounded
    again.
    """

    def __init__(self, weight: Any) -> None:
        super().__init__()
        quantised = isinstance(weight, (Fp8Blocks, QuantizedWeight))
        if not quantised:
            raise ValueError(f"weight: expected Fp8Blocks or a quantised weight, got {type(weight).__name__}")
        self._kind = type(weight)
        self._names = tuple(field.name for field in fields(weight))
        self._rest: dict[str, Any] = {}
        for field in fields(weight):
            value = getattr(weight, field.name)
            # Only a tensor can be missing: the zero points of a symmetric weight.
            if value is None or isinstance(value, Tensor):
                self.register_buffer(field.name, value)
            else:
                self._rest[field.name] = value

    @property
    def weight(self) -> Any:
        """The weight, made of the buffers as they are now. Errors as its class raises them."""
        return self._kind(*(self._rest[n] if n in self._rest else getattr(self, n) for n in self._names))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedBuffers":
        def moved(x: Tensor) -> Tensor:
            return fn(x.view(torch.uint8)).view(x.dtype)  # as bytes, which no change of dtype touches

        return super()._apply(moved, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: torch pickles no tensor of float8 (2.13), though it saves them.
        small = {n: x for n, x in self._buffers.items() if x is not None and x.dtype is torch.float8_e4m3fn}
        as_bytes = {n: x.view(torch.uint8) for n, x in small.items()}
        return {**self.__dict__, "_buffers": {**self._buffers, **as_bytes}, "_float8": tuple(small)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        small = state.pop("_float8", ())
        super().__setstate__(state)
        self._buffers.update({n: self._buffers[n].view(torch.float8_e4m3fn) for n in small})  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        return repr(self.weight)


def dequantize(values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """values [..., R, C] · scales [..., ceil(R / rows), ceil(C / columns)], each for a block of (rows, columns). Exact
    in float32 (float64 where that is asked for), rounded once."""
    (rows, cols), (high, broad) = values.shape[-2:], block
    wide = torch.promote_types(dtype, torch.float32)
    if rows % high or cols % broad:
        spread = scales.to(wide).repeat_interleave(high, -2)[..., :rows, :].repeat_interleave(broad, -1)[..., :cols]
        return (values.to(wide) * spread).to(dtype)
    # Whole blocks: no scale for each value is spread out beside the values.
    blocks = values.to(wide).unflatten(-1, (cols // broad, broad)).unflatten(-3, (rows // high, high))
    return blocks.mul_(scales.to(wide)[..., :, None, :, None]).flatten(-4, -3).flatten(-2, -1).to(dtype)


def aligned_offs(offs: Tensor) -> Tensor:
    """Ends of the groups when each is padded to a multiple of `TOKEN_BLOCK`; int32, on the device of `offs`."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return ((sizes + TOKEN_BLOCK - 1) // TOKEN_BLOCK * TOKEN_BLOCK).cumsum(0).to(torch.int32)


def _tiled(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[..., R, C] -> [..., row blocks, rows, column blocks, columns], zeros behind the edges."""
    rows, cols = x.shape[-2:]
    padded = torch.nn.functional.pad(x, (0, -cols % block[1], 0, -rows % block[0]))
    return padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
