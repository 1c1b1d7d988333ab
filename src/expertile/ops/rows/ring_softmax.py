"""Softmax of rows that wait in shared memory (see ring.py), and its backward pass, dy and y side by side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertile.ops.rows import ring

_LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def _exp_from(x, base):
    """exp(x - base), results below 2**-126 as 0, in one instruction (four, if they were kept). Subtracted first: x may
    be the most negative number that there is, a mask, and base too, so neither is multiplied alone."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [(x - base) * _LOG2_E], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _finite(maximum):
    """A maximum to subtract: 0 for what has seen nothing but -inf, whose exp is then 0 and not NaN."""
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def _in_lanes(x, VECTOR: gl.constexpr):
    """x [GROUP, CHUNK] with the elements that a thread has side by side as last dimension, float32."""
    return gl.reshape(x.to(gl.float32), [x.shape[0], x.shape[1] // VECTOR, VECTOR])


@gluon.jit
def _start(lanes):
    """Maximum of every lane's elements, and the sum of their exponentials below it."""
    top = gl.max(lanes, 2)
    return top, gl.sum(_exp_from(lanes, gl.expand_dims(_finite(top), 2)), 2)


@gluon.jit
def _add(top, total, lanes):
    """The same of the elements so far and of these (Milakov, Gimelshein, "Online normalizer calculation for softmax",
    2018)."""
    larger = gl.maximum(top, gl.max(lanes, 2))
    base = _finite(larger)
    return larger, total * _exp_from(top, base) + gl.sum(_exp_from(lanes, gl.expand_dims(base, 2)), 2)


@gluon.jit
def _forward_row(p, first, shift, n, slot, phase, order_phase, CONSUMER: gl.constexpr):
    """One row, see `ring._consume`. Each group is loaded from shared memory while the one before is summed, or
    computed."""
    start = gl.cast(first, gl.int64) * p.CHUNK
    x_row = p.a_ptr + start
    y_row = p.out_ptr + start
    whole = ring.whole(p, first)
    VECTOR: gl.constexpr = p.CHUNK // 32
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [gl.num_warps(), 1], [1, 0])
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ends_at, ends_inside = ring.head_and_tail(p, shift, VECTOR, alone)
    ends_x = gl.load(x_row + ends_at, mask=ends_inside, other=0.0)
    ring.ordered_wait(p, order_phase, CONSUMER)

    mbarrier.wait(p.full.index(slot), phase)
    x = p.a_groups.index(slot).load(layout)
    s, at_phase = ring.forward_by(p, slot, phase, 1)
    mbarrier.wait(p.full.index(s), at_phase)
    following = p.a_groups.index(s).load(layout)
    at = ring.positions(p, 0, layout)
    top, total = _start(_in_lanes(gl.where(at >= shift, x.to(gl.float32), float("-inf")), VECTOR))
    x = following
    for _ in range(2, n):
        s, at_phase = ring.forward_by(p, s, at_phase, 1)
        mbarrier.wait(p.full.index(s), at_phase)
        following = p.a_groups.index(s).load(layout)
        top, total = _add(top, total, _in_lanes(x, VECTOR))
        x = following
    at = ring.positions(p, n - 1, layout)
    if whole < shift + p.C:
        x = ring.complete(p.a_groups.index(s), x_row, at, whole, shift + p.C, layout)
    top, total = _add(top, total, _in_lanes(gl.where(at < shift + p.C, x.to(gl.float32), float("-inf")), VECTOR))
    base = _finite(gl.max(gl.max(top, 1), 0))
    scale = 1.0 / gl.sum(gl.sum(total * _exp_from(top, base), 1), 0)
    ring.ordered_arrive(p, CONSUMER)

    head, tail = ring.words(p, shift, VECTOR)
    s, at_phase = slot, phase
    x = p.a_groups.index(s).load(layout)
    for g in range(0, n):
        after, at_phase = ring.forward_by(p, s, at_phase, 1)
        following = p.a_groups.index(gl.where(g == n - 1, s, after)).load(layout)
        ring.give_back(p, s)
        at = ring.positions(p, g, layout)
        y = _exp_from(x.to(gl.float32), base) * scale
        gl.store(y_row + at, y.to(y_row.dtype.element_ty), mask=(at >= head) & (at < tail))
        x = following
        s = after
    ends_y = _exp_from(ends_x.to(gl.float32), base) * scale
    gl.store(y_row + ends_at, ends_y.to(y_row.dtype.element_ty), mask=ends_inside)


@gluon.jit(do_not_specialize=["R", "C", "whole_chunks"])
def softmax_ring_kernel(x_desc, x_ptr, y_ptr, R, C, whole_chunks, SHAPE: gl.constexpr, REGISTERS: gl.constexpr):
    """y[r] = exp(x[r] - max) / sum exp(x[r] - max). x_desc: [whole_chunks, CHUNK] in boxes of BOX chunks. A row has at
    least two groups and at most SLOTS."""
    sizes = (R, C, whole_chunks)
    ring.run(_forward_row, ((x_desc, x_ptr),), y_ptr, sizes, SHAPE, REGISTERS)


@gluon.jit
def _backward_row(p, first, shift, n, slot, phase, order_phase, CONSUMER: gl.constexpr):
    """One row, see `ring._consume`."""
    start = gl.cast(first, gl.int64) * p.CHUNK
    dy_row = p.a_ptr + start
    y_row = p.b_ptr + start
    dx_row = p.out_ptr + start
    whole = ring.whole(p, first)
    VECTOR: gl.constexpr = p.CHUNK // 32
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [gl.num_warps(), 1], [1, 0])
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ends_at, ends_inside = ring.head_and_tail(p, shift, VECTOR, alone)
    ends_dy = gl.load(dy_row + ends_at, mask=ends_inside, other=0.0)
    ends_y = gl.load(y_row + ends_at, mask=ends_inside, other=0.0)
    ring.ordered_wait(p, order_phase, CONSUMER)

    mbarrier.wait(p.full.index(slot), phase)
    at = ring.positions(p, 0, layout)
    dy = p.a_groups.index(slot).load(layout).to(gl.float32)
    y = p.b_groups.index(slot).load(layout).to(gl.float32)
    lane_dot = gl.where(at >= shift, dy * y, 0.0)
    s, at_phase = ring.forward_by(p, slot, phase, 1)
    for _ in range(1, n - 1):
        mbarrier.wait(p.full.index(s), at_phase)
        dy = p.a_groups.index(s).load(layout).to(gl.float32)
        y = p.b_groups.index(s).load(layout).to(gl.float32)
        lane_dot += dy * y
        s, at_phase = ring.forward_by(p, s, at_phase, 1)
    mbarrier.wait(p.full.index(s), at_phase)
    at = ring.positions(p, n - 1, layout)
    if whole < shift + p.C:
        ring.complete(p.a_groups.index(s), dy_row, at, whole, shift + p.C, layout)
        ring.complete(p.b_groups.index(s), y_row, at, whole, shift + p.C, layout)
    dy = p.a_groups.index(s).load(layout).to(gl.float32)
    y = p.b_groups.index(s).load(layout).to(gl.float32)
    lane_dot += gl.where(at < shift + p.C, dy * y, 0.0)
    dot = gl.sum(gl.sum(lane_dot, 1), 0)
    ring.ordered_arrive(p, CONSUMER)

    head, tail = ring.words(p, shift, VECTOR)
    s, at_phase = slot, phase
    for g in range(0, n):
        dy = p.a_groups.index(s).load(layout).to(gl.float32)
        y = p.b_groups.index(s).load(layout).to(gl.float32)
        ring.give_back(p, s)
        at = ring.positions(p, g, layout)
        dx = y * (dy - dot)
        gl.store(dx_row + at, dx.to(dx_row.dtype.element_ty), mask=(at >= head) & (at < tail))
        s, at_phase = ring.forward_by(p, s, at_phase, 1)
    ends_dx = ends_y.to(gl.float32) * (ends_dy.to(gl.float32) - dot)
    gl.store(dx_row + ends_at, ends_dx.to(dx_row.dtype.element_ty), mask=ends_inside)


@gluon.jit(do_not_specialize=["R", "C", "whole_chunks"])
def softmax_backward_ring_kernel(
    dy_desc, y_desc, dy_ptr, y_ptr, dx_ptr, R, C, whole_chunks, SHAPE: gl.constexpr, REGISTERS: gl.constexpr
):
    """dx[r] = y[r] * (dy[r] - sum(dy[r] * y[r])); as `softmax_ring_kernel`, with a slot of dy beside each of y, for one
    consumer or two."""
    sizes = (R, C, whole_chunks)
    ring.run(_backward_row, ((dy_desc, dy_ptr), (y_desc, y_ptr)), dx_ptr, sizes, SHAPE, REGISTERS)
