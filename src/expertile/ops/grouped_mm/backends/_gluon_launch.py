"""Host side of the `gluon_hopper` backend: TMA descriptors of one problem, and the launch."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends._gluon_kernel import grouped_mm_kernel
from expertile.ops.grouped_mm.problem import Layout, Problem

_WRAP = 0x40000000


def _descriptor(base: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    layout = NVMMASharedLayout(128, base.element_size() * 8, len(box))
    return TensorDescriptor(base, shape, strides, box, layout)


def _ragged(base: torch.Tensor, inner: int, stride: int, box: list[int]) -> TensorDescriptor:
    """Rows of `inner` elements, `stride` apart, with a window [first, end) that moves by coordinates alone:
    (_WRAP, end, _WRAP - (end - row), column) reaches row `row`, and what lies past `end` is out of bounds
    (the scheme of triton.tools.ragged_tma: addresses wrap around at 2**64)."""
    return _descriptor(base, [0x7FFF0000, 0x7FFF0000, _WRAP, inner], [2**34 - stride, stride, stride, 1], [1, 1, *box])


def arguments(p: Problem, operands: Operands, config: Any, out: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `grouped_mm_kernel`."""
    a, b = operands.a, operands.b
    rows, bn, bk = config.rows, config.block_n, config.block_k
    part_n = bn // config.store_parts
    a_k_major = p.layout is not Layout.RAGGED_K and a.stride(-1) == 1
    b_k_major = p.layout is not Layout.RAGGED_K and b.stride(-2) == 1
    if p.layout is Layout.RAGGED_K:
        a_desc = _ragged(a, p.m, a.stride(1), [bk, rows])
        b_desc = _ragged(b, p.n, b.stride(0), [bk, bn])
    else:
        if p.layout is Layout.BATCHED:
            at = a if a_k_major else a.transpose(1, 2)
            a_desc = _descriptor(a, list(at.shape), list(at.stride()), [1, rows, bk] if a_k_major else [1, bk, rows])
        else:
            at = a if a_k_major else a.t()
            a_desc = _descriptor(a, list(at.shape), list(at.stride()), [rows, bk] if a_k_major else [bk, rows])
        bt = b.transpose(1, 2) if b_k_major else b
        b_desc = _descriptor(b, list(bt.shape), list(bt.stride()), [1, bn, bk] if b_k_major else [1, bk, bn])
    if p.layout is Layout.RAGGED_M:
        c_desc = _ragged(out, p.n, out.stride(0), [rows, part_n])
    else:
        c_desc = _descriptor(out, list(out.shape), list(out.stride()), [1, rows, part_n])
    offs = operands.offs if operands.offs is not None else out
    bias = operands.bias if operands.bias is not None else out
    warps = config.num_warps * config.consumers + 1
    options = {
        "LAYOUT": p.layout.value,
        "A_K_MAJOR": a_k_major,
        "B_K_MAJOR": b_k_major,
        "HAS_BIAS": operands.bias is not None,
        "GROUPS_POW2": max(32, 1 << (p.groups - 1).bit_length()),
        "CONSUMERS": config.consumers,
        "ROWS": rows,
        "BLOCK_M": config.block_m,
        "BLOCK_N": bn,
        "BLOCK_K": bk,
        "STAGES": config.num_stages,
        "GROUP_M": config.group_m,
        "C_PARTS": config.store_parts,
        "C_SLOTS": config.store_slots,
        "CONSUMER_REGS": 240,
        "PRODUCER_REGS": 40,
        "num_warps": config.num_warps,
        # Warps come in fours; the register file holds 65536.
        "maxnreg": min(65536 // (-(-warps // 4) * 4 * 32) // 8 * 8, 248),
    }
    return (a_desc, b_desc, c_desc, offs, bias, p.groups, p.m, p.n, p.k), options


def launch(p: Problem, operands: Operands, config: Any, out: torch.Tensor) -> None:
    args, options = arguments(p, operands, config, out)
    grouped_mm_kernel[(Device.current(out.device).sm_count,)](*args, **options)
