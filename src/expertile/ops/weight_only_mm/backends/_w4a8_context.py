"""What every partition of the `gluon_w4a8` kernel is handed: descriptors, shared memory, and the problem."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from expertile.ops.hopper.context import context


class Shape(NamedTuple):
    """What the kernel is compiled for. GROUPS_POW2: a power of two >= max(G, 32).

    FORMAT: "mxfp4_fp8" or "int4". RECIPE: scales of x, one for each 1x128 ("vector") or each row ("row"). TOKENS: rows
    of x in one product, BLOCK_M or half of it. ORDERED: two consumers queue their products in order
    (`hopper/ordered_barrier.py`). AHEAD: the next words are read while a product runs."""

    LAYOUT: str
    FORMAT: str
    RECIPE: str
    HAS_BIAS: bool
    GROUPS_POW2: int
    CONSUMERS: int
    COLS: int
    BLOCK_M: int
    BLOCK_N: int
    TOKENS: int
    STAGES: int
    GROUP_M: int
    SPLIT_K: int
    STORE_PARTS: int
    ORDERED: bool
    AHEAD: bool


@context
class Context:
    """Shared memory: x of a stage [BLOCK_M, 128]; w of a stage and consumer [COLS, 16] words; scales of a stage, of
    w [BLOCK_N] and of x [BLOCK_M]; results of a consumer [TOKENS / STORE_PARTS, 64]. SCALE_GROUPS: elements of the
    scales of a row of w."""

    x_desc: tma.tensor_descriptor
    w_desc: tma.tensor_descriptor
    s_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    x_smem: gl.shared_memory_descriptor
    w_smem: gl.shared_memory_descriptor
    s_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    scale_x_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    offs: gl.tensor
    bias: gl.tensor
    row_scales: gl.tensor
    scale_x: gl.tensor
    G: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    SCALE_GROUPS: gl.tensor
    sx_m: gl.tensor
    sx_k: gl.tensor
    shape: Shape
