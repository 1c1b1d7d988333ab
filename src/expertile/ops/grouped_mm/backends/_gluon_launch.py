"""Host side of the `gluon_hopper` backend: TMA descriptors of one problem, and the launch."""

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands, Pair
from expertile.ops.grouped_mm.backends._gluon_kernel import Shape, grouped_mm_kernel
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.hopper.context import options_of, shape_of
from expertile.ops.launch.blocks import Blocks, matrix, ragged
from expertile.ops.launch.counter import tile_counter
from expertile.ops.launch.device import torch_device, wants_pdl
from expertile.ops.launch.launch import Launch


@lru_cache(maxsize=1024)
def _launch(
    p: Problem,
    config: Any,
    out_strides: tuple[int, ...],
    bias_dtype: torch.dtype | None,
    device: int,
    add: bool = False,
    rank: int = 0,
) -> Launch:
    """The launch of `grouped_mm_kernel` on GPU number `device` for this problem and an output of those strides, with
    `add` to add to that, and with a second pair of operands of `rank` columns."""
    rows, bn, bk = config.rows, config.block_n, config.block_k
    part_n = bn // config.store_parts
    a_k_major = p.layout is not Layout.RAGGED_K and p.a_strides[-1] == 1
    b_k_major = p.layout is not Layout.RAGGED_K and p.b_strides[-2] == 1
    lead = (p.groups,)
    box = config.box if p.layout is Layout.RAGGED_M and a_k_major else rows
    if p.layout is Layout.RAGGED_K:
        a = ragged(p.m, p.a_strides[1], (bk, rows))
        b = ragged(p.n, p.b_strides[0], (bk, bn))
    else:
        a_shape = (p.m, p.k) if len(p.a_strides) == 2 else (*lead, p.m, p.k)
        a = matrix(a_shape, p.a_strides, (box, bk), not a_k_major)
        b = matrix((*lead, p.k, p.n), p.b_strides, (bk, bn), b_k_major)
    more_a = more_b = None
    more = -(-rank // bk)
    if rank:
        more_a = matrix((p.m, rank), (rank, 1), (box, bk))
        strides = (p.n * rank, *((1, rank) if b_k_major else (p.n, 1)))
        more_b = matrix((*lead, rank, p.n), strides, (bk, bn), b_k_major)
    if p.layout is Layout.RAGGED_M:
        c = ragged(p.n, out_strides[0], (rows, part_n))
    else:
        c = Blocks((*lead, p.m, p.n), out_strides, (1, rows, part_n))
    shape = shape_of(
        Shape, config, p, LAYOUT=p.layout.value, A_K_MAJOR=a_k_major, B_K_MAJOR=b_k_major, A_BOX=box, ADD=add, MORE=more
    )
    options = options_of(shape, config.consumers, (232, 40), config.num_warps, wants_pdl(p))
    dtypes = (p.dtype, p.dtype, p.out_dtype, p.dtype, p.dtype)
    pointers = (p.out_dtype if p.layout is Layout.BATCHED else torch.int32, bias_dtype or p.out_dtype, torch.int32)
    numbers, programs = (p.groups, p.m, p.n, p.k + more * bk), Device.current(torch_device(device)).sm_count
    return Launch(grouped_mm_kernel, (a, b, c, more_a, more_b), dtypes, pointers, numbers, options, programs)


def prepared(
    p: Problem, operands: Operands, config: Any, out: torch.Tensor, add: bool = False, more: Pair | None = None
) -> tuple[Launch, int, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The launch, and what it runs with: the device, the tensors of its descriptors, and those of its pointers (`out`
    for what is absent). `more`: see `gluon_hopper.run`."""
    offs, bias, device = operands.offs, operands.bias, out.get_device()
    rank, pair = (0, (operands.a, operands.b)) if more is None else (more[0].shape[1], more)
    launch = _launch(p, config, out.stride(), None if bias is None else bias.dtype, device, add, rank)
    pointers = (out if offs is None else offs, out if bias is None else bias, tile_counter(config.dynamic, out))
    return launch, device, (operands.a, operands.b, out, *pair), pointers
