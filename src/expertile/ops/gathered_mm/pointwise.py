"""The memory-bound passes around a grouped product: rows copied into expert order, the gated activation, its backward.

    gather_rows       out[r] = x[rows[r]]                                               2 · R · K elements
    gated_activation  act[r] = f(gate, up) of pre[r]                                    3 · R · I elements
    gated_backward    from a [R, I], the gradient of act without its weight w, and pre: 6 · R · I elements
                      dpre[r] = f'(pre[r]) (w a[r]),  act_w[r] = w f(pre[r]),  dweights[slots[r]] = <a[r], f(pre[r])>
    add_row_sums      dweights[slots[r]] = Σ_n sums[n, r], what fused epilogues leave of each column of tiles

for r < offs[-1]; rows past it are neither read nor written. float32 inside, rounded once. A few FLOPs an element, so
memory limits them: time ≥ bytes / bandwidth. A gathered row counts as read once for each r; repeated tokens come from
L2 as far as it reaches. Row sums are made by one program each, in a fixed order.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from expertile.ops.gathered_mm.activation_kernel import activate, activate_backward, deinterleave
from expertile.ops.launch.device import on_kernels
from expertile.ops.launch.kernels import launch
from expertile.ops.launch.shape import constants
from expertile.ragged import power_of_two


@dataclass(frozen=True)
class Config:
    """`elements` of a program's tile, at most `columns` of them in a row."""

    elements: int
    columns: int


# Tiles of 16 KB leave every thread of 4 warps eight 16-byte loads in flight.
GATHER = Config(8192, 2048)
ACTIVATION = Config(2048, 1024)
BACKWARD = Config(1024, 1024)
_LEAST_COLUMNS = 256  # of a tile without a mask
_SUMS = 256  # rows whose sums a program adds


class Shape(NamedTuple):
    """What a kernel of a gated activation is compiled for: tiles of BLOCK_ROWS x BLOCK_COLS; EVEN: none reaches past a
    row. For adapters (`low_rank`): RANK of the one of pre, NEXT_RANK of the one of act, and GROUPS_P2, a power of two,
    the number of experts or more."""

    ACTIVATION: str
    INTERLEAVED: bool
    BLOCK_ROWS: int
    BLOCK_COLS: int
    EVEN: bool
    RANK: int = 0
    NEXT_RANK: int = 0
    GROUPS_P2: int = 0


