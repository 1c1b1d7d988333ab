"""Products of small rank on rows in expert order, for adapters of experts; formulas and bytes:

    shrink    out[r] = s x[rows[r]] @ b[g]                                R · K elements, from L2 where x fits there
    activated act[r] = f(pre[r] + u[r] @ b[g]^T), v[r] = s act[r] @ a[g]^T  3 · R · I elements
    backward  from grad [R, I]: the gradients of all of these             7 · R · I elements
    expand    y[r] += u[r] @ b[g]^T                                       2 · R · N elements
    outer     out[g] = sum over rows r of g of w u[r]^T x[rows[r]]        R · N elements, from L2 where x fits there

for row r of expert g and a scale s, r < offs[-1]; other rows are left alone. A factor's rank is 16 or a larger power of
two. On a GPU one Triton kernel each; elsewhere, and under torch.compile, torch and `grouped_mm`. Nothing here is
differentiable.
"""

from dataclasses import dataclass

import torch

from expertile.ops.gathered_mm import activation as formulas
from expertile.ops.gathered_mm import pointwise
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.launch.device import on_kernels
from expertile.ops.launch.kernels import launch
from expertile.ops.low_rank import kernels
from expertile.ops.torch_op import traced
from expertile.ragged import power_of_two

_T = torch.Tensor
_Maybe = torch.Tensor | None
Form = tuple[str, bool]  # an activation, and whether gate and up are interleaved
LEAST_RANK = 16  # of a matrix product on tensor cores


@dataclass(frozen=True)
class Config:
    """`rows` and `columns` of a program's tile, which `num_warps` warps share."""

    rows: int
    columns: int
    num_warps: int


SHRINK = Config(64, 128, 4)
# The fastest of three or four on an H200 (2026-11-23; 128 experts, 65536 rows, 768 columns, rank 16).
ACTIVATE = Config(32, 64, 4)
BACKWARD = Config(64, 32, 4)
BACKWARD_WIDE = Config(64, 32, 8)  # ranks from 64 on, of which four warps would spill
EXPAND = Config(64, 128, 4)
OUTER = Config(128, 128, 4)
OUTER_WIDE = Config(128, 64, 4)  # ranks from 64 on


def on_device(x: _T) -> bool:
    """Whether the kernels serve x: there is something in it, on a GPU, and nothing is traced."""
    return not traced(x) and on_kernels(x) and 0 not in x.shape


def shrink(x: _T, rows: _Maybe, b: _T, offs: _T, scale: float = 1.0, config: Config = SHRINK) -> _T:
    """[R, rank] in x's dtype. x [T, K], contiguous rows; rows [R] int32, or None for x's own; b [E, K, rank]."""
    count, rank = x.shape[0] if rows is None else rows.shape[0], b.shape[2]
    if not on_device(x):
        return grouped_mm(x if rows is None else x.index_select(0, rows), b, offs=offs) * scale
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty((count, rank))
    tensors, scalars = (x, rows, b, offs, out), (offs.shape[0], x.shape[1], x.stride(0), float(scale), *b.stride())
    constants = (rank, config.rows, config.columns, power_of_two(offs.shape[0], 2))
    launch(kernels.shrink_kernel, _tiles(count, offs, config), tensors, scalars, constants, num_warps=config.num_warps)
    return out


def activated(
    pre: _T,
    u: _Maybe,
    b: _Maybe,
    a: _Maybe,
    offs: _T,
    form: Form,
    scale: float = 1.0,
    config: Config = ACTIVATE,
    dtype: torch.dtype | None = None,
) -> tuple[_T, _Maybe]:
    """(act [R, I], v [R, rank of a] or None). pre [R, 2I]; u [R, rank], b [E, 2I, rank], or None both: nothing is added
    to pre; a [E, rank, I], or None: no v. All contiguous. `dtype`: of act; pre's by default, in which v multiplies it.
    """
    activation, interleaved = form
    if not on_device(pre):
        gate, up = formulas.split(_sum(pre, u, b, offs), interleaved)
        act = formulas.activate(gate, up, activation)
        v = None if a is None else grouped_mm(act.to(pre.dtype), a.transpose(1, 2), offs=offs) * scale
        return act.to(dtype or pre.dtype), v
    (count, two_i), groups = pre.shape, offs.shape[0]
    inner = two_i // 2
    act = pre.new_empty((count, inner), dtype=dtype)
    if u is None and a is None:
        pointwise.gated_activation(pre, offs, act, activation, interleaved)
        return act, None
    v = None if a is None else pre.new_empty((count, a.shape[1]))
    tensors, scalars = (pre, u, b, a, offs, act, v), (groups, inner, float(scale))
    shape = pointwise.Shape(activation, interleaved, *_tile(config, inner), *_ranks(b, a), power_of_two(groups, 2))
    programs = _tiles(count, offs, config)
    launch(kernels.activate_kernel, programs, tensors, scalars, (shape,), num_warps=config.num_warps)
    return act, v


