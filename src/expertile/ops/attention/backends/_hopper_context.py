"""What every partition of the Hopper kernels of attention is handed: descriptors, shared memory, and the problem."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate


@aggregate
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
    CAUSAL: gl.constexpr
    VARLEN: gl.constexpr
    D: gl.constexpr
    CONSUMERS: gl.constexpr
    ROWS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    Q_SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q_desc, k_desc, v_desc, o_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        lse_ptr, cu_q_ptr, cu_k_ptr, tiles, H, GROUP, HEADS, SECTION, LQ, LK, lse_stride_b, lse_stride_h, scale_log2,
        CAUSAL, VARLEN, D, CONSUMERS, ROWS, BLOCK_M, BLOCK_N, STAGES, Q_SLOTS,
    ):  # fmt: skip
        self.q_desc = q_desc
        self.k_desc = k_desc
        self.v_desc = v_desc
        self.o_desc = o_desc
        self.q_smem = q_smem
        self.k_smem = k_smem
        self.v_smem = v_smem
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.lse_ptr = lse_ptr
        self.cu_q_ptr = cu_q_ptr
        self.cu_k_ptr = cu_k_ptr
        self.tiles = tiles
        self.H = H
        self.GROUP = GROUP
        self.HEADS = HEADS
        self.SECTION = SECTION
        self.LQ = LQ
        self.LK = LK
        self.lse_stride_b = lse_stride_b
        self.lse_stride_h = lse_stride_h
        self.scale_log2 = scale_log2
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.VARLEN = gl.constexpr(VARLEN)
        self.D = gl.constexpr(D)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.ROWS = gl.constexpr(ROWS)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.Q_SLOTS = gl.constexpr(Q_SLOTS)


@aggregate
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
    CAUSAL: gl.constexpr
    VARLEN: gl.constexpr
    D: gl.constexpr
    CONSUMERS: gl.constexpr
    ROWS: gl.constexpr
    HELD: gl.constexpr
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    SLOTS: gl.constexpr
    AHEAD: gl.constexpr
    STAT_PAD: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, x_desc, y_desc, a_desc, b_desc, dx_desc, dy_desc, lse_desc, delta_desc, x_smem, y_smem, a_smem, b_smem,
        lse_smem, delta_smem, held_full, held_empty, a_full, a_empty, b_full, b_empty, lse_ptr, delta_ptr, cu_q_ptr,
        cu_k_ptr, tiles, H, GROUP, HEADS, SECTION, LQ, LK, stat_stride_b, stat_stride_h, scale, scale_log2, CAUSAL,
        VARLEN, D, CONSUMERS, ROWS, HELD, BLOCK, STAGES, SLOTS, AHEAD, STAT_PAD,
    ):  # fmt: skip
        self.x_desc = x_desc
        self.y_desc = y_desc
        self.a_desc = a_desc
        self.b_desc = b_desc
        self.dx_desc = dx_desc
        self.dy_desc = dy_desc
        self.lse_desc = lse_desc
        self.delta_desc = delta_desc
        self.x_smem = x_smem
        self.y_smem = y_smem
        self.a_smem = a_smem
        self.b_smem = b_smem
        self.lse_smem = lse_smem
        self.delta_smem = delta_smem
        self.held_full = held_full
        self.held_empty = held_empty
        self.a_full = a_full
        self.a_empty = a_empty
        self.b_full = b_full
        self.b_empty = b_empty
        self.lse_ptr = lse_ptr
        self.delta_ptr = delta_ptr
        self.cu_q_ptr = cu_q_ptr
        self.cu_k_ptr = cu_k_ptr
        self.tiles = tiles
        self.H = H
        self.GROUP = GROUP
        self.HEADS = HEADS
        self.SECTION = SECTION
        self.LQ = LQ
        self.LK = LK
        self.stat_stride_b = stat_stride_b
        self.stat_stride_h = stat_stride_h
        self.scale = scale
        self.scale_log2 = scale_log2
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.VARLEN = gl.constexpr(VARLEN)
        self.D = gl.constexpr(D)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.ROWS = gl.constexpr(ROWS)
        self.HELD = gl.constexpr(HELD)
        self.BLOCK = gl.constexpr(BLOCK)
        self.STAGES = gl.constexpr(STAGES)
        self.SLOTS = gl.constexpr(SLOTS)
        self.AHEAD = gl.constexpr(AHEAD)
        self.STAT_PAD = gl.constexpr(STAT_PAD)
