"""QuantizedWeight: what a weight in few bits tells the operators, whatever its format."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch


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

    @classmethod
    def of_tensors(
        cls, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, k: int
    ) -> Any:
        """The weight of these fields."""
        ...
