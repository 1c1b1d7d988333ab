"""Programmatic dependent launch: a kernel that is launched before the one ahead of it is done."""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertile.device import Device
from expertile.ops.launch.device import wants_pdl


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait until the kernels before this one are done; then the kernel after it may start, and waits likewise."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def pdl_options(device: int, smem_bytes: int, problem: Any) -> dict[str, Any]:
    """Options of a kernel that begins with `begin(PDL)`, takes `smem_bytes` a program and computes `problem`: PDL on
    compute capability 9.0 and later, for few FLOPs (`wants_pdl`), where a program leaves no room for another on its
    multiprocessor. Else programs of the next kernel go to the multiprocessors that are idle first, as many as fit, and
    a persistent kernel's tiles are shared out unevenly (docs/notes/moe.md)."""
    machine = Device.current(f"cuda:{device}") if device >= 0 else None
    alone = machine is not None and machine.at_least(9) and 2 * smem_bytes > machine.smem_bytes
    pdl = alone and wants_pdl(problem)
    return {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})
