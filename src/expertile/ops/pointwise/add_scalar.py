"""add_scalar: out[i] = x[i] + value, the smallest operator there is (s000 of the TSVC loops).

x of any shape, float32, bfloat16 or float16; the sum is formed in float32 and rounded once, as torch
does on a GPU.

Memory limits it, 2 * itemsize * N bytes, and torch's own kernel moves the same: what is left to lose is the launch.
See docs/results/elementwise.md.

Source of the loop: Callahan, Dongarra, Levine, "Vectorizing compilers: a test suite and results", Supercomputing 1988.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from expertile.ops.launch.device import machine, on_kernels
from expertile.ops.launch.kernels import plan
from expertile.ops.launch.launch import Launch, pointer
from expertile.ops.pointwise.checks import VECTOR_BYTES, check_tensor
from expertile.ops.torch_op import define, differentiable_eagerly, traced


@dataclass(frozen=True)
class Config:
    """`block`: elements of one program, a power of two; `num_warps` warps share them."""

    block: int
    num_warps: int


_MANY = Config(1024, 4)
_FEW = {itemsize: Config(128 * VECTOR_BYTES // itemsize, 4) for itemsize in (2, 4)}


def config_for(numel: int, dtype: torch.dtype, sm_count: int) -> Config:
    """Of `numel` elements 1024 for 128 threads, one or two 16-byte loads each: programs are so short that the last ones
    do not run alone for long. Where all fit on the SMs at once, 16 to an SM, one load, so that more of them do."""
    return _FEW[dtype.itemsize] if numel < 16 * sm_count * _MANY.block else _MANY


@triton.jit
def _add(x_ptr, out_ptr, value, index, mask):
    total = tl.load(x_ptr + index, mask=mask).to(tl.float32) + value
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["value", "numel"])
def _add_scalar_kernel(x_ptr, out_ptr, value: tl.float32, numel: tl.int64, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = tl.minimum(numel - start, BLOCK).to(tl.int32)
    # The mask ends at a whole vector, and the compiler sees it: otherwise it would split 16-byte loads. Not a loop of
    # single elements over the last block either, each step of which waits for memory.
    whole = left // VECTOR * VECTOR
    index = tl.arange(0, BLOCK)
    _add(x_ptr + start, out_ptr + start, value, index, index < whole)
    if whole < left:
        rest = whole + tl.arange(0, VECTOR)
        _add(x_ptr + start, out_ptr + start, value, rest, rest < left)


@lru_cache(maxsize=512)
def _plan(numel: int, dtype: torch.dtype, aligned: bool, value: float, config: Config) -> Launch:
    constants = config.block, VECTOR_BYTES // dtype.itemsize
    pointers, programs = (pointer(dtype, aligned),) * 2, -(-numel // config.block)
    return plan(_add_scalar_kernel, programs, pointers, (value, numel), constants, config.num_warps)


def launch(x: torch.Tensor, out: torch.Tensor, value: float, config: Config) -> None:
    """out = x + value over the storage of both, which must be dense and in the same order."""
    aligned = (x.data_ptr() | out.data_ptr()) % VECTOR_BYTES == 0
    _plan(x.numel(), x.dtype, aligned, value, config).run(x.get_device(), (), (x, out))


def _forward(x: torch.Tensor, value: float) -> torch.Tensor:
    out = torch.empty_like(x)
    if not on_kernels(x) or x.dtype is torch.float64:
        # Not torch's own 16-bit sum: on a CPU it rounds the number to 16 bits first.
        return torch.add(x, value, out=out) if x.dtype.itemsize > 2 else out.copy_(x.float() + value)
    # The kernel sees storage, not strides. empty_like keeps those of a dense tensor and gives any other dense ones.
    if not x.is_contiguous() and x.stride() != out.stride():
        x = torch.empty_like(x).copy_(x)
    if x.numel():
        launch(x, out, value, config_for(x.numel(), x.dtype, machine(x.get_device()).sm_count))
    return out


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """The gradient of x is that of the result: no kernel runs backward, and nothing is kept for it."""


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad, None


_call_add_scalar = define(
    "add_scalar", _forward, fake=lambda x, value: torch.empty_like(x), gradient=_gradient, setup=_setup
)
_differentiable = differentiable_eagerly(_forward, _setup, _gradient)


def add_scalar(x: torch.Tensor, value: float) -> torch.Tensor:
    """x + value, elementwise, in one pass over memory.

    Args:
        x: any shape and strides; float32, bfloat16 or float16 (on a CPU also float64). Dense tensors keep their order
            in memory; others (slices, expanded ones) are made contiguous first, which is a pass more.
        value: a number, rounded to float32.

    Returns:
        A tensor of x's shape and dtype. Differentiable in x.

    Under `torch.compile` this is `torch.add`: the compiler can fuse it with its neighbours, and in that lies all that
    there is to win. Raises TypeError or ValueError naming the argument, what was expected and what came.
    """
    check_tensor("x", x)
    if torch.compiler.is_compiling():
        return torch.add(x, value)
    if not isinstance(value, int | float):
        raise TypeError(f"value: expected a number, got {type(value).__name__}")
    if traced(x):
        return _call_add_scalar(x, float(value))
    if x.requires_grad and torch.is_grad_enabled():
        return _differentiable(x, float(value))
    return _forward(x, float(value))
