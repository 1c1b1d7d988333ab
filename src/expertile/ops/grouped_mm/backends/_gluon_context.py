"""What every partition of the `gluon_hopper` kernel is handed: descriptors, shared memory, and the problem."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Context:
    """What every partition needs: descriptors, shared memory, and the problem. `a_boxes` is `a_smem` cut into what one
    load brings."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    a_boxes: gl.shared_memory_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    queue: gl.shared_memory_descriptor
    queued: gl.shared_memory_descriptor
    offs: gl.tensor
    bias: gl.tensor
    tickets: gl.tensor
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

    @gluon.constexpr_function
    def __init__(
        self, a_desc, b_desc, c_desc, a_boxes, a_smem, b_smem, c_smem, full, empty, turn, queue, queued, offs, bias,
        tickets, G, M, N, K, LAYOUT, A_K_MAJOR, B_K_MAJOR, HAS_BIAS, GROUPS_POW2, CONSUMERS, ROWS, A_BOX, BLOCK_M,
        BLOCK_N, BLOCK_K, STAGES, LAG, GROUP_M, C_PARTS, C_SLOTS, DYNAMIC,
    ):  # fmt: skip
        self.a_desc = a_desc
        self.b_desc = b_desc
        self.c_desc = c_desc
        self.a_boxes = a_boxes
        self.a_smem = a_smem
        self.b_smem = b_smem
        self.c_smem = c_smem
        self.full = full
        self.empty = empty
        self.turn = turn
        self.queue = queue
        self.queued = queued
        self.offs = offs
        self.bias = bias
        self.tickets = tickets
        self.G = G
        self.M = M
        self.N = N
        self.K = K
        self.LAYOUT = gl.constexpr(LAYOUT)
        self.A_K_MAJOR = gl.constexpr(A_K_MAJOR)
        self.B_K_MAJOR = gl.constexpr(B_K_MAJOR)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.GROUPS_POW2 = gl.constexpr(GROUPS_POW2)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.ROWS = gl.constexpr(ROWS)
        self.A_BOX = gl.constexpr(A_BOX)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.BLOCK_K = gl.constexpr(BLOCK_K)
        self.STAGES = gl.constexpr(STAGES)
        self.LAG = gl.constexpr(LAG)
        self.GROUP_M = gl.constexpr(GROUP_M)
        self.C_PARTS = gl.constexpr(C_PARTS)
        self.C_SLOTS = gl.constexpr(C_SLOTS)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
