"""Launching a compiled Triton kernel, with TMA descriptors or without, sparing what Triton does anew for every call.

`kernel[grid](...)` takes 30 to 50 µs, of which the driver's launch is 2. Here the caller names the compiled kernel, and
descriptors are encoded once for an address: a CUtensorMap is an address, a shape, strides and a box, so it holds for
whatever tensor lies there. No tensor is kept alive, and every cache is bounded.

Triton's C launcher is private to it: `ops/launch/versions.py` knows its form in each version. For one of another form
`prepare` returns None and the caller launches in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.runtime import driver

from expertile.ops.launch import versions
from expertile.ops.launch.blocks import Blocks


@dataclass(frozen=True, eq=False)
class Tensor:
    """How a tensor argument is described to TMA: shape, strides in elements, and the compiled kernel's box."""

    shape: list[int]
    strides: list[int]
    box: dict[str, Any]


@lru_cache(maxsize=4096)
def _encode(tensor: Tensor, address: int) -> tuple[Any, ...]:
    return versions.encode_descriptor(tensor.box, address, tensor.shape, tensor.strides)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled kernel, ready for one device."""

    queue: versions.Queue
    function: int
    boxes: tuple[Any, ...]
    stream_of: Callable[[int], int]
    current_device: Callable[[], int]

    def tensor(self, which: int, blocks: Blocks) -> Tensor:
        """The kernel's descriptor number `which`, of a tensor that TMA sees like that."""
        return Tensor(list(blocks.shape), list(blocks.strides), self.boxes[which])

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
        self.queue(programs, self.stream_of(device), (*described, *rest))


def prepare(kernel: Any, cluster: int = 1) -> Compiled | None:
    """`kernel`, a `triton.compile` result, loaded on the current device, to run in thread block clusters of `cluster`
    programs; None where it has to be launched by Triton."""
    queue = versions.launcher(kernel, cluster)
    if queue is None:
        return None
    active = driver.active
    boxes = versions.boxes(kernel)
    return Compiled(queue, kernel.function, boxes, active.get_current_stream, active.get_current_device)


def hooked() -> bool:
    """Whether a profiler hooks launches, which only Triton's own path shows."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
