"""`gluon_emulator` with what kernels over rows need beyond matrix products: reductions to floats, masked loads and
stores that are counted, shared memory seen as another shape."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import torch

from expertile.ops.rows import ring
from tests.support import gather_emulator, gluon_emulator
from tests.support.gluon_machine import EmulationError, Pointer, Shared


class _Pointer(Pointer):
    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.tensor.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.tensor, self.offset + offset)


class _Shared(Shared):
    def index(self, i: int) -> _Shared:
        found = super().index(i)
        return _Shared(found.tensor, found.layout, found.key)

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> _Shared:
        return _Shared(self.tensor.view(dtype).view(*shape), layout, self.key)


class _Language(gather_emulator._Language):
    writes: torch.Tensor

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) else x

    def max(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amax(axis)

    def sum(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.sum(axis)

    def inline_asm_elementwise(self, asm: str, constraints: str, args: Any, **_: Any) -> Any:
        if not asm.startswith("ex2.approx.ftz.f32 "):
            raise EmulationError(f"PTX that is not emulated here: {asm}")
        return torch.exp2(args[0])

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        found = super().allocate_shared_memory(dtype, shape, layout)
        return _Shared(found.tensor, found.layout) if isinstance(found, Shared) else found

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
        at, inside = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
        if bool(((at[inside] < 0) | (at[inside] >= pointer.tensor.numel())).any()):
            raise EmulationError("a load lies outside its tensor")
        return super().load(pointer, inside, other)

    def store(self, pointer: Pointer, value: torch.Tensor, mask: Any = True) -> None:
        super().store(pointer, value, mask)
        at, inside, _ = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask), value)
        _Language.writes.index_add_(0, at[inside].long(), torch.ones(int(inside.sum()), dtype=torch.int32))


def run(kernel: Any, grid: int, args: tuple[Any, ...], options: dict[str, Any], elements: int, seed: int = 0) -> None:
    """`gluon_emulator.run` of a ring kernel whose result has so many elements; an EmulationError unless each of them
    is written once."""
    _Language.writes = torch.zeros(elements, dtype=torch.int32)
    modules = gluon_emulator._modules
    with (
        mock.patch.object(gluon_emulator, "_Language", _Language),
        mock.patch.object(gluon_emulator, "Pointer", _Pointer),
        mock.patch.object(gluon_emulator, "_modules", lambda k: [*modules(k), ring]),
    ):
        gluon_emulator.run(kernel, grid, args, options, seed)
    if bool((_Language.writes != 1).any()):
        raise EmulationError("some elements of the result are not written once")
