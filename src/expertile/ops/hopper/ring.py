"""Device code that the Gluon kernels share: the ring of shared-memory stages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def advance(p, i, phase):
    """The ring's next stage after stage i, and the phase to wait for there."""
    i += 1
    phase = gl.where(i == p.STAGES, phase ^ 1, phase)
    return gl.where(i == p.STAGES, 0, i), phase


@gluon.jit
def skip(p, step, k_len):
    """Give back the stages of a tile that this consumer has no rows in."""
    i = step % p.STAGES
    phase = (step // p.STAGES) & 1
    for _k in range(0, gl.maximum(k_len, 1), p.BLOCK_K):
        mbarrier.wait(p.full.index(i), phase)
        mbarrier.arrive(p.empty.index(i), count=1)
        i, phase = advance(p, i, phase)
