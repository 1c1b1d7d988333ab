"""The layer for few tokens (decoding): nothing is put in order, and four small kernels follow closely on each other.

With T * k slots not many more than experts, hardly any expert has two rows, and time is that of reading the weights of
the experts touched once. What the general way adds to it is a launch for the permutation and one for combine, and
products in tiles of 64 rows, too few to fill the GPU. Here

    logits   x @ router^T, a program for an expert or a few of a token
    route    as ever, started early
    up       act[slot] = f(gate_up[e] @ x[t]): programs of some columns of a slot (or of an expert, all tokens at once)
    down     out[t] = sum over j of w[t, j] * down[e] @ act[t * k + j]: programs of some columns of a token; or y[slot]
             for some columns of an expert, and a kernel that sums them

Ways: "vector", a product of a matrix and a vector for each slot, an expert's weights read once for each of its slots;
"matrix", on tensor cores, read once for all. Kernels start before those that they wait for are done; `down` sends for
its weights to L2 before `up` is. Every sum is in one order: equal inputs give equal bits. Bytes beyond the weights:
T k I (act) and, the second way, 4 T k H (y).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from expertile.moe import _few_kernels as kernels
from expertile.ops._rows import PLAIN, on_kernels
from expertile.ops._rows_launch import launch, starts_early

MOST_TOKENS = 16
MOST_SLOTS = 128
_MOST_UNROLLED = 32
_MOST_OF_VECTORS = 3


@dataclass(frozen=True)
class Tiling:
    """One product's: the way, and how it is laid onto programs.

    matrix: the way. columns: outputs of a program. depth: summands read at a time. stages: reads in flight, and one."""

    matrix: bool
    columns: int
    depth: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class Config:
    """late: whether `down` starts only when `up` has read its weights. prefetch: whether it then sends for its own,
    before `up` is done."""

    up: Tiling
    down: Tiling
    prefetch: bool = True
    late: bool = False


def default_config(tokens: int) -> Config:
    """By the number of tokens alone: with more than a few, experts have several rows and are better read once."""
    if tokens <= _MOST_OF_VECTORS:
        return Config(Tiling(False, 8, 512, 4, 4), Tiling(False, 8, 512, 4, 4))
    return Config(Tiling(True, 32, 128, 4, 4), Tiling(True, 64, 64, 6, 4))


def serves(x: torch.Tensor, topk_ids: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Whether `mlp` takes these operands, and is likely faster than the general way."""
    tokens, top_k = topk_ids.shape
    return (
        0 < tokens <= MOST_TOKENS
        and top_k <= _MOST_UNROLLED
        and tokens * top_k <= MOST_SLOTS
        and x.dtype in (torch.bfloat16, torch.float16)
        and on_kernels(x)
        and all(w is None or w.is_contiguous() for w in weights)
        and 0 not in x.shape
    )


