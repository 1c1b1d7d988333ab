"""Tensors as TMA descriptors see them, and Gluon kernels compiled for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from expertile.ops.launch import driver

_WRAP = 0x40000000


@dataclass(frozen=True)
class Blocks:
    """Shape and strides of a tensor as TMA sees it, and the box that one copy moves; contiguous dimension last.

    What feeds the tensor cores is swizzled in shared memory; a `plain` box lies there as in the tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    plain: bool = False

    @property
    def form(self) -> Blocks:
        """What a kernel is compiled for: the same of any tensor's."""
        pitches = (*(16 * 2 ** (len(self.box) - 1 - i) for i in range(len(self.box) - 1)), 1)
        return Blocks(self.box, pitches, self.box, self.plain)

    def of(self, base: Any) -> TensorDescriptor:
        itemsize = base.dtype.itemsize
        swizzle = 0 if self.plain or len(self.box) == 1 else min(128, self.box[-1] * itemsize)
        layout = NVMMASharedLayout(swizzle, itemsize * 8, len(self.box))
        return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.box), layout)


def ragged(inner: int, stride: int, box: tuple[int, int]) -> Blocks:
    """Rows of `inner` elements, `stride` apart, with a window [first, end) that moves by coordinates alone:
    (_WRAP, end, _WRAP - (end - row), column) reaches row `row`, and what lies past `end` is out of bounds
    (the scheme of triton.tools.ragged_tma: addresses wrap around at 2**64)."""
    return Blocks((0x7FFF0000, 0x7FFF0000, _WRAP, inner), (2**34 - stride, stride, stride, 1), (1, 1, *box))


def tickets(dynamic: bool, like: torch.Tensor) -> torch.Tensor:
    """The counter that one launch draws tile numbers from: fresh, so that launches on other streams and replays of
    CUDA graphs have their own. Any tensor where none is needed."""
    return torch.zeros(1, dtype=torch.int32, device=like.device) if dynamic else like


@dataclass(frozen=True, eq=False)
class Ready:
    """A plan with its compiled kernel."""

    kernel: driver.Compiled
    a: driver.Tensor
    b: driver.Tensor
    c: driver.Tensor
    rest: tuple[Any, ...]
    programs: int

    def __call__(self, device: int, a: int, b: int, c: int, pointers: tuple[int, ...]) -> None:
        """Queue the kernel on `device`'s current stream, for tensors at these addresses."""
        described = ((self.a, a), (self.b, b), (self.c, c))
        self.kernel(device, self.programs, described, (*pointers, *self.rest))


@lru_cache(maxsize=512)
def compiled(
    kernel: Any,
    forms: tuple[Blocks, ...],
    dtypes: tuple[torch.dtype, ...],
    numbers: tuple[int | float, ...],
    options: tuple[tuple[str, Any], ...],
    device: int,
) -> driver.Compiled | None:
    """`kernel(*descriptors, *pointers, *numbers, **options)` compiled for GPU number `device`: for descriptors of these
    forms, for `dtypes` of theirs and then of the pointers, and for any numbers, on which it must not specialise."""
    mocks = [MockTensor(dtype) for dtype in dtypes]
    args = (*(form.of(mock) for form, mock in zip(forms, mocks, strict=False)), *mocks[len(forms) :], *numbers)
    with torch.cuda.device(device):
        return driver.prepare(kernel.run(*args, grid=(1,), warmup=True, **dict(options)))


def make_ready(
    kernel: Any,
    blocks: tuple[Blocks, Blocks, Blocks],
    dtypes: tuple[torch.dtype, ...],
    numbers: tuple[int, ...],
    options: dict[str, Any],
    programs: int,
    device: int,
) -> Ready | None:
    """`kernel(a, b, c, *pointers, *numbers, **options)`, compiled and loaded on GPU number `device`; None where Triton
    has to launch it. `blocks` describe a, b, c; `dtypes` are theirs and then the pointers'."""
    forms = tuple(x.form for x in blocks)
    made = compiled(kernel, forms, dtypes, (2,) * len(numbers), tuple(options.items()), device)
    if made is None:
        return None
    a, b, c = (made.tensor(i, list(x.shape), list(x.strides)) for i, x in enumerate(blocks))
    constants = (None,) * (len(kernel.arg_names) - len(dtypes) - len(numbers))
    return Ready(made, a, b, c, (*numbers, *constants), programs)
