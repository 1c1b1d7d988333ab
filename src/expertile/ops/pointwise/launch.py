"""What `elementwise` and `stencil` share: which tensors they take, and a launch that costs the host little.

A pointwise kernel of a small tensor runs for two microseconds, Triton's own launch for several times as long. These
kernels specialize on none of their numbers, so one compiled kernel serves every shape: it is looked up by what decides
its code, and queued by the C function that Triton generated for it (`launch/launch.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from expertile.ops.launch import launch
from expertile.ops.launch.device import DTYPES, current_device
from expertile.ops.launch.launch import Compiled, compiled, pointer
from expertile.ops.launch.versions import FP_FUSION

VECTOR_BYTES = 16  # the widest load of one thread


def check_tensor(name: str, x: object, least_dims: int = 0) -> None:
    """TypeError or ValueError unless `x` is a tensor that these operators take."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES and not (x.dtype is torch.float64 and x.device.type == "cpu"):
        raise ValueError(f"{name}: expected float32, bfloat16 or float16 (on a CPU also float64), got {x.dtype}")
    if x.dim() < least_dims:
        raise ValueError(f"{name}: expected {least_dims} dimensions or more, got shape {list(x.shape)}")


@lru_cache(maxsize=512)
def _compiled(
    kernel: JITFunction,
    dtype: torch.dtype,
    aligned: bool,
    numbers: int,
    constants: tuple[Any, ...],
    num_warps: int,
    device: int,
) -> Compiled | None:
    named = zip(kernel.arg_names[2 + numbers :], constants, strict=True)
    options = (*named, ("num_warps", num_warps), *FP_FUSION.items())
    return compiled(kernel, (), (pointer(dtype, aligned),) * 2, (0,) * numbers, options, device)


def queue(
    kernel: JITFunction,
    x: torch.Tensor,
    out: torch.Tensor,
    aligned: bool,
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    programs: int,
) -> None:
    """Run `programs` programs of `kernel(x, out, *numbers, *constants)` on the current stream of x's device.

    `aligned`: both addresses are multiples of 16, and the code may count on it. The kernel must not specialize on
    `numbers`.
    """
    device = x.get_device()
    if device >= 0 and not launch.hooked():
        ready = _compiled(kernel, x.dtype, aligned, len(numbers), constants, num_warps, device)
        if ready is not None:
            ready(device, programs, (), (x.data_ptr(), out.data_ptr(), *numbers, *constants))
            return
    with current_device(x.device):
        kernel[(programs,)](x, out, *numbers, *constants, num_warps=num_warps, **FP_FUSION)
