"""`gluon_emulator` with what gathered products need beyond grouped ones: activations, row sums and results put
side by side."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.support import gluon_emulator
from tests.support.gluon_machine import EmulationError, Pointer, step


class _Language(gluon_emulator._Language):
    def sum(self, x: torch.Tensor, axis: int) -> Any:
        return int(x.sum()) if x.dim() == 1 else x.sum(axis)

    def store(self, pointer: Pointer, value: torch.Tensor, mask: Any = True) -> None:
        step()
        at, mask, value = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask), value)
        flat, inside = pointer.tensor.view(-1), at[mask].long()
        if bool(((inside < 0) | (inside >= flat.numel())).any()):
            raise EmulationError("a store lies outside its tensor")
        flat[inside] = value[mask].to(flat.dtype)

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, y), -1)

    def convert_layout(self, x: torch.Tensor, layout: Any, assert_trivial: bool = False) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise EmulationError("the accumulator of an unfinished wgmma is converted")
        return x


def run(kernel: Any, grid: int, args: tuple[Any, ...], options: dict[str, Any], seed: int = 0) -> None:
    """`gluon_emulator.run` with the language above."""
    with mock.patch.object(gluon_emulator, "_Language", _Language):
        gluon_emulator.run(kernel, grid, args, options, seed)
