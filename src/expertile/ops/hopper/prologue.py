"""Device code that the Gluon kernels share: what a kernel does before its first load."""
# ruff: noqa: RUF005  (Gluon's front end knows no `*` in a list)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def slots(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Two sets of COUNT barriers, of FIRST and of SECOND arrivals."""
    first = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(COUNT):
        mbarrier.init(first.index(s), count=FIRST)
        mbarrier.init(second.index(s), count=SECOND)
    return first, second


@gluon.jit
def make_order(COUNT: gl.constexpr = 2):
    """The barriers of COUNT consumers that take turns, one arrival each."""
    order = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(COUNT):
        mbarrier.init(order.index(s), count=1)
    return order


@gluon.jit
def begin():
    """Behind the barriers' making. Memory of the kernel before is touched only after this; the kernel after may begin
    to set itself up."""
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def _consume(p, CONSUMER: gl.constexpr, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    if LAYOUT is None:
        CONSUMER(p, NUMBER)
    else:
        CONSUMER(p, NUMBER, LAYOUT)


@gluon.jit
def _produce(p, PRODUCER: gl.constexpr):
    PRODUCER(p)


@gluon.jit
def specialise(p, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr, LAYOUT: gl.constexpr, REGISTERS: gl.constexpr):
    """Start p.CONSUMERS partitions CONSUMER(p, number, LAYOUT), without a LAYOUT that is None, and PRODUCER(p), of one
    warp. REGISTERS: of a thread of the other consumers and of the producer. The first consumer gets what those leave:
    as many as the others."""
    # Written out: Triton 3.6 cannot take lists of partitions apart or together.
    WARPS: gl.constexpr = gl.num_warps()
    MORE: gl.constexpr = REGISTERS[0]
    LAST: gl.constexpr = REGISTERS[1]
    if p.CONSUMERS == 1:
        gl.warp_specialize([(_consume, (p, CONSUMER, 0, LAYOUT)), (_produce, (p, PRODUCER))], [1], [LAST])
    elif p.CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (p, CONSUMER, 0, LAYOUT)), (_consume, (p, CONSUMER, 1, LAYOUT)), (_produce, (p, PRODUCER))],
            [WARPS, 1],
            [MORE, LAST],
        )
    elif p.CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume, (p, CONSUMER, 0, LAYOUT)),
                (_consume, (p, CONSUMER, 1, LAYOUT)),
                (_consume, (p, CONSUMER, 2, LAYOUT)),
                (_produce, (p, PRODUCER)),
            ],
            [WARPS, WARPS, 1],
            [MORE, MORE, LAST],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (p, CONSUMER, 0, LAYOUT)),
                (_consume, (p, CONSUMER, 1, LAYOUT)),
                (_consume, (p, CONSUMER, 2, LAYOUT)),
                (_consume, (p, CONSUMER, 3, LAYOUT)),
                (_produce, (p, PRODUCER)),
            ],
            [WARPS, WARPS, WARPS, 1],
            [MORE, MORE, MORE, LAST],
        )


@gluon.jit
def prefetch_descriptors(a_desc, b_desc, KERNEL: gl.constexpr):
    """Ask for the kernel's first three descriptors, of a, b and c, which the first load and store would wait for."""
    gl.inline_asm_elementwise(
        _prefetches(KERNEL, len(a_desc.block_type.shape), len(b_desc.block_type.shape)),
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _prefetches(kernel, a_rank, b_rank):
    """PTX: one thread asks. A descriptor is a parameter of the kernel, and its shape and strides are the next
    2 * rank parameters."""
    b_at = 1 + 2 * a_rank
    lines = [f"@leader prefetch.param.tensormap [{kernel}_param_{at}];" for at in (0, b_at, b_at + 1 + 2 * b_rank)]
    return (
        "{ .reg .pred leader; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 leader, thread, 0; "
        + " ".join(lines)
        + " mov.b32 $0, 0; }"
    )
