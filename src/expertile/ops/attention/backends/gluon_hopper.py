"""gluon_hopper: our warp-specialised Gluon kernels for sm_90a (H100, H200); bf16 and fp16 with float32 accumulation.

Forward (`_hopper_forward`): O and LSE, any head dimension to 256 (padded to 64, 128 or 256 by TMA). Backward
(`_hopper_backward`): dK and dV, then dQ, head dimensions to 128, without atomics. Everything arrives and
leaves by TMA, whose boxes end where packed sequences end. Nothing is read on the host, so calls never synchronise and
graphs follow new lengths. docs/notes/attention.md says what limits them.
"""

import math
from functools import lru_cache, partial

import torch

from expertile.device import Device
from expertile.ops.attention.backend import Backend, Direction, Operands, Saved, lse_strides, new_lse
from expertile.ops.attention.backends import _statistics
from expertile.ops.attention.backends._hopper_backward import attention_backward_kernel
from expertile.ops.attention.backends._hopper_configs import (
    ROWS,
    BackwardConfig,
    ForwardConfig,
    PassConfig,
    backward_configs,
    forward_configs,
    padded_dim,
)
from expertile.ops.attention.backends._hopper_forward import ForwardShape, attention_forward_kernel
from expertile.ops.attention.backends._hopper_pass import PassShape
from expertile.ops.attention.backends._statistics import STAT_PAD
from expertile.ops.attention.problem import Problem, row_strides
from expertile.ops.hopper.context import options_of
from expertile.ops.hopper.limits import other_architecture
from expertile.ops.launch.blocks import Blocks
from expertile.ops.launch.launch import Launch

_LOG2E = math.log2(math.e)
_L2_SHARE = 0.5  # for the rows of heads whose tiles are worked on together
_WRAP = 0x40000000  # as in `hopper.tiles`
_OF_TWO_CONSUMERS, _OF_MORE = (240, 24), (160, 32)  # registers of a thread of a consumer and of the producer


def _supports(problem: Problem, device: Device, largest: int) -> str | None:
    p = problem
    if reason := other_architecture(device):
        return reason
    if p.head_dim > largest:
        return f"takes head dimensions to {largest}, not {p.head_dim}"
    if max(p.q_rows, p.k_rows) >= 2**30:
        return "reaches at most 2^30 rows"
    return p.not_in_words


def _rows_of_heads(p: Problem, strides: tuple[int, int, int], keys: bool, rows: int, dim: int) -> Blocks:
    """Boxes of `rows` rows of one head. Dense: coordinates (batch, head, row, 0).

    Packed: a window [first, end) of the rows that moves by coordinates alone, (_WRAP, end, _WRAP - (end - row), head,
    0) for row `row`; what lies past `end` is out of bounds. Two extra dimensions whose strides undo each other at 64
    bits do that (the scheme of triton.tools.ragged_tma).
    """
    batch, head, row = strides
    heads = p.kv_heads if keys else p.heads
    if p.packed:
        shape = (0x7FFF0000, 0x7FFF0000, _WRAP, heads, p.head_dim)
        return Blocks(shape, (2**34 - row, row, row, head, 1), (1, 1, rows, 1, dim))
    return Blocks((p.batch, heads, p.k_len if keys else p.q_len, p.head_dim), (batch, head, row, 1), (1, 1, rows, dim))


def _heads_in_l2(p: Problem, rows: int, device: Device) -> int:
    """How many heads' rows of two tensors fit in L2's share."""
    nbytes = max(1, rows * p.head_dim * p.dtype.itemsize * 2)
    return max(1, int(_L2_SHARE * device.l2_bytes / nbytes))


