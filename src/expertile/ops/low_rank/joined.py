"""Products with adapters as one product: x @ W + u @ B with both sums in the same accumulators.

The base's kernel multiplies [x | u] by [W | B]: u [R, r] and B [E, r, N] are more steps of its K, 64 columns each, of
which those past r are zeros. For r = 16 behind K = 2048 that is 3 % more products, in place of a pass that reads and
writes the result. `cuda_gather` takes such a second pair in the gated backward, and the Gluon kernels elsewhere where K
is a multiple of their step; if none does, `product` adds it in a pass of its own, and the others say None.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops.gathered_mm import run as gathered
from expertile.ops.gathered_mm.backend import Operands as Gathered
from expertile.ops.gathered_mm.backend import new_outputs
from expertile.ops.gathered_mm.backends import cuda_gated, cuda_gather, gluon_gather
from expertile.ops.gathered_mm.problem import GatherProblem, Product, describe
from expertile.ops.grouped_mm import api as grouped
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.backend import Operands, Pair
from expertile.ops.grouped_mm.backends import gluon_hopper
from expertile.ops.grouped_mm.problem import Problem, described
from expertile.ops.low_rank.api import Form, expand, on_device

_T = torch.Tensor
_Maybe = torch.Tensor | None
_Found = tuple[GatherProblem, Callable[..., None], Any]


def product(a: _T, b: _T, offs: _T, more: Pair | None, bias: _Maybe = None) -> _T:
    """[R, N]: a [R, K] @ b[g] + u @ B[g] (+ bias[g]), b [E, K, N], more = (u [R, r] contiguous, B [E, r, N]) or None.

    B is copied unless it is laid out as b is, the same dimension contiguous."""
    if more is None:
        return grouped_mm(a, b, offs=offs, bias=bias)
    if on_device(a) and a.is_cuda:
        fields = (described(a), described(b), described(offs), None if bias is None else described(bias))
        found = _grouped(fields, Device.current(a.device))
        if found is not None:
            return gluon_hopper.run(found[0], Operands(a, b, offs, bias), found[1], None, more=_laid_out(more, b))
    u, factor = more
    return expand(grouped_mm(a, b, offs=offs, bias=bias), u, factor.transpose(1, 2), offs)


def gated(x: _T, b: _T, rows: _T, offs: _T, bias: _Maybe, form: Form, more: Pair | None) -> tuple[_T, _T] | None:
    """(act = f(pre) [R, I], pre = x[rows] @ b[g] + u @ B[g] (+ bias[g]) [R, 2I]); None where no kernel can."""
    return _gathered(Product.GATED, Gathered(x, b, offs, rows, bias), form, more)


def gated_backward(
    dy: _T,
    down: _T,
    rows: _T,
    slots: _T,
    weights: _T,
    pre: _T,
    offs: _T,
    form: Form,
    overwrite_pre: bool,
    more: Pair | None,
) -> tuple[_T, _T, _T] | None:
    """`gated_backward_mm` with a = dy[rows] @ down[g] + v @ A[g], more = (v [R, r], A [E, r, I]); None where no kernel
    can. down [E, H, I]."""
    operands = Gathered(dy, down, offs, rows, None, slots, weights, pre)
    return _gathered(Product.BACKWARD, operands, form, more, overwrite_pre)


def gates(x: _T, b: _T, rows: _T, offs: _T, bias: _Maybe, form: Form) -> bool:
    """Whether `gated` has a kernel for these operands."""
    return _found(Product.GATED, Gathered(x, b, offs, rows, bias), form) is not None


def _found(product: Product, o: Gathered, form: Form) -> _Found | None:
    """`_gather` of operands on a GPU."""
    if not (on_device(o.a) and o.a.is_cuda):
        return None
    tensors = (o.a, o.b, o.offs, o.rows, o.bias, o.slots, o.weights, o.pre)
    fields = tuple(None if t is None else described(t) for t in tensors)
    return _gather(product, fields, form, Device.current(o.a.device))


def _gathered(product: Product, o: Gathered, form: Form, more: Pair | None, overwrite_pre: bool = False) -> Any:
    """The outputs in the order of `problem`'s table, or None."""
    found = _found(product, o, form)
    if found is None:
        return None
    problem, run, config = found
    outputs = new_outputs(problem, o, overwrite_pre)
    run(problem, o, config, outputs, None if more is None else _laid_out(more, o.b))
    return outputs


def _laid_out(more: Pair, b: _T) -> Pair:
    """The second factor as TMA reads it beside b [E, K, N]."""
    u, factor = more
    factor = factor.transpose(1, 2).contiguous().transpose(1, 2) if b.stride(1) == 1 else factor.contiguous()
    return u, factor if factor.data_ptr() % 16 == 0 else factor.clone()


@lru_cache(maxsize=1024)
def _grouped(fields: tuple[Any, ...], device: Device) -> tuple[Problem, Any] | None:
    """The problem and a config of `gluon_hopper` that takes a second pair, that of `select` if it is one."""
    a, b, offs, bias = fields
    problem = Problem.from_descriptions(a, b, offs, bias, None, False)
    if gluon_hopper.supports(problem, device):
        return None
    chosen, config = grouped.select(problem, device)
    configs = gluon_hopper.configs(problem, device)
    if chosen is gluon_hopper.BACKEND:
        configs = (config, *configs)
    return next(((problem, c) for c in configs if gluon_hopper.takes_more(problem, c)), None)


@lru_cache(maxsize=1024)
def _gather(product: Product, fields: tuple[Any, ...], form: Form, device: Device) -> _Found | None:
    """The problem, and the function and config that compute it with a second pair: of a gated backward `cuda_gather`'s,
    also where composed is faster without one; of an up-projection `gluon_gather`'s, where that or a CUDA C++ kernel is
    chosen."""
    problem: GatherProblem = describe(product, *fields, activation=form[0], interleaved=form[1])
    if product is Product.BACKWARD:
        able = cuda_gather.supports(problem, device) is None
        return (problem, cuda_gather.run, cuda_gather.configs(problem, device)[0]) if able else None
    chosen, config = gathered.select(problem, device)
    if chosen in (cuda_gather.BACKEND, cuda_gated.BACKEND) and gluon_gather.supports(problem, device) is None:
        chosen, config = gluon_gather.BACKEND, gluon_gather.configs(problem, device)[0]
    ours = chosen is gluon_gather.BACKEND and gluon_gather.takes_more(problem, config)
    return (problem, gluon_gather.run, config) if ours else None
