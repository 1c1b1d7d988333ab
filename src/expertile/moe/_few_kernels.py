"""Triton kernels of the layer for few tokens; see `_few` for what they compute and when.

A program looks at topk_ids and knows which weights it reads. Programs are many and small, each with several tiles on
their way (`num_stages`); with PDL (programmatic dependent launch) a kernel begins while the one before it still runs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertile.ops.gathered_mm.activation_kernel import activate
from expertile.ops.launch.pdl import begin


@triton.jit
def _place(size, BLOCK: tl.constexpr):
    """What this program works on: BLOCK of the `size` indices of one slot or token, as (which one, indices)."""
    blocks = tl.cdiv(size, BLOCK)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _expert(ids_ptr, slot, experts):
    """Expert of the slot as int32, -1 if it is dropped. Read from L2: a line in L1 may be older than the ids."""
    expert = tl.load(ids_ptr + slot, cache_modifier=".cg")
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@triton.jit
def _tile(ptr, row, pitch, col, row_mask, cols, EVEN: tl.constexpr):
    """ptr[row, col] for vectors row and col; zeros where row_mask is not or, unless EVEN, col >= cols."""
    inside = row_mask[:, None]
    if not EVEN:
        inside = inside & (col < cols)[None, :]
    return tl.load(ptr + row[:, None] * pitch + col[None, :], mask=inside, other=0.0)


@triton.jit
def _gate_up_rows(n, I, INTERLEAVED: tl.constexpr):
    """Rows of gate_up that make gate and up of the intermediate columns n."""
    return (2 * n, 2 * n + 1) if INTERLEAVED else (n, I + n)


@triton.jit
def logits_kernel(
    tensors, scalars, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr
):
    """logits [T, experts] = x @ router^T (+ bias), BLOCK_E of a token each program; CHUNKS of BLOCK_H columns."""
    x_ptr, router_ptr, bias_ptr, logits_ptr = tensors
    experts, H, x_stride = scalars
    begin(PDL)
    token, e = _place(experts, BLOCK_E)
    acc = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
    # Unrolled, so that the loads of several chunks are on their way at once.
    for chunk in tl.static_range(CHUNKS):
        col = chunk * BLOCK_H + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + token.to(tl.int64) * x_stride + col, mask=col < H, other=0.0).to(tl.float32)
        w = _tile(router_ptr, e, H, col, e < experts, H, False).to(tl.float32)
        acc += w * x[None, :]
    logits = tl.sum(acc, 1)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + e, mask=e < experts, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token * experts + e, logits.to(logits_ptr.dtype.element_ty), mask=e < experts)


@triton.jit
def up_kernel(
    tensors,
    scalars,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """act [T * TOP_K, I], a program for BLOCK_N columns of a slot: products of a matrix with a vector."""
    x_ptr, w_ptr, bias_ptr, ids_ptr, act_ptr = tensors
    experts, H, I, x_stride = scalars
    if PDL:
        gdc_wait()
    slot, n = _place(I, BLOCK_N)
    expert = _expert(ids_ptr, slot, experts)
    if expert >= 0:
        gate_row, up_row = _gate_up_rows(n, I, INTERLEAVED)
        w_ptr += expert.to(tl.int64) * (2 * I * H)
        x_ptr += (slot // TOP_K).to(tl.int64) * x_stride
        gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, H, BLOCK_K, num_stages=STAGES):
            col = start + tl.arange(0, BLOCK_K)
            gate_w = _tile(w_ptr, gate_row, H, col, n < I, H, EVEN)
            up_w = _tile(w_ptr, up_row, H, col, n < I, H, EVEN)
            x = tl.load(x_ptr + col, mask=col < H, other=0.0).to(tl.float32)[None, :]
            gate += gate_w.to(tl.float32) * x
            up += up_w.to(tl.float32) * x
        # `down` may start when all programs have read their weights: sooner, it would only take their place.
        if PDL:
            gdc_launch_dependents()
        gate_sum = tl.sum(gate, 1)
        up_sum = tl.sum(up, 1)
        if bias_ptr is not None:
            bias_ptr += expert.to(tl.int64) * (2 * I)
            gate_sum += tl.load(bias_ptr + gate_row, mask=n < I, other=0.0).to(tl.float32)
            up_sum += tl.load(bias_ptr + up_row, mask=n < I, other=0.0).to(tl.float32)
        act = activate(gate_sum, up_sum, ACTIVATION)
        tl.store(act_ptr + slot * I + n, act.to(act_ptr.dtype.element_ty), mask=n < I)


@triton.jit
def down_kernel(
    tensors,
    scalars,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, H], a program for BLOCK_N columns of a token: its experts one after the other, weighted and summed."""
    act_ptr, w_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr = tensors
    experts, I, H = scalars
    begin(PDL)
    token, n = _place(H, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, TOP_K * STEPS, num_stages=STAGES):
        slot = token * TOP_K + step // STEPS
        col = step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
        expert = _expert(ids_ptr, slot, experts)
        kept = expert >= 0
        # A dropped slot's weight may be anything: infinity times 0 is no zero.
        weight = tl.load(weights_ptr + slot, mask=kept, other=0.0, cache_modifier=".cg")
        w = _tile(w_ptr + tl.maximum(expert, 0).to(tl.int64) * (H * I), n, I, col, (n < H) & kept, I, EVEN)
        act = tl.load(act_ptr + slot * I + col, mask=(col < I) & kept, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * (act * weight)[None, :]
    out = tl.sum(acc, 1)
    if bias_ptr is not None:
        for j in tl.static_range(TOP_K):
            expert = _expert(ids_ptr, token * TOP_K + j, experts)
            weight = tl.load(weights_ptr + token * TOP_K + j, mask=expert >= 0, other=0.0)
            bias = tl.load(bias_ptr + expert.to(tl.int64) * H + n, mask=(n < H) & (expert >= 0), other=0.0)
            out += weight * bias.to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * H + n, out.to(out_ptr.dtype.element_ty), mask=n < H)
