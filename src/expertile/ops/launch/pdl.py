"""Programmatic dependent launch: a kernel that is launched before the one ahead of it is done."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertile.device import Device


@triton.jit
def begin(EARLY: tl.constexpr):
    """Until the kernels before this one are done; then the one after it may start, to wait in its turn."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early_options(device: int, smem_bytes: int) -> dict[str, Any]:
    """Options of a kernel that starts by `begin(EARLY)` and takes `smem_bytes` a program: early on compute capability
    9.0 and later.

    Only where a program leaves no room for another on its multiprocessor. Programs that come early go to those that are
    the first to fall idle, as many as fit; of a persistent kernel these then have more than their share of tiles, and
    the others less. (H200: layers of Qwen3 and gpt-oss with few tokens took 3 and 7 % longer with `triton_pointer`
    early, two or three of whose programs fit; with `triton_tma`, of which one does, 262 us instead of 267.)"""
    machine = Device.current(f"cuda:{device}") if device >= 0 else None
    early = machine is not None and machine.at_least(9) and 2 * smem_bytes > machine.smem_bytes
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})
