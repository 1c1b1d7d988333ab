"""What every partition of the `gluon_hopper` kernel is handed: descriptors, shared memory, and the problem."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from expertile.ops.hopper.context import context


@context
class Context:
    """What every partition needs: descriptors, shared memory, and the problem. `a_boxes` is `a_smem` cut into what one
    load brings. MORE: the steps at the end of K, of BLOCK_K each, whose operands come from more_a_desc and more_b_desc.
    """

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
    LAYOUT: gl.constexpr
    A_K_MAJOR: gl.constexpr
    B_K_MAJOR: gl.constexpr
    HAS_BIAS: gl.constexpr
    GROUPS_POW2: gl.constexpr
    CONSUMERS: gl.constexpr
    ROWS: gl.constexpr
    A_BOX: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    LAG: gl.constexpr
    GROUP_M: gl.constexpr
    C_PARTS: gl.constexpr
    C_SLOTS: gl.constexpr
    DYNAMIC: gl.constexpr
    ADD: gl.constexpr
    MORE: gl.constexpr
