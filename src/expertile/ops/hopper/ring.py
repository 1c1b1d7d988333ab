"""Device code that the Gluon kernels share: the ring of shared-memory stages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def advance(p, i, phase):
    """The ring's next stage after stage i, and the phase to wait for there."""
    i += 1
    phase = gl.where(i == p.STAGES, phase ^ 1, phase)
    return gl.where(i == p.STAGES, 0, i), phase
