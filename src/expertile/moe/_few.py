"""The layer for few tokens (decoding): nothing is put in order, and four small kernels follow closely on each other.

With T * k slots far below the number of experts, time is that of reading the weights of the experts touched once. Here

    logits   x @ router^T, a program for an expert or two of a token
    route    as ever, with PDL
    up       act[slot] = f(gate_up[e] @ x[t]), a program for some columns of a slot
    down     out[t] = sum over j of w[t, j] * down[e] @ act[t * k + j], a program for some columns of a token

Each is a product of a matrix and a vector. On compute capability 9.0 a kernel starts before the one before it is done
and waits on the device; `down` only when `up` has read its weights. Every sum is in one order: equal inputs give equal
bits. docs/notes/moe.md ("Decode: few tokens") has the times against the general way, and what was tried.
"""

from typing import Any, NamedTuple

import torch

from expertile.moe import _few_kernels as kernels
from expertile.ops.launch.device import on_kernels, supports_pdl
from expertile.ops.launch.kernels import launch
from expertile.ops.torch_op import traced
from expertile.ragged import power_of_two

MOST_TOKENS = 4  # from eight on the general way is as fast (H200, three models)
# Of the router alone, whose product rereads its weights for each token: so many tokens, and so many multiplications.
MOST_ROUTED = 16
_MOST_PRODUCTS = 2**23
_MOST_UNROLLED = 32


class Tiling(NamedTuple):
    """columns: outputs of a program. depth: summands read at a time. stages: reads in flight, and one."""

    columns: int
    depth: int
    stages: int
    num_warps: int


def tilings(tokens: int, inner: int) -> tuple[Tiling, Tiling]:
    """Of `up` and `down`. One token with a small intermediate size has too few columns to fill the GPU by 16s."""
    down = Tiling(8, 256, 8, 2) if tokens == 1 and inner < 1024 else Tiling(16, 512, 4, 8)
    return Tiling(8, 512, 4, 4), down


def serves(x: torch.Tensor, topk_ids: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Whether `mlp` takes these operands, and is likely faster than the general way."""
    tokens, top_k = topk_ids.shape
    return (
        0 < tokens <= MOST_TOKENS
        and top_k <= _MOST_UNROLLED
        and x.dtype in (torch.bfloat16, torch.float16)
        and on_kernels(x)
        and all(w is None or w.is_contiguous() for w in weights)
        and 0 not in x.shape
    )


def reads_router(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `logits` takes these operands: few tokens, 16-bit, nothing to differentiate or to trace."""
    if traced(x) or x.shape[0] > MOST_ROUTED or x.shape[0] * router.numel() > _MOST_PRODUCTS or not on_kernels(x):
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(x.device.type):
        return False
    differentiated = torch.is_grad_enabled()
    for t in (x, router) if bias is None else (x, router, bias):
        if traced(t) or (differentiated and t.requires_grad) or t.dtype is not x.dtype or t.device != x.device:
            return False
    return router.is_contiguous() and x.numel() > 0 and router.numel() > 0


def logits(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, H] @ router [E, H] ^T (+ bias [E]) -> [T, E] in x's dtype."""
    (tokens, hidden), experts = x.shape, router.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty((tokens, experts))
    block_e = 1 if tokens * experts <= 512 else 2
    block_h = min(4096, power_of_two(hidden))
    pdl = supports_pdl(x)
    tensors, scalars = (x, router, bias, out), (experts, hidden, x.stride(0))
    constants = (block_e, block_h, -(-hidden // block_h), pdl)
    launch(kernels.logits_kernel, tokens * -(-experts // block_e), tensors, scalars, constants, num_warps=4, pdl=pdl)
    return out


def mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    interleaved: bool,
) -> torch.Tensor:
    """out [T, H]; operands as checked by `moe_mlp`, and such as `serves` takes."""
    x = x if x.stride(1) == 1 else x.contiguous()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    (tokens, top_k), (experts, hidden, inner) = topk_ids.shape, down.shape
    # Rows of dropped slots are neither written nor read.
    act, out = x.new_empty((tokens * top_k, inner)), x.new_empty((tokens, hidden))
    pdl = supports_pdl(x)
    tile, last = tilings(tokens, inner)
    tensors: Any = (x, gate_up, gate_up_bias, topk_ids, act)
    scalars: Any = (experts, hidden, inner, x.stride(0))
    constants: Any = (top_k, *tile[:3], hidden % tile.depth == 0, activation, interleaved, pdl)
    programs = tokens * top_k * -(-inner // tile.columns)
    launch(kernels.up_kernel, programs, tensors, scalars, constants, num_warps=tile.num_warps, pdl=pdl)
    tensors, scalars = (act, down, down_bias, topk_ids, topk_weights, out), (experts, inner, hidden)
    constants = (top_k, *last[:3], inner % last.depth == 0, -(-inner // last.depth), pdl)
    programs = tokens * -(-hidden // last.columns)
    launch(kernels.down_kernel, programs, tensors, scalars, constants, num_warps=last.num_warps, pdl=pdl)
    return out