def logits(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, H] @ router [E, H] ^T (+ bias [E]) -> [T, E] in x's dtype."""
    (tokens, hidden), experts = x.shape, router.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty((tokens, experts))
    block_e = 1 if tokens * experts <= 512 else 2
    block_h = min(4096, triton.next_power_of_2(hidden))
    early = starts_early(x)
    launch(
        kernels.logits_kernel, tokens * -(-experts // block_e), (x, router, bias, out),
        (experts, hidden, x.stride(0)), (block_e, block_h, -(-hidden // block_h), early), num_warps=4, early=early,
    )  # fmt: skip
    return out


def reads_router(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `logits` takes these operands: few tokens, 16-bit, nothing to differentiate or to trace."""
    operands = [t for t in (x, router, bias) if t is not None]
    if torch.compiler.is_compiling() or any(type(t) not in PLAIN for t in operands):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return False
    if x.device.type == "meta" or torch.is_autocast_enabled(x.device.type):
        return False
    return (
        x.shape[0] <= MOST_TOKENS
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(t.dtype is x.dtype and t.device == x.device for t in operands)
        and router.is_contiguous()
        and on_kernels(x)
        and 0 not in (*x.shape, router.shape[0])
    )


def up(
    x: torch.Tensor, gate_up: torch.Tensor, topk_ids: torch.Tensor, bias: torch.Tensor | None, activation: str,
    interleaved: bool, tiling: Tiling, late: bool,
) -> torch.Tensor:  # fmt: skip
    """act [T * k, I]: of every slot; rows of dropped ones are not written."""
    tokens, top_k = topk_ids.shape
    experts, inner, hidden = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    act = x.new_empty((tokens * top_k, inner))
    early = starts_early(x)
    shape = (tiling.columns, tiling.depth, tiling.stages, hidden % tiling.depth == 0)
    launch(
        kernels.up_dot_kernel if tiling.matrix else kernels.up_kernel, tokens * top_k * -(-inner // tiling.columns),
        (x, gate_up, bias, topk_ids, act), (tokens * top_k, experts, hidden, inner, x.stride(0)),
        (*_rows(tokens, top_k, tiling.matrix), *shape, activation, interleaved, early, late),
        num_warps=tiling.num_warps, early=early,
    )  # fmt: skip
    return act


def down(
    act: torch.Tensor, weight: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
    bias: torch.Tensor | None, tiling: Tiling, prefetch: bool,
) -> torch.Tensor:  # fmt: skip
    """out [T, H] for act as `up` gives it. topk_ids must be older than the kernel queued before this call."""
    tokens, top_k = topk_ids.shape
    experts, hidden, inner = weight.shape
    out = act.new_empty((tokens, hidden))
    early = starts_early(act)
    # Runs of so many bytes, and starting there, as bulk prefetches take.
    prefetch = early and prefetch and inner % 8 == 0 and weight.data_ptr() % 16 == 0
    tiles = -(-hidden // tiling.columns)
    shape = (tiling.columns, tiling.depth, tiling.stages, inner % tiling.depth == 0)
    rows = _rows(tokens, top_k, tiling.matrix)
    if not tiling.matrix:
        launch(
            kernels.down_kernel, tokens * tiles, (act, weight, bias, topk_ids, topk_weights, out),
            (experts, inner, hidden), (*rows, *shape, -(-inner // tiling.depth), prefetch, early),
            num_warps=tiling.num_warps, early=early,
        )  # fmt: skip
        return out
    y = torch.empty((tokens * top_k, hidden), dtype=torch.float32, device=act.device)
    launch(
        kernels.down_dot_kernel, tokens * top_k * tiles, (act, weight, bias, topk_ids, y),
        (tokens * top_k, experts, inner, hidden), (*rows, *shape, prefetch, early), num_warps=tiling.num_warps,
        early=early,
    )  # fmt: skip
    block = min(512, triton.next_power_of_2(hidden))
    launch(
        kernels.sum_kernel, tokens * -(-hidden // block), (y, topk_ids, topk_weights, out), (experts, hidden),
        (top_k, block, early), num_warps=4, early=early,
    )  # fmt: skip
    return out


def _rows(tokens: int, top_k: int, matrix: bool) -> tuple[int, ...]:
    if not matrix:
        return (top_k,)
    return (
        top_k, max(MOST_SLOTS, triton.next_power_of_2(tokens * top_k)), max(16, triton.next_power_of_2(tokens))
    )  # fmt: skip


def mlp(
    x: torch.Tensor, gate_up: torch.Tensor, down_weight: torch.Tensor, topk_ids: torch.Tensor,
    topk_weights: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, activation: str,
    interleaved: bool, config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """out [T, H]; operands as checked by `moe_mlp`, and such as `serves` takes."""
    x = x if x.stride(1) == 1 else x.contiguous()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    c = config or default_config(topk_ids.shape[0])
    act = up(x, gate_up, topk_ids, gate_up_bias, activation, interleaved, c.up, c.late)
    return down(act, down_weight, topk_ids, topk_weights, down_bias, c.down, c.prefetch)
