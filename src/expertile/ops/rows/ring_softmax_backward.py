"""Backward pass of softmax for rows that wait in shared memory (see ring.py): dy and y side by side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from expertile.ops.rows import ring


@gluon.jit
def _backward_row(
    dy_groups,
    y_groups,
    full,
    empty,
    order,
    dy_row,
    y_row,
    dx_row,
    shift,
    n,
    whole,
    C,
    slot,
    phase,
    order_phase,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNK: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """One row of `n` groups, from `slot` on."""
    VECTOR: gl.constexpr = CHUNK // 32
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [gl.num_warps(), 1], [1, 0])
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ends_at, ends_inside = ring.head_and_tail(shift, C, VECTOR, alone)
    ends_dy = gl.load(dy_row + ends_at, mask=ends_inside, other=0.0)
    ends_y = gl.load(y_row + ends_at, mask=ends_inside, other=0.0)
    ring.ordered_wait(order, order_phase, CONSUMER, CONSUMERS)

    mbarrier.wait(full.index(slot), phase)
    at = ring.positions(0, GROUP, CHUNK, layout)
    dy = dy_groups.index(slot).load(layout).to(gl.float32)
    y = y_groups.index(slot).load(layout).to(gl.float32)
    lane_dot = gl.where(at >= shift, dy * y, 0.0)
    s, p = ring.forward_by(slot, phase, 1, SLOTS)
    for _ in range(1, n - 1):
        mbarrier.wait(full.index(s), p)
        dy = dy_groups.index(s).load(layout).to(gl.float32)
        y = y_groups.index(s).load(layout).to(gl.float32)
        lane_dot += dy * y
        s, p = ring.forward_by(s, p, 1, SLOTS)
    mbarrier.wait(full.index(s), p)
    at = ring.positions(n - 1, GROUP, CHUNK, layout)
    if whole < shift + C:
        ring.complete(dy_groups.index(s), dy_row, at, whole, shift + C, layout)
        ring.complete(y_groups.index(s), y_row, at, whole, shift + C, layout)
    dy = dy_groups.index(s).load(layout).to(gl.float32)
    y = y_groups.index(s).load(layout).to(gl.float32)
    lane_dot += gl.where(at < shift + C, dy * y, 0.0)
    dot = gl.sum(gl.sum(lane_dot, 1), 0)
    ring.ordered_arrive(order, CONSUMER, CONSUMERS)

    head, tail = ring.words(shift, C, VECTOR)
    s, p = slot, phase
    for g in range(0, n):
        dy = dy_groups.index(s).load(layout).to(gl.float32)
        y = y_groups.index(s).load(layout).to(gl.float32)
        ring.give_back(empty, s)
        at = ring.positions(g, GROUP, CHUNK, layout)
        dx = y * (dy - dot)
        gl.store(dx_row + at, dx.to(dx_row.dtype.element_ty), mask=(at >= head) & (at < tail))
        s, p = ring.forward_by(s, p, 1, SLOTS)
    ends_dx = ends_y.to(gl.float32) * (ends_dy.to(gl.float32) - dot)
    gl.store(dx_row + ends_at, ends_dx.to(dx_row.dtype.element_ty), mask=ends_inside)


@gluon.jit
def _backward(
    dy_groups,
    y_groups,
    full,
    empty,
    order,
    dy_ptr,
    y_ptr,
    dx_ptr,
    R,
    C,
    whole_chunks,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNK: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """A consumer: every CONSUMERS-th row of this program."""
    slot = 0
    phase = 0
    order_phase = 0
    consumer = 0
    for row in range(gl.program_id(0), R, gl.num_programs(0)):
        first, shift, n = ring.place(row, C, GROUP, CHUNK)
        if consumer == CONSUMER:
            start = gl.cast(first, gl.int64) * CHUNK
            _backward_row(
                dy_groups,
                y_groups,
                full,
                empty,
                order,
                dy_ptr + start,
                y_ptr + start,
                dx_ptr + start,
                shift,
                n,
                ring.whole(first, whole_chunks, CHUNK),
                C,
                slot,
                phase,
                order_phase,
                CONSUMER,
                CONSUMERS,
                GROUP,
                CHUNK,
                SLOTS,
            )
        slot, phase, order_phase, consumer = ring.next_row(slot, phase, order_phase, consumer, n, SLOTS, CONSUMERS)


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
    WARPS: gl.constexpr = gl.num_warps()
    dy_boxes, dy_groups = ring.allocate(dy_desc, GROUP, BOX, SLOTS)
    y_boxes, y_groups = ring.allocate(y_desc, GROUP, BOX, SLOTS)
    full, empty, order = ring.barriers(SLOTS, CONSUMERS)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _backward,
                    (
                        dy_groups,
                        y_groups,
                        full,
                        empty,
                        order,
                        dy_ptr,
                        y_ptr,
                        dx_ptr,
                        R,
                        C,
                        whole_chunks,
                        0,
                        1,
                        GROUP,
                        CHUNK,
                        SLOTS,
                    ),
                ),
                (ring.produce, (dy_desc, y_desc, dy_boxes, y_boxes, full, empty, R, C, GROUP, BOX, SLOTS, 2)),
            ],
            [1],
            [LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _backward,
                    (
                        dy_groups,
                        y_groups,
                        full,
                        empty,
                        order,
                        dy_ptr,
                        y_ptr,
                        dx_ptr,
                        R,
                        C,
                        whole_chunks,
                        0,
                        2,
                        GROUP,
                        CHUNK,
                        SLOTS,
                    ),
                ),
                (
                    _backward,
                    (
                        dy_groups,
                        y_groups,
                        full,
                        empty,
                        order,
                        dy_ptr,
                        y_ptr,
                        dx_ptr,
                        R,
                        C,
                        whole_chunks,
                        1,
                        2,
                        GROUP,
                        CHUNK,
                        SLOTS,
                    ),
                ),
                (ring.produce, (dy_desc, y_desc, dy_boxes, y_boxes, full, empty, R, C, GROUP, BOX, SLOTS, 2)),
            ],
            [WARPS, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
