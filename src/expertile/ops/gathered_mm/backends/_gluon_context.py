"""What every partition of the `gluon_gather` kernel is handed: descriptors, shared memory, and the problem."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from expertile.ops.hopper.context import context


@context
class Context:
    """What every partition needs: descriptors, shared memory, the problem, and how it is laid out on the chip.

    LAYOUT, G, M, N, K, offs, BLOCK_M, BLOCK_N, GROUP_M and GROUPS_POW2 are what `grouped_mm`'s tile plan reads; queue,
    queued, tile_counter and DYNAMIC what says which tiles. ROWS: those of a tile that one consumer multiplies. MORE:
    steps at the end of K, of BLOCK_K each, whose operands come from more_a_desc and more_b_desc.
    """

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    pre_desc: tma.tensor_descriptor
    dpre_desc: tma.tensor_descriptor
    more_a_desc: tma.tensor_descriptor
    more_b_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    order: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor
    queue: gl.shared_memory_descriptor
    queued: gl.shared_memory_descriptor
    a: gl.tensor
    rows: gl.tensor
    offs: gl.tensor
    bias: gl.tensor
    slots: gl.tensor
    weights: gl.tensor
    sums: gl.tensor
    tile_counter: gl.tensor
    G: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    A_PITCH: gl.tensor
    LAYOUT: gl.constexpr
    PRODUCT: gl.constexpr
    ACTIVATION: gl.constexpr
    INTERLEAVED: gl.constexpr
    HALVED: gl.constexpr
    SAVE_PRE: gl.constexpr
    GATHERED: gl.constexpr
    B_K_MAJOR: gl.constexpr
    HAS_BIAS: gl.constexpr
    GROUPS_POW2: gl.constexpr
    BLOCK_M: gl.constexpr
    ROWS: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    GROUP_M: gl.constexpr
    C_PARTS: gl.constexpr
    C_SLOTS: gl.constexpr
    DYNAMIC: gl.constexpr
    FENCED: gl.constexpr
    MASKED: gl.constexpr
    MORE: gl.constexpr