@lru_cache(maxsize=1024)
def _forward_launch(p: Problem, config: ForwardConfig, out_strides: tuple[int, int, int], device: Device) -> Launch:
    dim = padded_dim(p.head_dim)
    q = _rows_of_heads(p, p.q_strides, False, ROWS, dim)
    k = _rows_of_heads(p, p.k_strides, True, config.block_n, dim)
    v = _rows_of_heads(p, p.v_strides, True, config.block_n, dim)
    o = _rows_of_heads(p, out_strides, False, ROWS, dim)
    heads = p.batch * p.heads
    tiles = heads * -(-p.q_len // (ROWS * config.consumers))
    section = min(heads, _heads_in_l2(p, p.k_len, device) * p.group)
    numbers = (tiles, p.heads, p.group, heads, section, p.q_len, p.k_len, *lse_strides(p), p.scale * _LOG2E)
    queries = (config.consumers, ROWS, config.consumers * ROWS)
    shape = ForwardShape(p.causal, p.packed, dim, *queries, config.block_n, config.num_stages, config.q_slots)
    registers = _OF_TWO_CONSUMERS if config.consumers == 2 else _OF_MORE
    options = options_of(shape, config.consumers, registers)
    programs = min(tiles, device.sm_count) if config.persistent else tiles
    pointers = (torch.float32, torch.int32, torch.int32)
    return Launch(attention_forward_kernel, (q, k, v, o), (p.dtype,) * 4, pointers, numbers, options, programs)


def forward(problem: Problem, operands: Operands, config: ForwardConfig) -> tuple[torch.Tensor, torch.Tensor]:
    p = problem
    out, lse = torch.empty_like(operands.q), new_lse(p, operands.q)
    if not _storable(out):
        out = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    launch = _forward_launch(p, config, row_strides(out, p.packed), _device(operands.q))
    cu_q, cu_k = _lengths(operands, lse)
    launch.run(out.get_device(), (operands.q, operands.k, operands.v, out), (lse, cu_q, cu_k))
    return out, lse


@lru_cache(maxsize=1024)
def _pass_launch(
    p: Problem,
    config: PassConfig,
    dq: bool,
    do_strides: tuple[int, int, int],
    d_strides: tuple[tuple[int, int, int], ...],
    stats: tuple[int, int, int],
    device: Device,
) -> Launch:
    dim = padded_dim(p.head_dim)
    of_q = ((p.q_strides, False), (do_strides, False))
    of_k = ((p.k_strides, True), (p.v_strides, True))
    held, gone_over = (of_q, of_k) if dq else (of_k, of_q)
    tensors = [_rows_of_heads(p, strides, keys, ROWS, dim) for strides, keys in held]
    tensors += [_rows_of_heads(p, strides, keys, config.block, dim) for strides, keys in gone_over]
    tensors += [_rows_of_heads(p, strides, not dq, ROWS, dim) for strides in d_strides]
    tensors += [Blocks((stats[0],), (1,), (config.block,))] * 2
    heads = p.batch * (p.heads if dq else p.kv_heads)
    tiles = heads * -(-(p.q_len if dq else p.k_len) // (2 * ROWS))
    section = _heads_in_l2(p, p.k_len, device) * p.group if dq else _heads_in_l2(p, p.q_len * p.group, device)
    sizes = (tiles, p.heads, p.group, heads, min(heads, section), p.q_len, p.k_len)
    numbers = (*sizes, *stats[1:], p.scale, p.scale * _LOG2E)
    blocks = (config.block, config.num_stages, config.slots, config.ahead)
    shape = PassShape(dq, p.causal, p.packed, dim, 2, ROWS, 2 * ROWS, *blocks, STAT_PAD)
    options = options_of(shape, 2, _OF_TWO_CONSUMERS)
    programs = min(tiles, device.sm_count) if config.persistent else tiles
    dtypes, pointers = (p.dtype,) * 6 + (torch.float32,) * 2, (torch.float32, torch.float32, torch.int32, torch.int32)
    return Launch(attention_backward_kernel, tuple(tensors), dtypes, pointers, numbers, options, programs)


def backward(
    problem: Problem, operands: Operands, saved: Saved, config: BackwardConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dout = saved.dout if _storable(saved.dout) else saved.dout.contiguous()
    stats = _statistics.compute(problem, operands, Saved(saved.out, saved.lse, dout, saved.dlse))
    grads = (torch.empty_like(x) for x in (operands.q, operands.k, operands.v))
    dq, dk, dv = (x if _storable(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in grads)
    run_pass(problem, operands, dout, stats, config.dkdv, dk, dv)
    run_pass(problem, operands, dout, stats, config.dq, dq)
    return dq, dk, dv


def run_pass(
    problem: Problem,
    operands: Operands,
    dout: torch.Tensor,
    stats: _statistics.Statistics,
    config: PassConfig,
    *grads: torch.Tensor,
) -> None:
    """One of the backward's two kernels: writes (dk, dv), or (dq,)."""
    dq = len(grads) == 1
    of_q, of_k = (operands.q, dout), (operands.k, operands.v)
    both = grads * 2 if dq else grads
    tensors = (*(of_q + of_k if dq else of_k + of_q), *both, stats.nlse, stats.ndelta)
    strides = [row_strides(x, problem.packed) for x in (dout, *both)]
    shape = (stats.nlse.numel(), stats.stride_b, stats.stride_h)
    device = _device(operands.q)
    launch = _pass_launch(problem, config, dq, strides[0], tuple(strides[1:]), shape, device)
    pointers = (stats.nlse, stats.ndelta, *_lengths(operands, stats.nlse))
    launch.run(operands.q.get_device(), tensors, pointers)


def _lengths(operands: Operands, instead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cu_seqlens, or anything of their kind where sequences are not packed and nothing is read."""
    if operands.cu_seqlens_q is not None and operands.cu_seqlens_k is not None:
        return operands.cu_seqlens_q, operands.cu_seqlens_k
    other = instead.view(torch.int32)
    return other, other


def _storable(x: torch.Tensor) -> bool:
    """Whether TMA reaches every row: 16-byte strides, all positive, and a contiguous last dimension."""
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s * x.itemsize % 16 == 0 for s in strides)


def _device(x: torch.Tensor) -> Device:
    # On the CPU nothing runs; kernels are compiled there, for the tests.
    return Device.current(x.device) if x.is_cuda else Device.by_name("h200")


BACKEND = Backend(
    name="gluon_hopper",
    summary="Gluon, TMA and warp-specialised wgmma, softmax beside the products (sm_90a)",
    forward=Direction(partial(_supports, largest=256), forward_configs, forward),
    backward=Direction(partial(_supports, largest=128), backward_configs, backward),
)
