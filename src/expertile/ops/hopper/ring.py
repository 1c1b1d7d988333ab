"""Device code that the Gluon kernels share: the ring of shared-memory stages, and a tile's loop over them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait


@gluon.jit
def advance(p, i, phase):
    """The ring's next stage after stage i, and the phase to wait for there."""
    i += 1
    phase = gl.where(i == p.STAGES, phase ^ 1, phase)
    return gl.where(i == p.STAGES, 0, i), phase


@gluon.jit
def steps_of(p, k_len):
    """Steps of a K loop. An empty group has one, of zeros from outside its descriptors."""
    return (gl.maximum(k_len, 1) + p.BLOCK_K - 1) // p.BLOCK_K


@gluon.jit
def multiply_rest(p, BATCH: gl.constexpr, acc, i, phase, k_len, PART: gl.constexpr, NEXT: gl.constexpr):
    """A tile's sum: acc, to which the products of stage i are under way, and those of all later steps.

    BATCH(p, acc, i, phase, PART, first) queues the wgmmas of stage i, and waits for those before.
    NEXT: the consumer that is next in order; None if the consumers run freely. This consumer arrives for NEXT when its
    last products are queued, not when they are done: NEXT's products are there when the tensor cores come free. It
    arrives no earlier, because the phases of `full` are ambiguous to NEXT until this tile's have all been seen.
    """
    for _k in range(p.BLOCK_K, k_len, p.BLOCK_K):
        i, phase = advance(p, i, phase)
        acc = BATCH(p, acc, i, phase, PART, False)
        # The batch before this one is done, so its stage is free. (Computed, not carried as `previous = i`: Triton 3.6
        # drops a loop-carried name that starts as an alias of another.)
        mbarrier.arrive(p.empty.index(gl.where(i == 0, p.STAGES - 1, i - 1)), count=1)
    if NEXT is not None:
        mbarrier.arrive(p.order.index(NEXT), count=1)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(p.empty.index(i), count=1)
    return acc


@gluon.jit
def skip(p, step, k_len):
    """Give back the stages of a tile that this consumer has no rows in."""
    i = step % p.STAGES
    phase = (step // p.STAGES) & 1
    for _k in range(0, gl.maximum(k_len, 1), p.BLOCK_K):
        mbarrier.wait(p.full.index(i), phase)
        mbarrier.arrive(p.empty.index(i), count=1)
        i, phase = advance(p, i, phase)
