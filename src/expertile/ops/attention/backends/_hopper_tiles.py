"""What the Hopper kernels of attention share: which tile comes when, which keys it sees, and TMA of its rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from expertile.ops.hopper.tiles import WRAP
from expertile.ops.launch.versions import tma_load, tma_store


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a product of 64 rows, with so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def laps_end(p):
    """Where the tile numbers of a program's last lap end: those from p.tiles on stand for no tile."""
    programs = gl.num_programs(0)
    return (p.tiles + programs - 1) // programs * programs


@gluon.jit
def locate(p, t, length, heads, BLOCK: gl.constexpr, LAST_FIRST: gl.constexpr):
    """(batch, head, first row) of tile number t, of tiles of BLOCK rows of `length` in each of the p.HEADS heads of all
    sequences, `heads` of them in each. The first row is `length` where there is no such tile.

    Heads come in sections that share L2; in a section the tiles with most work come first, of all its heads. A program
    takes its tiles there and back again: more work in one lap is less in the next, or none where the last lap is not
    full.
    """
    programs = gl.num_programs(0)
    lap = t // programs
    t = gl.where((lap & 1) == 1, (2 * lap + 1) * programs - 1 - t, t)
    none = t >= p.tiles
    t = gl.minimum(t, p.tiles - 1)
    tiles_m = (length + BLOCK - 1) // BLOCK
    first = t // (p.SECTION * tiles_m) * p.SECTION
    section = gl.minimum(p.SECTION, p.HEADS - first)
    rest = t - first * tiles_m
    rank = rest // section
    place = first + (rest - rank * section)
    row = rank * BLOCK
    if LAST_FIRST:
        row = (tiles_m - 1) * BLOCK - row
    batch = place // heads
    return batch, place - batch * heads, gl.where(none, length, row)


@gluon.jit
def lengths(p, batch):
    """(first query row, queries, first key row, keys) of a sequence; rows are those of packed tensors."""
    if p.VARLEN:
        q_start = gl.load(p.cu_q_ptr + batch)
        k_start = gl.load(p.cu_k_ptr + batch)
        q_len = gl.load(p.cu_q_ptr + batch + 1) - q_start
        k_len = gl.load(p.cu_k_ptr + batch + 1) - k_start
        return q_start, q_len, k_start, k_len
    else:
        return 0, p.LQ, 0, p.LK


@gluon.jit
def key_blocks(p, m, ROWS: gl.constexpr, BLOCK: gl.constexpr, q_len, k_len):
    """(blocks, those without a mask) of keys for query rows [m, m + ROWS). There is always a masked one, the last."""
    last = k_len
    full = k_len
    if p.CAUSAL:
        # Query row i sees the keys up to i + k_len - q_len.
        last = gl.minimum(last, m + ROWS + k_len - q_len)
        full = gl.minimum(full, gl.maximum(m + 1 + k_len - q_len, 0))
    blocks = gl.maximum((last + BLOCK - 1) // BLOCK, 1)
    return blocks, gl.minimum(full // BLOCK, blocks - 1)


@gluon.jit
def mask_keys(s, n, last_key, layout: gl.constexpr):
    """Scores with minus infinity where key n + column lies after the row's last key."""
    cols = n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.where(gl.expand_dims(cols, 0) <= gl.expand_dims(last_key, 1), s, float("-inf"))


@gluon.jit
def load_rows(desc, batch, head, start, length, row, bar, dst, VARLEN: gl.constexpr):
    """TMA of a box of rows from row `row` of a sequence on; zeros past its end."""
    if VARLEN:
        at = [WRAP, start + length, WRAP - (length - row), head, 0]
        tma_load(desc, at, bar, dst)
    else:
        tma_load(desc, [batch, head, row, 0], bar, dst)


@gluon.jit
def store_rows(desc, batch, head, start, length, row, src, VARLEN: gl.constexpr):
    """TMA of a box of rows to row `row` of a sequence on; what lies past its end is dropped."""
    if VARLEN:
        at = [WRAP, start + length, WRAP - (length - row), head, 0]
        tma_store(desc, at, src)
    else:
        tma_store(desc, [batch, head, row, 0], src)
