"""`gluon_emulator` with what attention kernels need beyond matrix products: reductions along an axis, exponentials,
layout conversions and stores through pointers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.support import gluon_emulator
from tests.support.gluon_machine import EmulationError, Pointer, Shared, step


class _Language(gluon_emulator._Language):
    def maximum(self, x: Any, y: Any) -> Any:
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            return torch.maximum(torch.as_tensor(x), torch.as_tensor(y))
        return max(x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            return torch.minimum(torch.as_tensor(x), torch.as_tensor(y))
        return min(x, y)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if not isinstance(condition, torch.Tensor):
            return x if condition else y
        return torch.where(condition, x, y)

    def sum(self, x: torch.Tensor, axis: int) -> Any:
        return x.sum(axis)

    def max(self, x: torch.Tensor, axis: int) -> Any:
        return x.amax(axis)

    def exp2(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp2(x)

    def log2(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log2(x)

    def full(self, shape: Any, value: Any, dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
        return torch.full(tuple(shape), value, dtype=dtype)

    def convert_layout(self, x: torch.Tensor, layout: Any, assert_trivial: bool = False) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise EmulationError("the accumulator of an unfinished wgmma is converted")
        return x

    def inline_asm_elementwise(self, asm: str, constraints: str, args: Any, **_: Any) -> Any:
        """Moves from register to register, the only PTX that attention kernels contain."""
        if not asm.startswith("mov.b32"):
            raise EmulationError(f"PTX that is not emulated: {asm}")
        return args[0]

    def store(self, pointer: Pointer, value: torch.Tensor, mask: Any = True) -> None:
        step()
        at = torch.as_tensor(pointer.offset)
        mask = torch.as_tensor(mask).expand(at.shape)
        flat = pointer.tensor.view(-1)
        inside = at[mask].long()
        if bool(((inside < 0) | (inside >= flat.numel())).any()):
            raise EmulationError("a store lies outside its tensor")
        flat[inside] = torch.as_tensor(value).expand(at.shape)[mask].to(flat.dtype)


def run(kernel: Any, grid: int, args: tuple[Any, ...], options: dict[str, Any], seed: int = 0) -> None:
    """`gluon_emulator.run` with the language above."""
    with mock.patch.object(gluon_emulator, "_Language", _Language):
        gluon_emulator.run(kernel, grid, args, options, seed)


__all__ = ["EmulationError", "Shared", "run"]
