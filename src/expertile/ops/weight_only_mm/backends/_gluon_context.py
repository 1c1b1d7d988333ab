"""What every partition of the `gluon_int4` kernel is handed: descriptors, shared memory, and the problem."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from expertile.ops.hopper.context import context


class Shape(NamedTuple):
    """What the kernel is compiled for. GROUPS_POW2: a power of two >= max(G, 32).

    GROUP: values of K that share a scale, 0 where a row has only one. GROUPS: scales of a row in one stage. SCALE: what
    the scales multiply, "fused" or "weight" (the unpacked weights), "sum" (the product of a group) or "tile" (the whole
    sum); "mxfp4": weights of that format, four scales in a word, GROUP 128 for the four. ORDERED: two consumers queue
    their products in order (`hopper/ordered_barrier.py`). PAIRS: two blocks of MXFP4 are unpacked at a time."""

    LAYOUT: str
    HAS_BIAS: bool
    HAS_ZEROS: bool
    GROUPS_POW2: int
    CONSUMERS: int
    COLS: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    HALF: int
    SLAB: int
    GROUP: int
    GROUPS: int
    SCALE: str
    STAGES: int
    GROUP_M: int
    SPLIT_K: int
    STORE_PARTS: int
    TAILS: bool
    ORDERED: bool
    PAIRS: bool
    BF16: bool


@context
class Context:
    """Shared memory: x of a stage [BLOCK_M, BLOCK_K]; w of a stage and consumer [COLS, BLOCK_K / 8] words; scales and
    zeros of a stage and group of K [BLOCK_N]; results of a consumer [BLOCK_M / STORE_PARTS, COLS]."""

    x_desc: tma.tensor_descriptor
    w_desc: tma.tensor_descriptor
    s_desc: tma.tensor_descriptor
    z_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    x_smem: gl.shared_memory_descriptor
    w_smem: gl.shared_memory_descriptor
    s_smem: gl.shared_memory_descriptor
    z_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    offs: gl.tensor
    bias: gl.tensor
    scales: gl.tensor
    zeros: gl.tensor
    G: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    shape: Shape
