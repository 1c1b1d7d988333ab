"""What every partition of the `gluon_fp8` kernel is handed: descriptors, shared memory, scales, and the problem."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from expertile.ops.hopper.context import context


class Shape(NamedTuple):
    """What the kernel is compiled for.

    GROUPS_POW2: a power of two >= max(G, 32). BLOCK_M = ROWS * CONSUMERS; A_BOX: rows of a that one load brings, which
    divide ROWS, and are ROWS where there are more consumers. A tile has HALVES of COLS columns, BLOCK_N in all, which
    divides 128 or is 256. ORDERED: three consumers, or two of halves, queue their products in order
    (`hopper/ordered_barrier.py`). TAIL: the last wave may be of half tiles (`hopper/units.py`); a split K needs no
    TAIL."""

    LAYOUT: str
    RECIPE: str
    HAS_BIAS: bool
    GROUPS_POW2: int
    ROWS: int
    A_BOX: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    GROUP_M: int
    SPLIT_K: int
    PAIRS: bool
    COLS: int
    HALVES: int
    CONSUMERS: int
    ORDERED: bool
    TAIL: bool


@context
class Context:
    """Sizes and strides count elements. `sb_g`, `sb_n`, `sb_k`: strides of scale_b over groups, columns (or blocks of
    128 columns) and blocks of k; `sa_m`, `sa_k`: of scale_a over rows and blocks of k. `a_boxes` is `a_smem` cut into
    what one load brings."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    a_boxes: gl.shared_memory_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    scale_a_smem: gl.shared_memory_descriptor
    scale_b_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    offs: gl.tensor
    bias: gl.tensor
    scale_a: gl.tensor
    scale_b: gl.tensor
    G: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    sa_m: gl.tensor
    sa_k: gl.tensor
    sb_g: gl.tensor
    sb_n: gl.tensor
    sb_k: gl.tensor
    shape: Shape
