"""QuantizedWeight: what a weight in few bits tells the operators, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

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


@runtime_checkable
class QuantizedWeight(Protocol):
    """The weights of all experts, [G, N, K] values, as the kernels of `ops.weight_only_mm` read them.

    format: the name by which `formats.weight_only` finds the class.
    packed: uint8 [G, N, bytes of a row]; scales and zeros: what else the kernels read, zeros None where there are none.
    group_size: values along K that share a scale.
    """

    format: ClassVar[str]

    @property
    def packed(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def zeros(self) -> torch.Tensor | None: ...
    @property
    def group_size(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, N, K), in values."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, those of padding too."""
        ...

    @property
    def device(self) -> torch.device: ...

    def dequantize(self, dtype: torch.dtype = ...) -> torch.Tensor:
        """[G, N, K] in `dtype`."""
        ...

    def part(self, first: int, last: int) -> Self:
        """Experts first … last - 1: views."""
        ...

    def check_numbers(self, dtype: torch.dtype) -> None:
        """ValueError where scales or zero points are not what kernels with activations of `dtype` take."""
        ...

    @staticmethod
    def kernel_layout(k: int, group_size: int) -> KernelLayout:
        """The layout of rows of K values."""
        ...

    @classmethod
    def of_tensors(
        cls, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, k: int
    ) -> Any:
        """The weight of these fields."""
        ...
