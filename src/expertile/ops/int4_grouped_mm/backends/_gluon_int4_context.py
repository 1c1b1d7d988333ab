"""What every partition of the `gluon_int4` kernel is handed: descriptors, shared memory, and the problem."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Context:
    """Shared memory: x of a stage [BLOCK_M, BLOCK_K]; w of a stage and consumer [COLS, BLOCK_K / 8] words; scales and
    zeros of a stage and group of K [BLOCK_N]; results of a consumer [BLOCK_M / STORE_PARTS, COLS].

    GROUP: values of K that share a scale, 0 where a row has only one. GROUPS: scales of a row in one stage.
    SCALE: what the scales multiply, "fused" or "weight" (the unpacked weights), "sum" (the product of a group) or
    "tile" (the whole sum). TURNS: two consumers queue their products in turns (`hopper/turns.py`).
    """

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
    LAYOUT: gl.constexpr
    HAS_BIAS: gl.constexpr
    HAS_ZEROS: gl.constexpr
    GROUPS_POW2: gl.constexpr
    CONSUMERS: gl.constexpr
    COLS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr
    HALF: gl.constexpr
    SLAB: gl.constexpr
    GROUP: gl.constexpr
    GROUPS: gl.constexpr
    SCALE: gl.constexpr
    STAGES: gl.constexpr
    GROUP_M: gl.constexpr
    SPLIT_K: gl.constexpr
    STORE_PARTS: gl.constexpr
    TAILS: gl.constexpr
    TURNS: gl.constexpr
    BF16: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, x_desc, w_desc, s_desc, z_desc, c_desc, x_smem, w_smem, s_smem, z_smem, c_smem, full, empty, offs, bias,
        scales, zeros, G, M, N, K, HAS_BIAS, HAS_ZEROS, GROUPS_POW2, CONSUMERS, COLS, BLOCK_M, BLOCK_K, HALF, SLAB,
        GROUP, SCALE, STAGES, GROUP_M, SPLIT_K, STORE_PARTS, TAILS, TURNS,
    ):  # fmt: skip
        self.x_desc = x_desc
        self.w_desc = w_desc
        self.s_desc = s_desc
        self.z_desc = z_desc
        self.c_desc = c_desc
        self.x_smem = x_smem
        self.w_smem = w_smem
        self.s_smem = s_smem
        self.z_smem = z_smem
        self.c_smem = c_smem
        self.full = full
        self.empty = empty
        self.offs = offs
        self.bias = bias
        self.scales = scales
        self.zeros = zeros
        self.G = G
        self.M = M
        self.N = N
        self.K = K
        self.LAYOUT = gl.constexpr("ragged_m")
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.HAS_ZEROS = gl.constexpr(HAS_ZEROS)
        self.GROUPS_POW2 = gl.constexpr(GROUPS_POW2)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.COLS = gl.constexpr(COLS)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(COLS * CONSUMERS)
        self.BLOCK_K = gl.constexpr(BLOCK_K)
        self.HALF = gl.constexpr(HALF)
        self.SLAB = gl.constexpr(SLAB)
        self.GROUP = gl.constexpr(GROUP)
        self.GROUPS = gl.constexpr(BLOCK_K // GROUP if GROUP else 0)
        self.SCALE = gl.constexpr(SCALE)
        self.STAGES = gl.constexpr(STAGES)
        self.GROUP_M = gl.constexpr(GROUP_M)
        self.SPLIT_K = gl.constexpr(SPLIT_K)
        self.STORE_PARTS = gl.constexpr(STORE_PARTS)
        self.TAILS = gl.constexpr(TAILS)
        self.TURNS = gl.constexpr(TURNS)
        self.BF16 = gl.constexpr(x_desc.dtype == gl.bfloat16)
