"""One launch of a Gluon kernel of any operator, described in full: compiled once for its description, then queued by
the driver's launch alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from expertile.ops.launch import driver
from expertile.ops.launch.blocks import Blocks, compiled
from expertile.ops.launch.device import current_device


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, descriptors of its first arguments, dtypes of its pointers, numbers, options."""

    kernel: Any
    tensors: tuple[Blocks, ...]
    tensor_dtypes: tuple[torch.dtype, ...]
    pointer_dtypes: tuple[torch.dtype, ...]
    numbers: tuple[int | float, ...]
    options: tuple[tuple[str, Any], ...]
    programs: int

    def arguments(self, tensors: tuple[torch.Tensor, ...], pointers: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """What Triton's own launcher takes."""
        return (*(b.of(t) for b, t in zip(self.tensors, tensors, strict=True)), *pointers, *self.numbers)


@dataclass(frozen=True, eq=False)
class _Ready:
    kernel: driver.Compiled
    tensors: tuple[driver.Tensor, ...]
    rest: tuple[Any, ...]


@lru_cache(maxsize=1024)
def _ready(launch: Launch, device: int) -> _Ready | None:
    # Integers and floats are not specialised on, so any serve to compile with.
    numbers = tuple(2 if isinstance(n, int) else 0.5 for n in launch.numbers)
    forms = tuple(b.form for b in launch.tensors)
    dtypes = (*launch.tensor_dtypes, *launch.pointer_dtypes)
    kernel = compiled(launch.kernel, forms, dtypes, numbers, launch.options, device)
    if kernel is None:
        return None
    tensors = tuple(kernel.tensor(i, list(b.shape), list(b.strides)) for i, b in enumerate(launch.tensors))
    known = len(launch.tensors) + len(launch.pointer_dtypes) + len(launch.numbers)
    return _Ready(kernel, tensors, (*launch.numbers, *(None,) * (len(launch.kernel.arg_names) - known)))


def run(launch: Launch, tensors: tuple[torch.Tensor, ...], pointers: tuple[torch.Tensor, ...]) -> None:
    """Queue the kernel on the current stream of its tensors' device."""
    device = tensors[0].get_device()
    ready = _ready(launch, device) if device >= 0 and not driver.hooked() else None
    if ready is None:
        with current_device(tensors[0].device):
            launch.kernel[(launch.programs,)](*launch.arguments(tensors, pointers), **dict(launch.options))
        return
    addressed = tuple((r, t.data_ptr()) for r, t in zip(ready.tensors, tensors, strict=True))
    ready.kernel(device, launch.programs, addressed, (*(t.data_ptr() for t in pointers), *ready.rest))
