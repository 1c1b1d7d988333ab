"""Device code that the Gluon kernels share: what a kernel does before its first load."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


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
