"""What every partition of the Hopper kernels of attention is handed: descriptors, shared memory, and the problem."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from expertile.ops.hopper.context import context


class ForwardShape(NamedTuple):
    """What the forward kernel is compiled for: tiles of BLOCK_M queries, ROWS for each consumer, in Q_SLOTS buffers,
    and BLOCK_N keys in STAGES."""

    CAUSAL: bool
    VARLEN: bool
    D: int
    CONSUMERS: int
    ROWS: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    Q_SLOTS: int


class PassShape(NamedTuple):
    """What the backward kernel is compiled for: dQ, or dK and dV; HELD rows, ROWS for each consumer, in SLOTS buffers,
    and blocks of BLOCK rows in STAGES. AHEAD: see `_dkdv_block`."""

    DQ: bool
    CAUSAL: bool
    VARLEN: bool
    D: int
    CONSUMERS: int
    ROWS: int
    HELD: int
    BLOCK: int
    STAGES: int
    SLOTS: int
    AHEAD: bool
    STAT_PAD: int


@context
class Forward:
    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    q_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    lse_ptr: gl.tensor
    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    tiles: gl.tensor
    H: gl.tensor
    GROUP: gl.tensor
    HEADS: gl.tensor
    SECTION: gl.tensor
    LQ: gl.tensor
    LK: gl.tensor
    lse_stride_b: gl.tensor
    lse_stride_h: gl.tensor
    scale_log2: gl.tensor
    shape: ForwardShape


@context
class Backward:
    """x, y: the rows that consumers hold (K and V, or Q and dO); a, b: the blocks gone over (Q and dO, or K and V)."""

    x_desc: tma.tensor_descriptor
    y_desc: tma.tensor_descriptor
    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    dx_desc: tma.tensor_descriptor
    dy_desc: tma.tensor_descriptor
    lse_desc: tma.tensor_descriptor
    delta_desc: tma.tensor_descriptor
    x_smem: gl.shared_memory_descriptor
    y_smem: gl.shared_memory_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    lse_smem: gl.shared_memory_descriptor
    delta_smem: gl.shared_memory_descriptor
    held_full: gl.shared_memory_descriptor
    held_empty: gl.shared_memory_descriptor
    a_full: gl.shared_memory_descriptor
    a_empty: gl.shared_memory_descriptor
    b_full: gl.shared_memory_descriptor
    b_empty: gl.shared_memory_descriptor
    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    tiles: gl.tensor
    H: gl.tensor
    GROUP: gl.tensor
    HEADS: gl.tensor
    SECTION: gl.tensor
    LQ: gl.tensor
    LK: gl.tensor
    stat_stride_b: gl.tensor
    stat_stride_h: gl.tensor
    scale: gl.tensor
    scale_log2: gl.tensor
    shape: PassShape
