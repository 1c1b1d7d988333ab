"""Launching a compiled Triton kernel, with TMA descriptors or without, sparing what Triton does anew for every call.

`kernel[grid](...)` binds and inspects every argument, makes a key of them, looks the kernel up and encodes every
descriptor: 30 to 50 µs, of which the driver's launch is 2. Here the caller names the compiled kernel, and descriptors
are encoded once for an address: a CUtensorMap is an address, a shape, strides and a box, so it holds for whatever
tensor lies there. No tensor is kept alive, and every cache is bounded.

The calling convention below is that of Triton 3.6 (`CudaLauncher` and `make_launcher` in triton/backends/nvidia/
driver.py) and private to it: for another version `prepare` returns None and the caller launches in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.runtime import driver

# CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: what lies outside reads as zeros.
_FILL_ZEROS = 0


@dataclass(frozen=True, eq=False)
class Tensor:
    """How a tensor argument is described to TMA: shape, strides in elements, and the compiled kernel's box."""

    shape: list[int]
    strides: list[int]
    swizzle: int
    elem_size: int
    elem_type: int
    block_size: list[int]


@lru_cache(maxsize=4096)
def _encode(tensor: Tensor, address: int) -> tuple[Any, ...]:
    """The launcher's arguments for one descriptor: the CUtensorMap, the shape, the strides."""
    fill = driver.active.utils.fill_tma_descriptor
    encoded = fill(
        address, tensor.swizzle, tensor.elem_size, tensor.elem_type, tensor.block_size, tensor.shape, tensor.strides,
        _FILL_ZEROS,
    )  # fmt: skip
    return (encoded, *tensor.shape, *tensor.strides)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled kernel, ready for one device."""

    launch: Callable[..., None]
    function: int
    fixed: tuple[Any, ...]
    boxes: tuple[Any, ...]
    stream_of: Callable[[int], int]
    current_device: Callable[[], int]

    def tensor(self, which: int, shape: list[int], strides: list[int]) -> Tensor:
        """The kernel's descriptor number `which`, of a tensor of that shape."""
        box = self.boxes[which]
        return Tensor(
            shape, strides, box["swizzle"], box["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]],
            box["block_size"],
        )  # fmt: skip

    def __call__(
        self, device: int, programs: int, tensors: Iterable[tuple[Tensor, Any]], rest: tuple[Any, ...]
    ) -> None:
        """Queue the kernel on `device`'s current stream.

        The kernel's parameters are descriptors, given as (description, address), and then `rest`: addresses,
        integers, and anything at all for compile-time parameters.
        """
        if self.current_device() != device:
            with torch.cuda.device(device):
                return self(device, programs, tensors, rest)
        described: list[Any] = []
        for tensor, address in tensors:
            described += _encode(tensor, address)
        self.launch(programs, 1, 1, self.stream_of(device), self.function, *self.fixed, *described, *rest)


def prepare(kernel: Any) -> Compiled | None:
    """`kernel`, a `triton.compile` result, loaded on the current device; None where it has to be launched by Triton."""
    if not triton.__version__.startswith("3.6."):
        return None
    launcher = kernel.run  # loads the binary
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    # `launch` is the generated C function; with descriptors, a Python closure around it that encodes them.
    raw, boxes = launcher.launch, tuple(kernel.metadata.tensordesc_meta or ())
    closure = getattr(raw, "__closure__", None)
    if (closure is None) == bool(boxes):
        return None  # descriptors that this GPU is handed in another form
    if closure is not None:
        raw = closure[raw.__code__.co_freevars.index("launcher")].cell_contents
    fixed = (
        launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, kernel.packed_metadata, None, None, None,
    )  # fmt: skip
    active = driver.active
    return Compiled(raw, kernel.function, fixed, boxes, active.get_current_stream, active.get_current_device)


def hooked() -> bool:
    """Whether somebody (a profiler) wants to see every launch, which only Triton's own path shows."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