def backward(
    grad: _T,
    pre: _T,
    u: _Maybe,
    b: _Maybe,
    v: _Maybe,
    a: _Maybe,
    slots: _T,
    positions: _T,
    weights: _T,
    offs: _T,
    form: Form,
    scale: float = 1.0,
    overwrite_pre: bool = False,
    config: Config | None = None,
) -> tuple[_T, _T, _T, _Maybe]:
    """With h = grad + v @ a, z = pre + u @ b^T and w the row's weight, weights.flatten()[slots]:

    (dpre = f'(z) (w h) [R, 2I], w f(z) [R, I], <h, f(z)> for each slot as `weights` [T, k] has them, s dpre @ b [R,
    rank] or None). positions [T, k]: the row of each slot. `grad` may be overwritten, and
    with `overwrite_pre`, as pre is not needed again, so may pre.
    """
    activation, interleaved = form
    if not on_device(pre):
        weight = weights.flatten()[slots.long()][:, None]
        wide = grad.float() if v is None or a is None else grad.float() + grouped_mm(v, a, offs=offs).float()
        gate, up = formulas.split(_sum(pre, u, b, offs), interleaved)
        act, dgate, dup = formulas.activate_backward(gate, up, wide * weight, activation)
        products, kept = (wide * act).sum(1), positions >= 0
        dweights = torch.where(kept, products[torch.where(kept, positions, 0).long()], 0.0)
        dpre = formulas.join(dgate, dup, interleaved).to(pre.dtype)
        du = None if b is None else grouped_mm(dpre, b, offs=offs) * scale
        return dpre, (act * weight).to(pre.dtype), dweights, du
    (count, two_i), groups = pre.shape, offs.shape[0]
    if config is None:
        config = BACKWARD_WIDE if max(_ranks(b, a)) >= 64 else BACKWARD
    dpre, dweights = pre if overwrite_pre else torch.empty_like(pre), torch.zeros_like(weights)
    if u is None and v is None:
        pointwise.gated_backward(grad, pre, slots, weights, offs, dpre, grad, dweights, activation, interleaved)
        return dpre, grad, dweights, None
    du = None if u is None else torch.empty_like(u)
    tensors = (grad, pre, u, b, v, a, slots, weights, offs, dpre, grad, dweights, du)
    scalars = (groups, two_i // 2, float(scale))
    tile, ranks = _tile(config, two_i // 2), _ranks(b, a)
    shape = pointwise.Shape(activation, interleaved, *tile, *ranks, power_of_two(groups, 2))
    programs = _tiles(count, offs, config)
    launch(kernels.backward_kernel, programs, tensors, scalars, (shape,), num_warps=config.num_warps)
    return dpre, grad, dweights, du


def expand(y: _T, u: _T, b: _T, offs: _T, config: Config = EXPAND) -> _T:
    """y [R, N] + u @ b^T, in y's memory where kernels serve it. u [R, rank] contiguous; b [E, N, rank]."""
    if not on_device(y):
        return y + grouped_mm(u, b.transpose(1, 2), offs=offs)
    columns = y.shape[1]
    tensors, scalars = (y, u, b, offs), (offs.shape[0], columns, *b.stride())
    constants = (b.shape[2], config.rows, config.columns, power_of_two(offs.shape[0], 2))
    programs = _tiles(y.shape[0], offs, config) * -(-columns // config.columns)
    launch(kernels.expand_kernel, programs, tensors, scalars, constants, num_warps=config.num_warps)
    return y


def outer(
    u: _T,
    x: _T,
    rows: _Maybe,
    offs: _T,
    *,
    weighted: tuple[_T, _T] | None = None,
    last: bool = False,
    config: Config | None = None,
) -> _T:
    """[E, rank, N], or [E, N, rank] with `last`, in x's dtype. u [R, rank] contiguous; x [T, N]; rows [R] int32, or
    None for x's own; weighted: (slots [R], weights [T, k]) to multiply u's rows by weights.flatten()[slots]."""
    (_, rank), columns, groups = u.shape, x.shape[1], offs.shape[0]
    if not on_device(x) or 0 in u.shape:
        if weighted is not None:
            u = (u.float() * weighted[1].flatten()[weighted[0].long()][:, None]).to(u.dtype)
        x = x if rows is None else x.index_select(0, rows)
        return grouped_mm(x.t(), u, offs=offs) if last else grouped_mm(u.t(), x, offs=offs)
    x = x if x.stride(1) == 1 else x.contiguous()
    if config is None:
        config = OUTER_WIDE if rank >= 64 else OUTER
    out = x.new_empty((groups, columns, rank) if last else (groups, rank, columns))
    by_group, first, second = out.stride()
    slots, weights = (None, None) if weighted is None else weighted
    tensors = (u, slots, weights, x, rows, offs, out)
    scalars = (columns, x.stride(0), by_group, *((first, second) if last else (second, first)))
    constants = (rank, config.columns, config.rows)
    programs = groups * -(-columns // config.columns)
    launch(kernels.outer_kernel, programs, tensors, scalars, constants, num_warps=config.num_warps)
    return out


def turn(x: _T, to: _T) -> None:
    """Copy x [E, N, r] into `to` [E, N, rank], each of any strides: ranks that x lacks are zeros, others are left
    out. On a GPU."""
    groups, columns, rank = to.shape
    most = power_of_two(max(rank, x.shape[2]), 2)
    block_n = max(1, 128 // most)
    tensors, scalars = (x, to), (groups, columns, x.shape[2], rank, *x.stride(), *to.stride())
    constants = (most, 64, block_n)
    launch(kernels.turn_kernel, -(-groups // 64) * -(-columns // block_n), tensors, scalars, constants, num_warps=8)


def _sum(pre: _T, u: _Maybe, b: _Maybe, offs: _T) -> _T:
    """pre + u @ b^T in float32."""
    return pre.float() if u is None or b is None else pre.float() + grouped_mm(u, b.transpose(1, 2), offs=offs).float()


def _tiles(count: int, offs: _T, config: Config) -> int:
    """Row tiles of all experts together, at most."""
    return count // config.rows + min(count, offs.shape[0])


def _tile(config: Config, columns: int) -> tuple[int, int, bool]:
    return config.rows, config.columns, columns % config.columns == 0


def _ranks(b: _Maybe, a: _Maybe) -> tuple[int, int]:
    """Ranks of the two factors; of one that is not there, the least."""
    return LEAST_RANK if b is None else b.shape[2], LEAST_RANK if a is None else a.shape[1]
