"""Host side of the plain Triton backends: the plan of a launch, made once for what it follows from, and the launch.

Which kernel Triton compiles follows from what it looks at in an argument: a dtype, whether an address or a number is a
multiple of 16, whether a number is 1 or needs 64 bits. Arguments that are alike in that share a compiled kernel here as
they do there, but it is looked up when a plan is made, not at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from triton.runtime.jit import JITFunction, KernelParam
from triton.tools.tensor_descriptor import TensorDescriptor

from expertile.device import Device
from expertile.ops.launch import driver
from expertile.ops.launch.device import current_device, program_count


@dataclass(frozen=True)
class Blocks:
    """A descriptor argument: shape and strides of the tensor as TMA sees it, and the block that one copy moves."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    block: list[int]

    def of(self, tensor: Any) -> TensorDescriptor:
        """The descriptor of `tensor`."""
        return TensorDescriptor(tensor, self.shape, self.strides, self.block)


@dataclass(frozen=True)
class Pointer:
    """A tensor argument, or the tensor of a descriptor, that isn't there yet."""

    dtype: torch.dtype
    aligned: bool = True  # whether the address is a multiple of 16

    def data_ptr(self) -> int:
        """What Triton takes for the address."""
        return 0 if self.aligned else 8


@dataclass(frozen=True, eq=False)
class Plan:
    """All of a launch but the tensors. A kernel's parameters are descriptors (the last None where it is not used),
    pointers, integers and compile-time options, in this order."""

    kernel: Any
    blocks: tuple[Blocks | None, ...]
    numbers: tuple[int, ...]
    options: dict[str, Any]
    programs: int
    device: torch.device
    unused: tuple[None, ...] = ()  # in the place of a descriptor that isn't used
    # For a launch past Triton: the compiled kernel, its descriptors, and what stands behind the pointers.
    compiled: driver.Compiled | None = None
    described: tuple[driver.Tensor, ...] = ()
    rest: tuple[Any, ...] = ()

    def launch(
        self,
        tensors: Sequence[torch.Tensor],
        pointers: Sequence[torch.Tensor | None],
        addresses: tuple[int | None, ...],
    ) -> None:
        """Queue the kernel on the current stream. `tensors` are those of the descriptors, as many as are used;
        `addresses` those of all `tensors` and then all `pointers`."""
        used = len(tensors)
        if self.compiled is not None and not driver.hooked():
            described = zip(self.described, addresses, strict=False)
            self.compiled(self.device.index, self.programs, described, (*self.unused, *addresses[used:], *self.rest))
            return
        descriptors = [b.of(t) for b, t in zip(self.blocks, tensors, strict=False) if b is not None]
        with current_device(self.device):
            self.kernel[(self.programs,)](*descriptors, *self.unused, *pointers, *self.numbers, **self.options)


def make_plan(
    kernel: Any,
    blocks: tuple[Blocks | None, ...],
    pointers: tuple[Pointer | None, ...],
    numbers: tuple[int, ...],
    options: dict[str, Any],
    tiles: int,
    blocks_per_sm: int,
    device: int,
) -> Plan:
    """The plan for at most `tiles` tiles on GPU number `device` (-1: tensors of a CPU), with the kernel compiled and
    loaded where it can be launched past Triton."""
    where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    unused = (None,) * blocks.count(None)
    plan = Plan(kernel, blocks, numbers, options, program_count(where, tiles, blocks_per_sm), where, unused)
    if device < 0 or not isinstance(kernel, JITFunction):  # the interpreter's functions are of another kind
        return plan
    front = (*(b and (b.dtype, tuple(b.block)) for b in blocks), *pointers)
    arguments = (*front, *map(_alike, kernel.params[len(front) :], numbers))
    compiled = _compile(kernel, arguments, len(blocks), tuple(options.items()), device)
    if compiled is None:
        return plan
    described = tuple(compiled.tensor(i, b.shape, b.strides) for i, b in enumerate(blocks) if b is not None)
    constants = (None,) * (len(kernel.params) - len(arguments))
    return replace(plan, compiled=compiled, described=described, rest=(*numbers, *constants))


def early_options(device: int, smem_bytes: int) -> dict[str, Any]:
    """Options of a kernel that starts by `begin(EARLY)` and takes `smem_bytes` a program: on compute capability 9.0 and
    later it is launched, and finds its arguments, before the kernel ahead of it is done.

    Only where a program leaves no room for another on its multiprocessor. Programs that come early go to those that are
    the first to fall idle, as many as fit; of a persistent kernel these then have more than their share of tiles, and
    the others less. (H200: layers of Qwen3 and gpt-oss with few tokens took 3 and 7 % longer with `triton_pointer`
    early, two or three of whose programs fit; with `triton_tma`, of which one does, 262 us instead of 267.)"""
    machine = Device.current(f"cuda:{device}") if device >= 0 else None
    early = machine is not None and machine.at_least(9) and 2 * smem_bytes > machine.smem_bytes
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})


def _alike(parameter: KernelParam, number: int) -> int:
    """One of the few integers that stand for all: Triton compiles for it what it does for `number`."""
    wide = 0 if -(2**31) <= number < 2**31 else 2**31
    if parameter.do_not_specialize:
        return wide
    return 1 if number == 1 else wide + (16 if number % 16 == 0 else 2)


@lru_cache(maxsize=256)
def _compile(
    kernel: JITFunction, arguments: tuple[Any, ...], descriptors: int, options: tuple[tuple[str, Any], ...], device: int
) -> driver.Compiled | None:
    """`kernel` for arguments like these; the first `descriptors` of them are (dtype, block) or None."""
    mocks = [x and _mock(*x) for x in arguments[:descriptors]]
    with torch.cuda.device(device):
        return driver.prepare(kernel.run(*mocks, *arguments[descriptors:], grid=(1,), warmup=True, **dict(options)))


def _mock(dtype: torch.dtype, block: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor of such blocks, of no tensor: strides that are multiples of 16 bytes please its checks."""
    strides = [*(16 * 2**i for i in range(len(block) - 1, 0, -1)), 1]
    return Blocks(dtype, list(block), strides, list(block)).of(Pointer(dtype))
