"""Softmax of rows that wait in shared memory (see ring.py), and its backward pass, dy and y side by side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertile.ops.hopper.context import context
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


@context
class _Forward:
    """What a consumer is handed: the ring, x and y [R, C], and how many whole chunks x has."""

    groups: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    order: gl.shared_memory_descriptor
    x_ptr: gl.tensor
    y_ptr: gl.tensor
    R: gl.tensor
    C: gl.tensor
    whole_chunks: gl.tensor
    CONSUMERS: gl.constexpr
    GROUP: gl.constexpr
    CHUNK: gl.constexpr
    SLOTS: gl.constexpr


@gluon.jit
def _forward_row(p, first, shift, n, slot, phase, order_phase, CONSUMER: gl.constexpr):
    """One row, see `ring.consume`. Each group is loaded from shared memory while the one before is summed, or
    computed."""
    start = gl.cast(first, gl.int64) * p.CHUNK
    x_row = p.x_ptr + start
    y_row = p.y_ptr + start
    whole = ring.whole(first, p.whole_chunks, p.CHUNK)
    VECTOR: gl.constexpr = p.CHUNK // 32
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [gl.num_warps(), 1], [1, 0])
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ends_at, ends_inside = ring.head_and_tail(shift, p.C, VECTOR, alone)
    ends_x = gl.load(x_row + ends_at, mask=ends_inside, other=0.0)
    ring.ordered_wait(p.order, order_phase, CONSUMER, p.CONSUMERS)

    mbarrier.wait(p.full.index(slot), phase)
    x = p.groups.index(slot).load(layout)
    s, at_phase = ring.forward_by(slot, phase, 1, p.SLOTS)
    mbarrier.wait(p.full.index(s), at_phase)
    following = p.groups.index(s).load(layout)
    at = ring.positions(0, p.GROUP, p.CHUNK, layout)
    top, total = _start(_in_lanes(gl.where(at >= shift, x.to(gl.float32), float("-inf")), VECTOR))
    x = following
    for _ in range(2, n):
        s, at_phase = ring.forward_by(s, at_phase, 1, p.SLOTS)
        mbarrier.wait(p.full.index(s), at_phase)
        following = p.groups.index(s).load(layout)
        top, total = _add(top, total, _in_lanes(x, VECTOR))
        x = following
    at = ring.positions(n - 1, p.GROUP, p.CHUNK, layout)
    if whole < shift + p.C:
        x = ring.complete(p.groups.index(s), x_row, at, whole, shift + p.C, layout)
    top, total = _add(top, total, _in_lanes(gl.where(at < shift + p.C, x.to(gl.float32), float("-inf")), VECTOR))
    base = _finite(gl.max(gl.max(top, 1), 0))
    scale = 1.0 / gl.sum(gl.sum(total * _exp_from(top, base), 1), 0)
    ring.ordered_arrive(p.order, CONSUMER, p.CONSUMERS)

    head, tail = ring.words(shift, p.C, VECTOR)
    s, at_phase = slot, phase
    x = p.groups.index(s).load(layout)
    for g in range(0, n):
        after, at_phase = ring.forward_by(s, at_phase, 1, p.SLOTS)
        following = p.groups.index(gl.where(g == n - 1, s, after)).load(layout)
        ring.give_back(p.empty, s)
        at = ring.positions(g, p.GROUP, p.CHUNK, layout)
        y = _exp_from(x.to(gl.float32), base) * scale
        gl.store(y_row + at, y.to(y_row.dtype.element_ty), mask=(at >= head) & (at < tail))
        x = following
        s = after
    ends_y = _exp_from(ends_x.to(gl.float32), base) * scale
    gl.store(y_row + ends_at, ends_y.to(y_row.dtype.element_ty), mask=ends_inside)


@gluon.jit(do_not_specialize=["R", "C", "whole_chunks"])
def softmax_ring_kernel(
    x_desc,
    x_ptr,
    y_ptr,
    R,
    C,
    whole_chunks,
    GROUP: gl.constexpr,
    BOX: gl.constexpr,
    SLOTS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """y[r] = exp(x[r] - max) / sum exp(x[r] - max). x_desc: [whole_chunks, CHUNK] in boxes of BOX chunks. A row has at
    least two groups and at most SLOTS."""
    CHUNK: gl.constexpr = x_desc.block_type.shape[1]
    boxes, groups = ring.allocate(x_desc, GROUP, BOX, SLOTS)
    full, empty, order = ring.barriers(SLOTS, CONSUMERS)
    p = _Forward(  # type: ignore[call-arg]
        (groups, full, empty, order), (x_ptr, y_ptr, R, C, whole_chunks), (CONSUMERS, GROUP, CHUNK, SLOTS)
    )
    ring.specialise(p, _forward_row, x_desc, x_desc, boxes, boxes, BOX, 1, REGISTERS, LOADER_REGISTERS)


@context
class _Backward:
    """What a consumer is handed: the rings, dy, y and dx [R, C], and how many whole chunks each has."""

    dy_groups: gl.shared_memory_descriptor
    y_groups: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    order: gl.shared_memory_descriptor
    dy_ptr: gl.tensor
    y_ptr: gl.tensor
    dx_ptr: gl.tensor
    R: gl.tensor
    C: gl.tensor
    whole_chunks: gl.tensor
    CONSUMERS: gl.constexpr
    GROUP: gl.constexpr
    CHUNK: gl.constexpr
    SLOTS: gl.constexpr


@gluon.jit
def _backward_row(p, first, shift, n, slot, phase, order_phase, CONSUMER: gl.constexpr):
    """One row, see `ring.consume`."""
    start = gl.cast(first, gl.int64) * p.CHUNK
    dy_row = p.dy_ptr + start
    y_row = p.y_ptr + start
    dx_row = p.dx_ptr + start
    whole = ring.whole(first, p.whole_chunks, p.CHUNK)
    VECTOR: gl.constexpr = p.CHUNK // 32
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [gl.num_warps(), 1], [1, 0])
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ends_at, ends_inside = ring.head_and_tail(shift, p.C, VECTOR, alone)
    ends_dy = gl.load(dy_row + ends_at, mask=ends_inside, other=0.0)
    ends_y = gl.load(y_row + ends_at, mask=ends_inside, other=0.0)
    ring.ordered_wait(p.order, order_phase, CONSUMER, p.CONSUMERS)

    mbarrier.wait(p.full.index(slot), phase)
    at = ring.positions(0, p.GROUP, p.CHUNK, layout)
    dy = p.dy_groups.index(slot).load(layout).to(gl.float32)
    y = p.y_groups.index(slot).load(layout).to(gl.float32)
    lane_dot = gl.where(at >= shift, dy * y, 0.0)
    s, at_phase = ring.forward_by(slot, phase, 1, p.SLOTS)
    for _ in range(1, n - 1):
        mbarrier.wait(p.full.index(s), at_phase)
        dy = p.dy_groups.index(s).load(layout).to(gl.float32)
        y = p.y_groups.index(s).load(layout).to(gl.float32)
        lane_dot += dy * y
        s, at_phase = ring.forward_by(s, at_phase, 1, p.SLOTS)
    mbarrier.wait(p.full.index(s), at_phase)
    at = ring.positions(n - 1, p.GROUP, p.CHUNK, layout)
    if whole < shift + p.C:
        ring.complete(p.dy_groups.index(s), dy_row, at, whole, shift + p.C, layout)
        ring.complete(p.y_groups.index(s), y_row, at, whole, shift + p.C, layout)
    dy = p.dy_groups.index(s).load(layout).to(gl.float32)
    y = p.y_groups.index(s).load(layout).to(gl.float32)
    lane_dot += gl.where(at < shift + p.C, dy * y, 0.0)
    dot = gl.sum(gl.sum(lane_dot, 1), 0)
    ring.ordered_arrive(p.order, CONSUMER, p.CONSUMERS)

    head, tail = ring.words(shift, p.C, VECTOR)
    s, at_phase = slot, phase
    for g in range(0, n):
        dy = p.dy_groups.index(s).load(layout).to(gl.float32)
        y = p.y_groups.index(s).load(layout).to(gl.float32)
        ring.give_back(p.empty, s)
        at = ring.positions(g, p.GROUP, p.CHUNK, layout)
        dx = y * (dy - dot)
        gl.store(dx_row + at, dx.to(dx_row.dtype.element_ty), mask=(at >= head) & (at < tail))
        s, at_phase = ring.forward_by(s, at_phase, 1, p.SLOTS)
    ends_dx = ends_y.to(gl.float32) * (ends_dy.to(gl.float32) - dot)
    gl.store(dx_row + ends_at, ends_dx.to(dx_row.dtype.element_ty), mask=ends_inside)


@gluon.jit(do_not_specialize=["R", "C", "whole_chunks"])
def softmax_backward_ring_kernel(
    dy_desc,
    y_desc,
    dy_ptr,
    y_ptr,
    dx_ptr,
    R,
    C,
    whole_chunks,
    GROUP: gl.constexpr,
    BOX: gl.constexpr,
    SLOTS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """dx[r] = y[r] * (dy[r] - sum(dy[r] * y[r])); as `softmax_ring_kernel`, with a slot of dy beside each of y, for one
    consumer or two."""
    CHUNK: gl.constexpr = y_desc.block_type.shape[1]
    dy_boxes, dy_groups = ring.allocate(dy_desc, GROUP, BOX, SLOTS)
    y_boxes, y_groups = ring.allocate(y_desc, GROUP, BOX, SLOTS)
    full, empty, order = ring.barriers(SLOTS, CONSUMERS)
    p = _Backward(  # type: ignore[call-arg]
        (dy_groups, y_groups, full, empty, order),
        (dy_ptr, y_ptr, dx_ptr, R, C, whole_chunks),
        (CONSUMERS, GROUP, CHUNK, SLOTS),
    )
    ring.specialise(p, _backward_row, dy_desc, y_desc, dy_boxes, y_boxes, BOX, 2, REGISTERS, LOADER_REGISTERS)
