"""What every partition of the `gluon_gather` kernel is handed: descriptors, shared memory, and the problem."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Context:
    """What every partition needs: descriptors, shared memory, the problem, and how it is laid out on the chip.

    LAYOUT, G, M, N, K, offs, BLOCK_M, BLOCK_N, GROUP_M and GROUPS_POW2 are what `grouped_mm`'s tile plan reads; queue,
    queued, tickets and DYNAMIC what says which tiles. ROWS: those of a tile that one consumer multiplies.
    """

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    out_desc: tma.tensor_descriptor
    pre_desc: tma.tensor_descriptor
    dpre_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
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
    tickets: gl.tensor
    G: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    A_PITCH: gl.tensor
    LAYOUT: gl.constexpr
    PRODUCT: gl.constexpr
    ACTIVATION: gl.constexpr
    INTERLEAVED: gl.constexpr
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

    @gluon.constexpr_function
    def __init__(
        self, a_desc, b_desc, out_desc, pre_desc, dpre_desc, a_smem, b_smem, c_smem, full, empty, turn, loaded, queue,
        queued, a, rows, offs, bias, slots, weights, sums, tickets, G, M, N, K, A_PITCH, LAYOUT, PRODUCT, ACTIVATION,
        INTERLEAVED, SAVE_PRE, GATHERED, B_K_MAJOR, HAS_BIAS, GROUPS_POW2, BLOCK_M, ROWS, BLOCK_N, BLOCK_K, STAGES,
        GROUP_M, C_PARTS, C_SLOTS, DYNAMIC, FENCED, MASKED,
    ):  # fmt: skip
        self.a_desc = a_desc
        self.b_desc = b_desc
        self.out_desc = out_desc
        self.pre_desc = pre_desc
        self.dpre_desc = dpre_desc
        self.a_smem = a_smem
        self.b_smem = b_smem
        self.c_smem = c_smem
        self.full = full
        self.empty = empty
        self.turn = turn
        self.loaded = loaded
        self.queue = queue
        self.queued = queued
        self.a = a
        self.rows = rows
        self.offs = offs
        self.bias = bias
        self.slots = slots
        self.weights = weights
        self.sums = sums
        self.tickets = tickets
        self.G = G
        self.M = M
        self.N = N
        self.K = K
        self.A_PITCH = A_PITCH
        self.LAYOUT = gl.constexpr(LAYOUT)
        self.PRODUCT = gl.constexpr(PRODUCT)
        self.ACTIVATION = gl.constexpr(ACTIVATION)
        self.INTERLEAVED = gl.constexpr(INTERLEAVED)
        self.SAVE_PRE = gl.constexpr(SAVE_PRE)
        self.GATHERED = gl.constexpr(GATHERED)
        self.B_K_MAJOR = gl.constexpr(B_K_MAJOR)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.GROUPS_POW2 = gl.constexpr(GROUPS_POW2)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.ROWS = gl.constexpr(ROWS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.BLOCK_K = gl.constexpr(BLOCK_K)
        self.STAGES = gl.constexpr(STAGES)
        self.GROUP_M = gl.constexpr(GROUP_M)
        self.C_PARTS = gl.constexpr(C_PARTS)
        self.C_SLOTS = gl.constexpr(C_SLOTS)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.FENCED = gl.constexpr(FENCED)
        self.MASKED = gl.constexpr(MASKED)
