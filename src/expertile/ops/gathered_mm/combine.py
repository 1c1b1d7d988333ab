"""combine: each token's rows, weighted and summed. out[t] = Σ_j weights[t, j] · y[positions[t, j]].

y [R, H], positions [T, k] int32 (the row of slot (t, j); -1: dropped, and skipped), weights [T, k] float32 or None
(ones). The sum is formed in float32 in the order of j and rounded once; every output is written by one program, so
there are no atomics, and the same bits every time. Bytes: the kept rows of y once, out once and 8 T k of indices and
weights: (T k + T) · H · itemsize, against 2 T k H FLOPs, so memory limits it.

Backward, for row r = positions[t, j]: dy[r] = w dout[t], dweights[t, j] = <dout[t], y[r]>, and dy = 0 in rows that no
slot has. positions is inverted first, so that again every row is written by one program: y and dout read, dy written.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertile.ops.checks import check_dims, check_like, require_tensors
from expertile.ops.gathered_mm.pointwise import column_block
from expertile.ops.launch.device import FORMULA_DTYPES, on_kernels, supports_pdl, wide, wide_dtype
from expertile.ops.launch.kernels import launch
from expertile.ops.launch.pdl import begin
from expertile.ops.torch_op import define, differentiable_eagerly, gradients_of, traced


def _program(cols: int, itemsize: int, tokens: int, top_k: int) -> tuple[int, int, int]:
    """(columns, warps, tokens) of a program. One 16-byte load a thread for each of a token's rows: k of them are in
    flight at a time. Where k is small, a program takes several of many tokens with narrow rows: a multiprocessor holds
    32 programs, whose single warps would be half of those that it has room for."""
    block = column_block(cols, 8192 // itemsize // 4)
    warps = max(1, min(8, block * itemsize // 512))
    together = max(1, 4 // warps) if tokens >= _MANY_TOKENS and top_k <= _FEW_ROWS else 1
    return block, warps * together, together


_FEW_ROWS = 4  # at 8, 4 KB of a warp's loads are on their way already, and sums of four tokens take 6 % longer
_MANY_TOKENS = 4096  # enough for some programs of four on each multiprocessor
_MOST_UNROLLED = 32
# Bytes of y up to which the kernel starts before the product that writes y is done. It saves 1 to 2 us; but where much
# is to be read it then reads at half the speed (docs/notes/grouped_mm.md, "Gathered products").
_PDL_NBYTES = 2**24


@triton.jit(do_not_specialize=["tokens", "y_stride"])
def _combine_kernel(
    y_ptr,
    positions_ptr,
    weights_ptr,
    out_ptr,
    tokens,
    H,
    y_stride,
    UNIT: tl.constexpr,
    TOP_K: tl.constexpr,
    UNROLL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK columns of TOKENS tokens. y_stride is in units of UNIT elements."""
    begin(PDL)
    chunks = tl.cdiv(H, BLOCK)
    token = tl.program_id(0) // chunks * TOKENS + tl.arange(0, TOKENS)
    col = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    acc = tl.zeros((TOKENS, BLOCK), tl.float32)
    # Unrolled, all of a token's loads are on their way at once.
    if UNROLL:
        for j in tl.static_range(TOP_K):
            acc = _add_row(
                acc, y_ptr, positions_ptr, weights_ptr, token * TOP_K + j, there, col, H, y_stride, UNIT, EVEN
            )
    else:
        for j in range(TOP_K):
            acc = _add_row(
                acc, y_ptr, positions_ptr, weights_ptr, token * TOP_K + j, there, col, H, y_stride, UNIT, EVEN
            )
    inside = there[:, None] if EVEN else there[:, None] & (col < H)[None, :]
    target = out_ptr + token.to(tl.int64)[:, None] * H + col[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_row(
    acc, y_ptr, positions_ptr, weights_ptr, slot, there, col, H, y_stride, UNIT: tl.constexpr, EVEN: tl.constexpr
):
    """acc + the rows of the slots, one of each token, weighted."""
    position = tl.load(positions_ptr + slot, mask=there, other=-1)
    kept = position >= 0
    inside = kept[:, None] if EVEN else kept[:, None] & (col < H)[None, :]
    start = position.to(tl.int64)[:, None] * y_stride * UNIT
    row = tl.load(y_ptr + start + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if weights_ptr is not None:
        # A dropped slot's weight may be anything: infinity times 0 is no zero.
        row *= tl.load(weights_ptr + slot, mask=kept, other=0.0)[:, None]
    return acc + row


@triton.jit
def _backward_kernel(tensors, scalars, TOP_K: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """One program for a row of y."""
    grad_ptr, y_ptr, slot_of_ptr, weights_ptr, dy_ptr, dweights_ptr = tensors
    H, grad_stride, y_stride = scalars
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of_ptr + row)
    kept = slot >= 0
    token = tl.maximum(slot, 0).to(tl.int64) // TOP_K
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + slot, mask=kept, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = kept if EVEN else (col < H) & kept
        grad = tl.load(grad_ptr + token * grad_stride + col, mask=inside, other=0.0).to(tl.float32)
        if dweights_ptr is not None:
            y = tl.load(y_ptr + row * y_stride + col, mask=inside, other=0.0).to(tl.float32)
            total += grad * y
        if dy_ptr is not None:
            dy = (grad * weight).to(dy_ptr.dtype.element_ty)
            if EVEN:
                tl.store(dy_ptr + row * H + col, dy)
            else:
                tl.store(dy_ptr + row * H + col, dy, mask=col < H)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + slot, tl.sum(total, 0), mask=kept)


def _rows(x: Tensor) -> Tensor:
    """x with contiguous rows."""
    return x if x.stride(1) == 1 and 0 <= x.stride(0) < 2**31 else x.contiguous()


def forward(y: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """The sum, by the kernel or in plain torch; operands as checked by `combine`."""
    (tokens, top_k), cols = positions.shape, y.shape[1]
    if not on_kernels(y):
        return formula(y, positions, weights)
    out = y.new_empty((tokens, cols))
    if out.numel() == 0:
        return out
    y, positions = _rows(y), positions.contiguous()
    weights = None if weights is None else weights.contiguous()
    block, warps, together = _program(cols, y.element_size(), tokens, top_k)
    unit = 16 if y.stride(0) % 16 == 0 else 1
    pdl = positions.numel() * cols * y.element_size() <= _PDL_NBYTES and supports_pdl(y)
    tensors, scalars = (y, positions, weights, out), (tokens, cols, y.stride(0) // unit)
    constants = (unit, top_k, top_k <= _MOST_UNROLLED, together, block, cols % block == 0, pdl)
    programs = -(-tokens // together) * -(-cols // block)
    launch(_combine_kernel, programs, tensors, scalars, constants, num_warps=warps, pdl=pdl)
    return out


def formula(y: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """The sum in plain torch, float32 inside, differentiable any number of times."""
    total = torch.zeros((positions.shape[0], y.shape[1]), dtype=wide_dtype(y), device=y.device)
    if y.shape[0] == 0:  # nothing but a history is added
        total = total + y.sum() + (0.0 if weights is None else weights[:0].sum())
        return total.to(y.dtype)
    for j in range(positions.shape[1]):
        kept = positions[:, j] >= 0
        row = wide(y.index_select(0, positions[:, j].clamp(min=0)))
        # Before the product: its gradient would take a NaN of a dropped weight into a row.
        row = row if weights is None else row * torch.where(kept, weights[:, j], 0.0)[:, None]
        total = total + torch.where(kept[:, None], row, 0.0)
    return total.to(y.dtype)


def backward(
    grad: Tensor, y: Tensor, positions: Tensor, weights: Tensor | None, needs_y: bool, needs_weights: bool
) -> tuple[Tensor, Tensor]:
    """(dy [R, H], dweights [T, k] float32) for the gradient of the sum; an empty tensor for what is not needed."""
    count, top_k = y.shape[0], positions.shape[1]
    # Dropped slots all go to one place more, which is cut off.
    at = torch.where(positions < 0, count, positions).flatten().long()
    slots = torch.arange(at.shape[0], dtype=torch.int32, device=y.device)
    slot_of = torch.full((count + 1,), -1, dtype=torch.int32, device=y.device).scatter_(0, at, slots)[:count]
    dy = torch.empty((count if needs_y else 0, y.shape[1]), dtype=y.dtype, device=y.device)
    shape = positions.shape if needs_weights else (0, top_k)
    dweights = torch.zeros(shape, dtype=torch.float32 if weights is None else weights.dtype, device=y.device)
    if 0 in (count, positions.numel(), y.shape[1]) or not (needs_y or needs_weights):
        return dy.zero_(), dweights
    if not on_kernels(y):
        kept = slot_of[:, None] >= 0
        slot = slot_of.clamp(min=0).long()
        dout = torch.where(kept, wide(grad.index_select(0, slot // top_k)), 0.0)
        if needs_weights:
            sums = torch.where(kept[:, 0], (dout * torch.where(kept, wide(y), 0.0)).sum(-1), 0.0)
            flat = sums.new_zeros(positions.numel() + 1)
            flat.scatter_(0, torch.where(kept[:, 0], slot, positions.numel()), sums)
            dweights.copy_(flat[:-1].view(positions.shape))
        if needs_y:
            weight = 1.0 if weights is None else torch.where(kept, weights.flatten()[slot, None], 0.0)
            dy.copy_(dout * weight)
        return dy, dweights
    grad, y = _rows(grad), _rows(y)
    weights = None if weights is None else weights.contiguous()
    block = column_block(y.shape[1], 1024)
    tensors = (grad, y, slot_of, weights, dy if needs_y else None, dweights if needs_weights else None)
    scalars, constants = (y.shape[1], grad.stride(0), y.stride(0)), (top_k, block, y.shape[1] % block == 0)
    launch(_backward_kernel, count, tensors, scalars, constants, num_warps=max(1, min(4, block // 256)))
    return dy, dweights


def _fake_backward(
    grad: Tensor, y: Tensor, positions: Tensor, weights: Tensor | None, *needs: bool
) -> tuple[Tensor, Tensor]:
    tokens, top_k = positions.shape
    dtype = torch.float32 if weights is None else weights.dtype
    return y.new_empty((y.shape[0] * needs[0], y.shape[1])), y.new_empty((tokens * needs[1], top_k), dtype=dtype)


_call_backward = define("combine_backward", backward, fake=_fake_backward)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(made: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_y, _, needs_weights = ctx.needs_input_grad
    dy, dweights = made(grad, *ctx.saved_tensors, needs_y, needs_weights)
    return dy if needs_y else None, None, dweights if needs_weights else None


def _by_formula(grad: Tensor, y: Tensor, positions: Tensor, weights: Any, *needs: bool) -> Any:
    """For create_graph=True: the gradients are differentiated in turn."""
    return gradients_of(lambda y, weights: formula(y, positions, weights), (y, weights), grad)


_call = define(
    "combine",
    forward,
    "(Tensor y, Tensor positions, Tensor? weights) -> Tensor",
    fake=lambda y, positions, weights: y.new_empty((positions.shape[0], y.shape[1])),
    gradient=partial(_gradient, _call_backward),
    setup=_setup,
)
_differentiable = differentiable_eagerly(forward, _setup, partial(_gradient, backward), partial(_gradient, _by_formula))


def combine(y: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted sum of each token's rows: out[t] = Σ_j weights[t, j] · y[positions[t, j]], in float32, in order of j.

    Args:
        y: [R, H] bfloat16, float16 or float32; or float64, summed in float64 in plain torch.
        positions: [T, k] int32: the row of slot (t, j), or -1 where it was dropped. No two slots share a row.
        weights: [T, k] float32 (float64 beside a float64 y); None for ones. Those of dropped slots are not looked at.

    Returns:
        [T, H] in y's dtype; zeros for a token all of whose slots were dropped. Differentiable in y and weights, as
        often as wanted (compiled: once).

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check(y, positions, weights)
    if traced(y, positions, weights):
        return _call(y, positions, weights)
    if torch.is_grad_enabled() and (y.requires_grad or (weights is not None and weights.requires_grad)):
        return _differentiable(y, positions, weights)
    return forward(y, positions, weights)


def _check(y: Tensor, positions: Tensor, weights: Tensor | None) -> None:
    require_tensors({"weights": weights}, y=y, positions=positions)
    for name, x in (("y", y), ("positions", positions), ("weights", weights)):
        if x is not None:
            check_dims(name, x, 2)
            check_like(name, x, y, "y", "device")
    if y.dtype not in FORMULA_DTYPES:
        raise ValueError(f"y: expected float32, bfloat16, float16 or float64, got {y.dtype}")
    if positions.dtype is not torch.int32:
        raise ValueError(f"positions: expected dtype torch.int32, got {positions.dtype}")
    if weights is not None and weights.dtype is not (wanted := wide_dtype(y)):
        raise ValueError(f"weights: expected dtype {wanted}, got {weights.dtype}")
    if weights is not None and weights.shape != positions.shape:
        raise ValueError(f"weights: expected shape {list(positions.shape)} as positions has, got {list(weights.shape)}")
