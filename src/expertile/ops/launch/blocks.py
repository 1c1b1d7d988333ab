"""Tensors as TMA descriptors see them."""

from dataclasses import dataclass
from typing import Any

from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia import hopper
from triton.tools.tensor_descriptor import TensorDescriptor

_WRAP = 0x40000000


@dataclass(frozen=True)
class Blocks:
    """Shape and strides of a tensor as TMA sees it, and the box that one copy moves; contiguous dimension last.

    Operands of the tensor cores are swizzled in shared memory; a `plain` box lies there as in the tensor. Triton
    decides that by itself; for a Gluon kernel `plain` does."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    plain: bool = False

    @property
    def form(self) -> "Blocks":
        """What a kernel is compiled for: the same of any tensor's."""
        pitches = (*(16 * 2 ** (len(self.box) - 1 - i) for i in range(len(self.box) - 1)), 1)
        return Blocks(self.box, pitches, self.box, self.plain)

    def of(self, base: Any, kernel: Any) -> TensorDescriptor | hopper.TensorDescriptor:
        """The descriptor of tensor `base`, as `kernel` takes it."""
        shape, strides, box = list(self.shape), list(self.strides), list(self.box)
        if not isinstance(kernel, GluonJITFunction):
            return TensorDescriptor(base, shape, strides, box)
        itemsize = base.dtype.itemsize
        swizzle = 0 if self.plain or len(self.box) == 1 else min(128, self.box[-1] * itemsize)
        return hopper.TensorDescriptor(base, shape, strides, box, NVMMASharedLayout(swizzle, itemsize * 8, len(box)))


def matrix(shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, int], turned: bool = False) -> Blocks:
    """A matrix, or a stack of them; `turned`: box and all stored the other way round."""
    if turned:
        shape, strides, box = ((*x[:-2], x[-1], x[-2]) for x in (shape, strides, box))  # type: ignore[assignment]
    return Blocks(shape, strides, (1,) * (len(shape) - 2) + box)


def ragged(inner: int, stride: int, box: tuple[int, int]) -> Blocks:
    """Rows of `inner` elements, `stride` apart, with a window [first, end) that moves by coordinates alone:
    (_WRAP, end, _WRAP - (end - row), column) reaches row `row`, and what lies past `end` is out of bounds
    (the scheme of triton.tools.ragged_tma: addresses wrap around at 2**64)."""
    return Blocks((0x7FFF0000, 0x7FFF0000, _WRAP, inner), (2**34 - stride, stride, stride, 1), (1, 1, *box))
