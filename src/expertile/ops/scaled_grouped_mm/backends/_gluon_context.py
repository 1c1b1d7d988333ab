"""What every partition of the `gluon_fp8` kernel is handed: descriptors, shared memory, scales, and the problem."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Context:
    """Sizes and strides count elements. `sb_g`, `sb_n`, `sb_k`: strides of scale_b over groups, columns (or blocks of
    128 columns) and blocks of k; `sa_m`, `sa_k`: of scale_a over rows and blocks of k. `a_boxes` is `a_smem` cut into
    what one load brings, A_BOX rows. A tile has HALVES of COLS columns; with two, two consumers take TURNS
    (`hopper/turns.py`), and the last wave may be of half tiles: TAIL (`units.py`; a split K has other means against a
    short last wave)."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    a_boxes: gl.shared_memory_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    c_smem: gl.shared_memory_descriptor
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
    LAYOUT: gl.constexpr
    RECIPE: gl.constexpr
    HAS_BIAS: gl.constexpr
    GROUPS_POW2: gl.constexpr
    ROWS: gl.constexpr
    A_BOX: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    GROUP_M: gl.constexpr
    SPLIT_K: gl.constexpr
    PAIRS: gl.constexpr
    COLS: gl.constexpr
    HALVES: gl.constexpr
    TURNS: gl.constexpr
    TAIL: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, a_desc, b_desc, c_desc, a_boxes, a_smem, b_smem, c_smem, full, empty, offs, bias, scale_a, scale_b,
        G, M, N, K, sa_m, sa_k, sb_g, sb_n, sb_k, LAYOUT, RECIPE, HAS_BIAS, GROUPS_POW2, ROWS, A_BOX, BLOCK_M, BLOCK_N,
        STAGES, GROUP_M, SPLIT_K, PAIRS, COLS, HALVES,
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
        self.offs = offs
        self.bias = bias
        self.scale_a = scale_a
        self.scale_b = scale_b
        self.G = G
        self.M = M
        self.N = N
        self.K = K
        self.sa_m = sa_m
        self.sa_k = sa_k
        self.sb_g = sb_g
        self.sb_n = sb_n
        self.sb_k = sb_k
        self.LAYOUT = gl.constexpr(LAYOUT)
        self.RECIPE = gl.constexpr(RECIPE)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.GROUPS_POW2 = gl.constexpr(GROUPS_POW2)
        self.ROWS = gl.constexpr(ROWS)
        self.A_BOX = gl.constexpr(A_BOX)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.GROUP_M = gl.constexpr(GROUP_M)
        self.SPLIT_K = gl.constexpr(SPLIT_K)
        self.PAIRS = gl.constexpr(PAIRS)
        self.COLS = gl.constexpr(COLS)
        self.HALVES = gl.constexpr(HALVES)
        self.TURNS = gl.constexpr(HALVES == 2 and BLOCK_M > ROWS)
        self.TAIL = gl.constexpr(HALVES == 2 and SPLIT_K == 1)
