"""Device code that the Gluon kernels share: tensors cut along their columns, so that results leave a part at a time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def halves(x):
    """The left and the right half of a tensor's columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def beside(left, right):
    """The inverse of `halves`."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


@gluon.jit
def pieces(x, PARTS: gl.constexpr):
    """The tensor cut into PARTS pieces along its columns, a power of two."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = halves(x)
        return pieces(left, PARTS // 2) + pieces(right, PARTS // 2)
