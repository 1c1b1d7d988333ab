"""Host side of the `gluon_gather` backend: TMA descriptors of one problem, and the launch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.gathered_mm.backend import Operands, Outputs
from expertile.ops.gathered_mm.backends._gluon_kernel import Shape, gathered_mm_kernel
from expertile.ops.gathered_mm.pointwise import add_row_sums
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.grouped_mm.backend import Pair
from expertile.ops.launch.blocks import Blocks, ragged
from expertile.ops.launch.device import torch_device
from expertile.ops.launch.launch import Launch, tile_counter
from expertile.ops.launch.versions import FP_FUSION
from expertile.ragged import power_of_two

_VECTOR = 8  # elements of a 16-byte copy


def _ragged_halves(inner: int, stride: int, box: tuple[int, int]) -> Blocks:
    """`ragged` rows of two halves of `inner` columns each: a box lies in one half, and ends where that ends."""
    rows = ragged(inner, stride, box)
    return Blocks((*rows.shape[:3], 2, inner), (*rows.strides[:3], inner, 1), (1, 1, box[0], 1, box[1]))


def _halved(p: GatherProblem) -> bool:
    """Whether a tile of an up-projection has gate columns to the left and up columns to the right. Where K is
    contiguous in b, TMA brings them so from either order of the rows."""
    return p.product is Product.GATED and (p.b_strides[1] == 1 or not p.interleaved)


def _weights(p: GatherProblem, config: Any) -> Blocks:
    expert, k, n = p.b_strides
    bn, bk = config.block_n, config.block_k
    if _halved(p):
        half, step = (n, 2 * n) if p.interleaved else (p.n // 2 * n, n)
        return Blocks((p.groups, 2, p.n // 2, p.k), (expert, half, step, 1), (1, 2, bn // 2, bk))
    if k == 1:
        return Blocks((p.groups, p.n, p.k), (expert, n, 1), (1, bn, bk))
    return Blocks((p.groups, p.k, p.n), (expert, k, 1), (1, bk, bn))


def _of_rank(p: GatherProblem, rank: int) -> tuple[int, ...]:
    """Strides of the second pair's b [E, rank, N], laid out as b is."""
    return (p.n * rank, 1, rank) if p.b_strides[1] == 1 else (p.n * rank, p.n, 1)


@lru_cache(maxsize=1024)
def _launch(p: GatherProblem, config: Any, bias_dtype: torch.dtype, device: int, rank: int = 0) -> Launch:
    """The launch of `gathered_mm_kernel` on GPU number `device` for this problem, with a second pair of operands of
    `rank` columns."""
    gated, backward, gathered = p.product is Product.GATED, p.product is Product.BACKWARD, p.gathered != ""
    box = (config.rows, config.block_n // 2 // config.store_parts)
    rows = p.tokens if gathered else p.m
    inner = p.intermediate
    more_a = more_b = None
    more = -(-rank // config.block_k)
    a = Blocks((rows, p.k), (p.a_strides[0], 1), (config.block_m, config.block_k))
    b = _weights(p, config)
    if rank:
        more_a = Blocks((p.m, rank), (rank, 1), a.box)
        more_b = _weights(replace(p, k=rank, b_strides=_of_rank(p, rank)), config)
    out = pre = ragged(inner, inner, box)
    if backward or (gated and p.save_pre):
        pre = ragged(2 * inner, 2 * inner, box) if p.interleaved else _ragged_halves(inner, 2 * inner, box)
    shape = Shape(
        LAYOUT="ragged_m",
        PRODUCT=p.product.value,
        ACTIVATION=p.activation,
        INTERLEAVED=p.interleaved,
        HALVED=_halved(p),
        SAVE_PRE=p.save_pre,
        GATHERED=p.gathered,
        B_K_MAJOR=p.b_strides[1] == 1,
        HAS_BIAS=p.has_bias,
        GROUPS_POW2=power_of_two(p.groups, 32),
        BLOCK_M=config.block_m,
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        GROUP_M=config.group_m,
        C_PARTS=config.store_parts,
        C_SLOTS=config.store_slots,
        DYNAMIC=config.dynamic,
        FENCED=config.fenced,
        MASKED=config.masked,
        MORE=more,
    )
    options = {
        "SHAPE": shape,
        # Three times four warps share 65536 registers, 168 a thread; the first consumer gets what the others leave.
        "CONSUMER_REGS": 208 if gathered else 232,
        "PRODUCER_REGS": 88 if gathered else 40,
        "num_warps": 4,
        **FP_FUSION,
        "maxnreg": 168,
        # Worth its while for few rows, where the launch is a good part of the time (`launch.device.starts_early`).
        "launch_pdl": config.masked,
    }
    i32 = torch.int32
    f32 = torch.float32 if backward else p.dtype
    return Launch(
        gathered_mm_kernel,
        (a, b, out, pre, pre, more_a, more_b),
        (p.dtype,) * 7,
        (p.dtype, i32, i32, bias_dtype, i32, f32, f32, i32),
        (p.groups, p.m, p.n, p.k + more * config.block_k, p.a_strides[0] // _VECTOR),
        tuple(options.items()),
        Device.current(torch_device(device)).sm_count,
    )


def prepared(
    p: GatherProblem,
    operands: Operands,
    config: Any,
    outputs: Outputs,
    sums: torch.Tensor | None = None,
    more: Pair | None = None,
) -> tuple[Launch, int, tuple[Any, ...], tuple[Any, ...]]:
    """The launch, and what it runs with: the device, the tensors of its descriptors, and those of its pointers (any
    others for what is absent).

    `sums` [tiles across, R] float32, for BACKWARD: row sums of every column of tiles. `more`: `gluon_gather.run`'s."""
    o, device = operands, operands.a.get_device()
    rank, pair = (0, (o.a, o.b)) if more is None else (more[0].shape[1], more)
    launch = _launch(p, config, p.dtype if o.bias is None else o.bias.dtype, device, rank)
    rows, bias = o.offs if o.rows is None else o.rows, o.a if o.bias is None else o.bias
    counter = tile_counter(config.dynamic, o.offs)
    if p.product is Product.BACKWARD:
        dpre, act_w, _ = outputs
        pointers = (o.a, rows, o.offs, bias, o.slots, o.weights, sums, counter)
        return launch, device, (o.a, o.b, act_w, o.pre, dpre, *pair), pointers
    out, pre = (*outputs, None)[:2]
    pre = out if pre is None else pre
    return launch, device, (o.a, o.b, out, pre, pre, *pair), (o.a, rows, o.offs, bias, o.offs, out, out, counter)


def row_sums(p: GatherProblem, config: Any, like: torch.Tensor) -> torch.Tensor:
    """Room for the row sums of every column of tiles."""
    return like.new_empty((-(-p.n // config.block_n), p.m), dtype=torch.float32)


def run(p: GatherProblem, operands: Operands, config: Any, outputs: Outputs, more: Pair | None = None) -> None:
    """Queue the kernel on the current stream of the operands' device, and for BACKWARD the sum of its row sums.

    `more`: see `gluon_gather.run`."""
    sums = row_sums(p, config, operands.a) if p.product is Product.BACKWARD else None
    launch, device, tensors, pointers = prepared(p, operands, config, outputs, sums, more)
    launch.run(device, tensors, pointers)
    if sums is not None:
        assert operands.slots is not None
        add_row_sums(sums, operands.slots, operands.offs, outputs[2])
