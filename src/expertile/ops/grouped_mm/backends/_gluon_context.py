"""What every partition of the `gluon_hopper` kernel is handed: descriptors, shared memory, and the problem."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from expertile.ops.hopper.context import context


class Shape(NamedTuple):
    """What the kernel is compiled for.

    GROUPS_POW2: a power of two >= max(G, 32). BLOCK_M = ROWS * CONSUMERS (split) or ROWS (pingpong). A_BOX: rows of a
    that one load brings, ROWS or, for a with 64 elements of K in a row of a box, a divisor of 64 rows. ADD: results are
    added to the elements of out. MORE: the steps at the end of K, of BLOCK_K each, whose operands come from more_a_desc
    and more_b_desc."""

    LAYOUT: str
    A_K_MAJOR: bool
    B_K_MAJOR: bool
    HAS_BIAS: bool
    GROUPS_POW2: int
    CONSUMERS: int
    ROWS: int
    A_BOX: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    LAG: int
    GROUP_M: int
    C_PARTS: int
    C_SLOTS: int
    DYNAMIC: bool
    ADD: bool
    MORE: int


@context
class Context:
    """What every partition needs: descriptors, shared memory, and the problem. `a_boxes` is `a_smem` cut into what one
    load brings."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    more_a_desc: tma.tensor_descriptor
    more_b_desc: tma.tensor_descriptor
    a_boxes: gl.shared_memory_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    order: gl.shared_memory_descriptor
    queue: gl.shared_memory_descriptor
    queued: gl.shared_memory_descriptor
    offs: gl.tensor
    bias: gl.tensor
    tile_counter: gl.tensor
    G: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    shape: Shape