@triton.jit
def _gather_rows_kernel(tensors, scalars, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, EVEN: tl.constexpr):
    x_ptr, rows_ptr, offs_ptr, out_ptr = tensors
    groups, K, x_stride = scalars
    chunks = tl.cdiv(K, BLOCK_COLS)
    end = tl.load(offs_ptr + groups - 1)
    first = tl.program_id(0) // chunks * BLOCK_ROWS
    if first < end:
        row = first + tl.arange(0, BLOCK_ROWS)
        col = (tl.program_id(0) % chunks * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
        used = row < end
        inside = used[:, None] if EVEN else used[:, None] & (col < K)
        source = tl.load(rows_ptr + row, mask=used, other=0).to(tl.int64)[:, None] * x_stride
        block = tl.load(x_ptr + source + col, mask=inside)
        tl.store(out_ptr + row.to(tl.int64)[:, None] * K + col, block, mask=inside)


@triton.jit
def _activation_kernel(tensors, scalars, SHAPE: tl.constexpr):
    s: tl.constexpr = constants(Shape, SHAPE)
    pre_ptr, offs_ptr, act_ptr = tensors
    groups, I = scalars
    chunks = tl.cdiv(I, s.BLOCK_COLS)
    end = tl.load(offs_ptr + groups - 1)
    first = tl.program_id(0) // chunks * s.BLOCK_ROWS
    if first < end:
        row = first + tl.arange(0, s.BLOCK_ROWS)
        start = tl.program_id(0) % chunks * s.BLOCK_COLS
        col = (start + tl.arange(0, s.BLOCK_COLS))[None, :]
        at = row.to(tl.int64)[:, None] * I
        inside = (row < end)[:, None] if s.EVEN else (row < end)[:, None] & (col < I)
        gate, up = load_pre(pre_ptr, at, start, (row < end)[:, None], I, s.INTERLEAVED, s.BLOCK_COLS, s.EVEN)
        value = activate(gate, up, s.ACTIVATION)
        tl.store(act_ptr + at + col, value.to(act_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(tensors, scalars, SHAPE: tl.constexpr):
    """One program for whole rows, so that it alone sums each of them."""
    s: tl.constexpr = constants(Shape, SHAPE)
    a_ptr, pre_ptr, slots_ptr, weights_ptr, offs_ptr, dpre_ptr, act_w_ptr, dweights_ptr = tensors
    groups, I = scalars
    end = tl.load(offs_ptr + groups - 1)
    first = tl.program_id(0) * s.BLOCK_ROWS
    if first < end:
        row = first + tl.arange(0, s.BLOCK_ROWS)
        used = row < end
        slot = tl.load(slots_ptr + row, mask=used, other=0)
        weight = tl.load(weights_ptr + slot, mask=used, other=0.0)[:, None]
        at = row.to(tl.int64)[:, None] * I
        total = tl.zeros((s.BLOCK_ROWS,), tl.float32)
        for start in range(0, I, s.BLOCK_COLS):
            col = (start + tl.arange(0, s.BLOCK_COLS))[None, :]
            inside = used[:, None] if s.EVEN else used[:, None] & (col < I)
            grad = tl.load(a_ptr + at + col, mask=inside, other=0.0).to(tl.float32)
            gate, up = load_pre(pre_ptr, at, start, used[:, None], I, s.INTERLEAVED, s.BLOCK_COLS, s.EVEN)
            value, d_gate, d_up = activate_backward(gate, up, grad * weight, s.ACTIVATION)
            total += tl.sum(grad * value, 1)
            # a may be act_w and pre may be dpre, and another thread may store an element than loads it.
            tl.debug_barrier()
            tl.store(act_w_ptr + at + col, (value * weight).to(act_w_ptr.dtype.element_ty), mask=inside)
            store_pre(dpre_ptr, at, start, used[:, None], I, d_gate, d_up, s.INTERLEAVED, s.BLOCK_COLS, s.EVEN)
        tl.store(dweights_ptr + slot, total, mask=used)


@triton.jit
def load_pre(pre_ptr, at, start, used, I, INTERLEAVED: tl.constexpr, BLOCK_COLS: tl.constexpr, EVEN: tl.constexpr):
    """(gate, up) [rows, BLOCK_COLS] in float32, columns from `start` on; `at` [rows, 1] is row · I, `used` a mask."""
    if INTERLEAVED:
        cols = (2 * start + tl.arange(0, 2 * BLOCK_COLS))[None, :]
        inside = used if EVEN else used & (cols < 2 * I)
        gate, up = deinterleave(tl.load(pre_ptr + 2 * at + cols, mask=inside, other=0.0))
    else:
        col = (start + tl.arange(0, BLOCK_COLS))[None, :]
        inside = used if EVEN else used & (col < I)
        gate = tl.load(pre_ptr + 2 * at + col, mask=inside, other=0.0)
        up = tl.load(pre_ptr + 2 * at + I + col, mask=inside, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def store_pre(
    pre_ptr, at, start, used, I, gate, up, INTERLEAVED: tl.constexpr, BLOCK_COLS: tl.constexpr, EVEN: tl.constexpr
):
    """The inverse of `load_pre`."""
    gate, up = gate.to(pre_ptr.dtype.element_ty), up.to(pre_ptr.dtype.element_ty)
    if INTERLEAVED:
        cols = (2 * start + tl.arange(0, 2 * BLOCK_COLS))[None, :]
        inside = used if EVEN else used & (cols < 2 * I)
        tl.store(pre_ptr + 2 * at + cols, tl.interleave(gate, up), mask=inside)
    else:
        col = (start + tl.arange(0, BLOCK_COLS))[None, :]
        inside = used if EVEN else used & (col < I)
        tl.store(pre_ptr + 2 * at + col, gate, mask=inside)
        tl.store(pre_ptr + 2 * at + I + col, up, mask=inside)


@triton.jit(do_not_specialize=["groups", "rows", "tiles"])
def _add_kernel(sums_ptr, slots_ptr, offs_ptr, dweights_ptr, groups, rows, tiles, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = r < tl.load(offs_ptr + groups - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(tiles):
        total += tl.load(sums_ptr + r, mask=used, other=0.0)
        sums_ptr += rows
    tl.store(dweights_ptr + tl.load(slots_ptr + r, mask=used, other=0), total, mask=used)


def column_block(cols: int, most: int) -> int:
    """Columns of a tile: the largest power of two, at most `most`, that divides `cols`, so that nothing is masked; if
    that is small, which would need many programs, the one that covers `cols`."""
    divisor = min(most, cols & -cols)
    if divisor >= min(_LEAST_COLUMNS, most):
        return divisor
    return min(most, power_of_two(cols, 16))


def _cut(cols: int, config: Config) -> tuple[int, int, bool]:
    """(rows, columns) of a program's tile of rows of `cols`, and whether its columns divide them."""
    across = column_block(cols, config.columns)
    return max(1, config.elements // across), across, cols % across == 0


def gather_rows(x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
    """x[rows], a fresh contiguous [R, K]; rows past offs[-1] are left as they come."""
    x = x if x.stride(1) == 1 else x.contiguous()
    count, cols = rows.shape[0], x.shape[1]
    out = x.new_empty((count, cols))
    tile = _cut(cols, GATHER)
    programs = -(-count // tile[0]) * -(-cols // tile[1])
    if programs:
        numbers = (offs.shape[0], cols, x.stride(0))
        launch(_gather_rows_kernel, programs, (x, rows, offs, out), numbers, tile, num_warps=4)
    return out


def ordered(x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
    """`gather_rows`, by torch where the kernels do not run."""
    return gather_rows(x, rows, offs) if on_kernels(x) else x.index_select(0, rows)


def gated_activation(pre: Tensor, offs: Tensor, act: Tensor, activation: str, interleaved: bool) -> None:
    """act [R, I] = f(pre [R, 2I]), both contiguous."""
    count, inner = act.shape
    tile = _cut(inner, ACTIVATION)
    tensors, scalars, shape = (pre, offs, act), (offs.shape[0], inner), Shape(activation, interleaved, *tile)
    programs = -(-count // tile[0]) * -(-inner // tile[1])
    launch(_activation_kernel, programs, tensors, scalars, (shape,), num_warps=4)


def gated_backward(
    a: Tensor,
    pre: Tensor,
    slots: Tensor,
    weights: Tensor,
    offs: Tensor,
    dpre: Tensor,
    act_w: Tensor,
    dweights: Tensor,
    activation: str,
    interleaved: bool,
) -> None:
    """dpre [R, 2I], act_w [R, I] and dweights [T, k] from a [R, I] and pre [R, 2I]; all contiguous. `a` may be
    `act_w`, and `pre` may be `dpre`: every element is read before it is written."""
    count, inner = act_w.shape
    tile = _cut(inner, BACKWARD)
    tensors, scalars = (a, pre, slots, weights, offs, dpre, act_w, dweights), (offs.shape[0], inner)
    shape = Shape(activation, interleaved, *tile)
    launch(_backward_kernel, -(-count // tile[0]), tensors, scalars, (shape,), num_warps=4)


def add_row_sums(sums: Tensor, slots: Tensor, offs: Tensor, dweights: Tensor) -> None:
    """dweights[slots[r]] = Σ_n sums[n, r] for r < offs[-1], in order of n; sums [tiles, R] float32."""
    tiles, rows = sums.shape
    numbers = (offs.shape[0], rows, tiles)
    launch(_add_kernel, -(-rows // _SUMS), (sums, slots, offs, dweights), numbers, (_SUMS,), num_warps=4)
