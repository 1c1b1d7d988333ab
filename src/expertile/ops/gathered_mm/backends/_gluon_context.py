"""What every partition of the `gluon_gather` kernel is handed: descriptors, shared memory, and the problem."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from expertile.ops.hopper.context import context


class Shape(NamedTuple):
    """What the kernel is compiled for. GROUPS_POW2: a power of two >= max(G, 32). ROWS: of a tile, what one consumer
    multiplies. MORE: steps at the end of K, of BLOCK_K each, whose operands come from more_a_desc and more_b_desc."""

    LAYOUT: str
    PRODUCT: str
    ACTIVATION: str
    INTERLEAVED: bool
    HALVED: bool
    SAVE_PRE: bool
    GATHERED: str
    B_K_MAJOR: bool
    HAS_BIAS: bool
    GROUPS_POW2: int
    BLOCK_M: int
    ROWS: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    GROUP_M: int
    C_PARTS: int
    C_SLOTS: int
    DYNAMIC: bool
    FENCED: bool
    MASKED: bool
    MORE: int


@context
class Context:
    """What every partition needs: descriptors, shared memory, the problem, and how it is laid out on the chip.

    LAYOUT, G, M, N, K, offs, BLOCK_M, BLOCK_N, GROUP_M and GROUPS_POW2 are what `grouped_mm`'s tile plan reads; queue,
    queued, tile_counter and DYNAMIC what says which tiles.
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
    shape: Shape
