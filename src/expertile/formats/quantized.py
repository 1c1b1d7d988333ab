"""QuantizedWeight: what a weight in few bits tells the operators, whatever its format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch


@dataclass(frozen=True)
class KernelLayout:
    """How a row of a weight lies in memory, as far as kernels load it.

    half: values of K in one half of a block; a block's halves meet the two halves of its bytes.
    row_bytes: packed bytes of a row.
    span: values of K that one element of the scales covers.
    scale_dtype: as which scales are loaded; None: the dtype of the activations, 16 bits.
    scales_of_row: further elements of the scales of a row, which belong to all of K.
    """

    half: int
    row_bytes: int
    span: int
    scale_dtype: torch.dtype | None
    scales_of_row: int = 0

    @property
    def scale_itemsize(self) -> int:
        return 2 if self.scale_dtype is None else self.scale_dtype.itemsize


def found(x: object) -> str:
    """What came as an argument, for an error: a tensor's dtype and shape, or the name of a class."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def validate_floating(name: str, x: object, dims: Sequence[int], expected: str) -> None:
    """ValueError unless x is a floating-point tensor with as many dimensions as one of `dims`."""
    if not isinstance(x, torch.Tensor) or x.dim() not in dims or not x.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point {expected}, got {found(x)}")


def validate_dtype(dtype: object) -> None:
    """ValueError unless values can be dequantised to `dtype`."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype: expected a floating-point dtype, got {dtype!r}")


def validate_nibbles(name: str, values: torch.Tensor) -> None:
    """ValueError unless `values` [G, N, K], which it reads, are whole numbers 0 … 15."""
    if not isinstance(values, torch.Tensor) or values.dim() != 3:
        raise ValueError(f"{name}: expected [G, N, K] of integers 0 … 15, got {found(values)}")
    if values.is_meta:
        return
    whole = values == values.trunc() if values.is_floating_point() else True
    wrong = values[~((values >= 0) & (values <= 15) & whole)]
    if len(wrong):
        raise ValueError(f"{name}: expected integers 0 … 15, got {wrong[0].item()}")


def _fields(weight: Any) -> dict[str, Any]:
    return {f.name: getattr(weight, f.name) for f in fields(weight)}


def changed(weight: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A quantised weight, `Fp8Blocks` too, with `change` made to each of its tensors."""
    return replace(weight, **{n: change(x) for n, x in _fields(weight).items() if isinstance(x, torch.Tensor)})


class QuantizedWeight:
    """The weights of all experts, [G, N, K] values, as the kernels of `ops.weight_only_mm` read them; a format is a
    frozen dataclass of this kind.

    format: the name by which `formats.weight_only` finds the class.
    packed: uint8 [G, N, bytes of a row]; scales and zeros: what else the kernels read, zeros None where there are none.
    group_size: values along K that share a scale.
    """

    format: ClassVar[str]
    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)}, device={self.device})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(_fields(self).values())

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, N, K), in values."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str, int, int]:
        """(packed, scales, zeros, format, group_size, K), which `formats.weight_only.weight_of` makes a weight of: what
        torch operators take in its place."""
        return self.packed, self.scales, self.zeros, self.format, self.group_size, self.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, those of padding too."""
        return sum(x.nbytes for x in _fields(self).values() if isinstance(x, torch.Tensor))

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[G, N, K] in `dtype`, by default the scales' or bfloat16: exact in float32 and rounded once.

        Works an expert at a time, so float32 copies are those of one expert.
        """
        if dtype is None:
            dtype = self.scales.dtype if self.scales.is_floating_point() else torch.bfloat16
        validate_dtype(dtype)
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for e in range(self.shape[0]):
            out[e] = self.part(e, e + 1)._in_float32()[0].to(dtype)
        return out

    def _in_float32(self) -> torch.Tensor:
        """All values, [G, N, K]."""
        raise NotImplementedError

    def part(self, first: int, last: int) -> Self:
        """Experts first … last - 1: views."""
        return changed(self, lambda x: x[first:last])

    def to(self, device: torch.device | str | None = None) -> Self:
        """On another device; itself if it is there already."""
        moved = changed(self, lambda x: x.to(device=device))
        return self if moved.packed is self.packed and moved.scales is self.scales else moved

    def check_numbers(self, dtype: torch.dtype) -> None:
        """ValueError where scales or zero points are not what kernels with activations of `dtype` take."""
        raise NotImplementedError

    @staticmethod
    def kernel_layout(k: int, group_size: int) -> KernelLayout:
        """The layout of rows of K values."""
        raise NotImplementedError

    @classmethod
    def of_tensors(
        cls, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, k: int
    ) -> Self:
        """The weight of these fields, as far as the format has them."""
        raise NotImplementedError

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self:
        """The experts of all `weights`, one after another: [G₁ + G₂ + …, N, K]."""
        return cls._joined(weights, 0, 0)

    @classmethod
    def cat_rows(cls, weights: Sequence[Self]) -> Self:
        """The rows of all `weights` within each expert: [G, N₁ + N₂ + …, K], as gate and up are read together."""
        return cls._joined(weights, 1, 2)

    @classmethod
    def _joined(cls, weights: Sequence[Self], packed_dim: int, scale_dim: int) -> Self:
        if not weights:
            raise ValueError(f"weights: expected at least one {cls.__name__}, got none")
        others = [type(w).__name__ for w in weights if not isinstance(w, cls)]
        if others:
            raise ValueError(f"weights: expected each to be an {cls.__name__}, got {others[0]}")
        sizes = {tuple(size for d, size in enumerate(w.shape) if d != packed_dim) for w in weights}
        if len(sizes) > 1:
            raise ValueError(
                f"weights: expected one shape but for dimension {packed_dim}, got {[w.shape for w in weights]}"
            )
        kinds = {(w.group_size, w.zeros is None, w.scales.dtype) for w in weights}
        if len(kinds) > 1:
            raise ValueError(
                f"weights: expected one (group_size, symmetric, dtype of scales), got {sorted(kinds, key=str)}"
            )
        packed, scales = torch.cat([w.packed for w in weights], packed_dim), [w.scales for w in weights]
        zeros = [w.zeros for w in weights if w.zeros is not None]
        joined = torch.cat(zeros, scale_dim) if zeros else None
        return cls.of_tensors(packed, torch.cat(scales, scale_dim), joined, weights[0].group_size, weights[0].shape[2])

    def _check_place(self) -> None:
        """ValueError unless all tensors are contiguous and on one device."""
        here = self.packed.device
        for name, x in (("packed", self.packed), ("scales", self.scales), ("zeros", self.zeros)):
            if x is not None and not x.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
            if x is not None and x.device != here:
                raise ValueError(f"{name}: expected device {here} as packed has, got {x.device}")
