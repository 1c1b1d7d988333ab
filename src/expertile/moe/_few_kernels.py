"""Triton kernels of the layer for few tokens; see `_few` for what they compute and when.

There is no order by expert here: a program looks at topk_ids and knows which weights it reads. What must be fast is
the reading of weights, so programs are many and small, each with several tiles on their way (`num_stages`), and no
kernel waits for another longer than it has to: with EARLY each begins while the one before it is still running
(programmatic dependent launch), up to `begin`. Only what was there before the kernel before it may be read earlier.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertile.ops.gathered_mm._activation_kernel import activate


@triton.jit
def begin(EARLY: tl.constexpr, NEXT: tl.constexpr = True):
    """Until the kernels before this one are done. NEXT: then the one after it may start, to wait in its turn."""
    if EARLY:
        gdc_wait()
        if NEXT:
            gdc_launch_dependents()


@triton.jit
def _read_all(EARLY: tl.constexpr, LATE: tl.constexpr):
    """This program has read its weights: if LATE, the next kernel may start when all have."""
    if EARLY and LATE:
        gdc_launch_dependents()


@triton.jit
def _expert(ids_ptr, slot, mask, experts):
    """Expert of each slot as int32, -1 where there is none. Read from L2: a line in L1 may be older than the ids."""
    expert = tl.load(ids_ptr + slot, mask=mask, other=-1, cache_modifier=".cg")
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@triton.jit
def _leads(ids_ptr, slot, num_slots, experts, SLOTS_P2: tl.constexpr):
    """(expert of the slot, whether the slot is the first that has it). One slot of each expert does the work of all."""
    i = tl.arange(0, SLOTS_P2)
    all_experts = _expert(ids_ptr, i, i < num_slots, experts)
    expert = _expert(ids_ptr, slot, slot < num_slots, experts)
    first = tl.min(tl.where(all_experts == expert, i, SLOTS_P2), 0)
    return expert, (expert >= 0) & (first == slot)


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
    if INTERLEAVED:
        return 2 * n, 2 * n + 1
    else:
        return n, I + n


@triton.jit
def logits_kernel(
    x_ptr, router_ptr, bias_ptr, logits_ptr, experts, H, x_stride,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """logits [T, experts] = x @ router^T (+ bias), BLOCK_E of a token each program; CHUNKS of BLOCK_H columns."""
    begin(EARLY)
    tiles = tl.cdiv(experts, BLOCK_E)
    token = tl.program_id(0) // tiles
    e = tl.program_id(0) % tiles * BLOCK_E + tl.arange(0, BLOCK_E)
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


@triton.jit(do_not_specialize=["num_slots"])
def up_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, act_ptr, num_slots, experts, H, I, x_stride,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """act [num_slots, I], a program for BLOCK_N columns of a slot: products of a matrix with a vector."""
    begin(EARLY, not LATE)
    chunks = tl.cdiv(I, BLOCK_N)
    slot = tl.program_id(0) // chunks
    n = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = _expert(ids_ptr, slot, slot < num_slots, experts)
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
        _read_all(EARLY, LATE)
        gate_sum = tl.sum(gate, 1)
        up_sum = tl.sum(up, 1)
        if bias_ptr is not None:
            bias_ptr += expert.to(tl.int64) * (2 * I)
            gate_sum += tl.load(bias_ptr + gate_row, mask=n < I, other=0.0).to(tl.float32)
            up_sum += tl.load(bias_ptr + up_row, mask=n < I, other=0.0).to(tl.float32)
        act = activate(gate_sum, up_sum, ACTIVATION)
        tl.store(act_ptr + slot * I + n, act.to(act_ptr.dtype.element_ty), mask=n < I)


@triton.jit
def _prefetch(ptr, elements, THREAD: tl.constexpr):
    """Send for that many 16-bit elements, a multiple of 8, to L2; thread THREAD does it. Compute capability 9.0."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred sends;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 sends, thread, $3;
        @sends setp.gt.s32 sends, $2, 0;
        @sends cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [ptr.to(tl.int64), elements * 2, tl.full([], THREAD, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_rows(w_ptr, expert, chunk, I, H, BLOCK_N: tl.constexpr, THREAD: tl.constexpr):
    """Send for the expert's rows of down that belong to a chunk of BLOCK_N output columns; none for expert -1."""
    rows = tl.where(expert >= 0, tl.minimum(BLOCK_N, H - chunk * BLOCK_N), 0)
    at = tl.maximum(expert, 0).to(tl.int64) * H + chunk * BLOCK_N
    _prefetch(w_ptr + at * I, rows * I, THREAD)


@triton.jit
def down_kernel(
    act_ptr, w_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr, experts, I, H,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    STEPS: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [T, H], a program for BLOCK_N columns of a token: its experts one after the other, weighted and summed.

    With EARLY the weights are sent for before act is there. ids and routing weights are older than the kernel before
    this one, which waited for them before it let this one start."""
    chunks = tl.cdiv(H, BLOCK_N)
    token = tl.program_id(0) // chunks
    n = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    if EARLY:
        if PREFETCH:
            for j in tl.static_range(TOP_K):
                early_expert = _expert(ids_ptr, token * TOP_K + j, True, experts)
                _prefetch_rows(w_ptr, early_expert, tl.program_id(0) % chunks, I, H, BLOCK_N, j)
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, TOP_K * STEPS, num_stages=STAGES):
        slot = token * TOP_K + step // STEPS
        col = step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
        expert = _expert(ids_ptr, slot, True, experts)
        kept = expert >= 0
        # A dropped slot's weight may be anything: infinity times 0 is no zero.
        weight = tl.load(weights_ptr + slot, mask=kept, other=0.0, cache_modifier=".cg")
        w = _tile(w_ptr + tl.maximum(expert, 0).to(tl.int64) * (H * I), n, I, col, (n < H) & kept, I, EVEN)
        act = tl.load(act_ptr + slot * I + col, mask=(col < I) & kept, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * (act * weight)[None, :]
    out = tl.sum(acc, 1)
    if bias_ptr is not None:
        for j in tl.static_range(TOP_K):
            expert = _expert(ids_ptr, token * TOP_K + j, True, experts)
            weight = tl.load(weights_ptr + token * TOP_K + j, mask=expert >= 0, other=0.0)
            bias = tl.load(bias_ptr + expert.to(tl.int64) * H + n, mask=(n < H) & (expert >= 0), other=0.0)
            out += weight * bias.to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * H + n, out.to(out_ptr.dtype.element_ty), mask=n < H)


@triton.jit
def _store_slots(
    out_ptr, value, ids_ptr, expert, n, N, num_slots, experts, TOP_K: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """value [TOKENS, BLOCK_N] to out [num_slots, N]: the rows of the tokens' slots that have the expert."""
    token = tl.arange(0, TOKENS)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        mine = _expert(ids_ptr, slot, slot < num_slots, experts) == expert
        tl.store(out_ptr + slot[:, None] * N + n[None, :], value, mask=mine[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["num_slots"])
def up_dot_kernel(
    x_ptr, w_ptr, bias_ptr, ids_ptr, act_ptr, num_slots, experts, H, I, x_stride,
    TOP_K: tl.constexpr, SLOTS_P2: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """act [num_slots, I], a program for BLOCK_N columns of an expert.

    All tokens are multiplied, at most TOKENS, whether they go to this expert or not: it costs nothing that is short,
    and nothing has to be gathered."""
    begin(EARLY, not LATE)
    chunks = tl.cdiv(I, BLOCK_N)
    n = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, leads = _leads(ids_ptr, tl.program_id(0) // chunks, num_slots, experts, SLOTS_P2)
    if leads:
        token = tl.arange(0, TOKENS)
        gate_row, up_row = _gate_up_rows(n, I, INTERLEAVED)
        w_ptr += expert.to(tl.int64) * (2 * I * H)
        gate = tl.zeros([TOKENS, BLOCK_N], tl.float32)
        up = tl.zeros([TOKENS, BLOCK_N], tl.float32)
        for start in tl.range(0, H, BLOCK_K, num_stages=STAGES):
            col = start + tl.arange(0, BLOCK_K)
            x = _tile(x_ptr, token, x_stride, col, token < num_slots // TOP_K, H, EVEN)
            gate_w = _tile(w_ptr, gate_row, H, col, n < I, H, EVEN)
            up_w = _tile(w_ptr, up_row, H, col, n < I, H, EVEN)
            gate = tl.dot(x, gate_w.T, gate)
            up = tl.dot(x, up_w.T, up)
        _read_all(EARLY, LATE)
        if bias_ptr is not None:
            bias_ptr += expert.to(tl.int64) * (2 * I)
            gate += tl.load(bias_ptr + gate_row, mask=n < I, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + up_row, mask=n < I, other=0.0).to(tl.float32)[None, :]
        act = activate(gate, up, ACTIVATION).to(act_ptr.dtype.element_ty)
        _store_slots(act_ptr, act, ids_ptr, expert, n, I, num_slots, experts, TOP_K, TOKENS)


@triton.jit(do_not_specialize=["num_slots"])
def down_dot_kernel(
    act_ptr, w_ptr, bias_ptr, ids_ptr, y_ptr, num_slots, experts, I, H,
    TOP_K: tl.constexpr, SLOTS_P2: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [num_slots, H] float32, a program for BLOCK_N columns of an expert: its slots' rows of act, at most TOKENS."""
    chunks = tl.cdiv(H, BLOCK_N)
    n = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, leads = _leads(ids_ptr, tl.program_id(0) // chunks, num_slots, experts, SLOTS_P2)
    if EARLY:
        if PREFETCH:
            _prefetch_rows(w_ptr, tl.where(leads, expert, -1), tl.program_id(0) % chunks, I, H, BLOCK_N, 0)
        gdc_wait()
        gdc_launch_dependents()
    if leads:
        token = tl.arange(0, TOKENS)
        y = tl.zeros([TOKENS, BLOCK_N], tl.float32)
        w_ptr += expert.to(tl.int64) * (H * I)
        # A token's slot of this expert; if it has several, their rows of act are the same.
        mine = tl.full([TOKENS], -1, tl.int32)
        for j in tl.static_range(TOP_K):
            slot = token * TOP_K + j
            mine = tl.where(_expert(ids_ptr, slot, slot < num_slots, experts) == expert, slot, mine)
        for start in tl.range(0, I, BLOCK_K, num_stages=STAGES):
            col = start + tl.arange(0, BLOCK_K)
            act = _tile(act_ptr, tl.maximum(mine, 0), I, col, mine >= 0, I, EVEN)
            w = _tile(w_ptr, n, I, col, n < H, I, EVEN)
            y = tl.dot(act, w.T, y)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * H + n, mask=n < H, other=0.0)
            y += bias.to(tl.float32)[None, :]
        _store_slots(y_ptr, y, ids_ptr, expert, n, H, num_slots, experts, TOP_K, TOKENS)


@triton.jit
def sum_kernel(
    y_ptr, ids_ptr, weights_ptr, out_ptr, experts, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """out[t] = sum over j of weights[t, j] * y[t * TOP_K + j], in the order of j."""
    begin(EARLY)
    chunks = tl.cdiv(H, BLOCK)
    token = tl.program_id(0) // chunks
    n = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        kept = _expert(ids_ptr, slot, True, experts) >= 0
        weight = tl.load(weights_ptr + slot, mask=kept, other=0.0)
        acc += weight * tl.load(y_ptr + slot.to(tl.int64) * H + n, mask=(n < H) & kept, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * H + n, acc.to(out_ptr.dtype.element_ty), mask=n < H)
