"""The expert MLPs with frozen weights: FP8, INT4 or MXFP4, or of any kind under adapters of low rank (`lora`).

    pre = x[rows] @ gate_up^T; act = f(pre); y = act @ down^T; combine

The weights are data without gradients. Those of x, of the routing weights, biases and adapters come from what is kept:
pre, the routing, x where gate_up has an adapter, and u and v [R, r] beside them.

    up       u = s x[rows] @ A^T, pre = x[rows] @ W^T (+ bias)                   shrink, the base's product
    act      act = f(pre + u @ B^T), v = s act @ A2^T                            activated: pre is kept as it is
    down     y = act @ W2^T (+ bias) + v @ B2^T                                  the base's product, expand
    dact     dv = s dy[rows] @ B2, da = dy[rows] @ W2                            shrink, the base's product
    dpre     f' of da + dv @ A2, the routing weights' gradient, du = s dpre @ B  backward
    dx       dpre @ W + du @ A, each token's rows summed                         the base's product, expand, combine
    dA, dB   sums over each expert's rows: dA = du^T x[rows], dB = dpre^T u, …     outer

FP8 (Fp8Blocks of 128×128, `Mxfp4Fp8Weight`): activations are quantised in blocks of 1×128, as DeepSeek-V3 does
(arXiv:2412.19437, 3.3.2), x once for each token, and act. Beside 4-bit weights x, and act but SwiGLU's, have one scale
for each row. The backward pass runs in x's dtype with the weights' values: quantisation of the activations is
differentiated as if it did nothing. Beside other weights in 4 bits activations stay in x's dtype.

Adapters on dense weights on sm_90: the products with u, v, dv and du are more steps of K of the base's products
(`ops/low_rank/joined.py`), which keep their fused epilogues; pre comes with its delta. On other weights and GPUs pre
leaves the base's product without its activation epilogue and is kept without its delta, which `backward` adds again.
docs/notes/moe.md ("Adapters") counts the elements.
"""

from typing import Any

import torch

from expertile.moe._base_products import BaseProducts
from expertile.moe._passes import bias_products, weighted_sums
from expertile.moe.expert_weights import Experts
from expertile.moe.lora import Lora
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.autograd import bias_gradient
from expertile.ops.grouped_mm.backend import Pair
from expertile.ops.grouped_mm.problem import in_standard_form
from expertile.ops.low_rank import api as low_rank
from expertile.ops.low_rank.api import Form
from expertile.ops.torch_op import define, graph_is_kept, once_differentiable, traced

_T = torch.Tensor
_Maybe = torch.Tensor | None
# (x, topk_weights, gate_up_bias, down_bias, and factors of the adapters: A, B of gate_up's, A2, B2 of down's, or None):
# what can be differentiated.
_Operands = tuple[_T, _T, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe]


def _forward(
    base: BaseProducts, operands: _Operands, topk_ids: _T, form: Form, scales: tuple[float, float]
) -> tuple[_T, _T, bool, _Maybe, _Maybe, Permutation]:
    """(out [T, H], pre [R, 2I], whether pre has its adapter's delta, u, v, order)."""
    x, topk_weights, gate_up_bias, down_bias, a1, b1, a2, b2 = operands
    order = permutation(topk_ids, base.experts)
    u = None if a1 is None else low_rank.shrink(x, order.rows, a1.transpose(1, 2), order.offs, scales[0])
    both = base.gated_up(x, order, gate_up_bias, form, _pair(u, b1))
    if both is None:
        pre = base.up(x, order, gate_up_bias)
        act, v = base.activated(pre, u, b1, a2, order, form, scales[1])
    else:
        act, pre = both
        v = None if a2 is None else low_rank.shrink(act, None, a2.transpose(1, 2), order.offs, scales[1])
    y = base.down_of(act, order, down_bias, x.dtype, _pair(v, b2))
    return combine(y, order.positions, topk_weights), pre, both is not None or u is None, u, v, order


class _FrozenMlp(torch.autograd.Function):
    """Autograd for eager calls; others go through the operators below, with the same functions. `weights`: of the kinds
    that `BaseProducts.parts` has."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, topk_ids: _T, form: Form, scales: tuple[float, float], kinds: tuple[Any, ...], *tensors: Any
    ) -> _T:
        operands, weights = tensors[:8], tensors[8:]
        made = _forward(BaseProducts.of(kinds, weights), operands, topk_ids, form, scales)  # type: ignore[arg-type]
        out, pre, ctx.summed, u, v, order = made
        ctx.form, ctx.scales, ctx.kinds = form, scales, kinds
        routing = (order.offs, order.rows, order.slots, order.positions)
        x, *rest = operands
        kept_x = None if u is None else x
        ctx.save_for_backward(kept_x, *rest, topk_ids, pre, u, v, *routing, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: _T) -> tuple[Any, ...]:  # type: ignore[override]
        kept = ctx.saved_tensors  # once: a checkpoint computes them anew
        saved, weights = kept[:16], kept[16:]
        how = (ctx.form, ctx.scales, ctx.summed, not graph_is_kept())
        grads = _gradients(dy, BaseProducts.of(ctx.kinds, weights), saved, ctx.needs_input_grad[4:12], *how)
        return *(None,) * 4, *grads, *(None,) * len(weights)


def _gradients(
    dy: _T,
    base: BaseProducts,
    saved: tuple[Any, ...],
    needs: tuple[bool, ...],
    form: Form,
    scales: tuple[float, float],
    summed: bool,
    spare: bool,
) -> tuple[_Maybe, ...]:
    """Gradients of the operands for that of the result. `saved`: the operands, x only where gate_up has an adapter,
    topk_ids, pre, u, v and the order. `spare`: pre is not needed again, and its memory is used."""
    x, topk_weights, gate_up_bias, down_bias, a1, b1, a2, b2, topk_ids, pre, u, v, *routing = saved
    order = Permutation(*routing)
    needs_x, needs_weights, needs_up_bias, needs_down_bias, *_ = needs
    offs, rows, weights = order.offs, order.rows, topk_weights.contiguous()
    dy = dy.contiguous().to(pre.dtype)
    dx = dweights = dgate_up_bias = ddown_bias = da1 = db1 = da2 = db2 = None
    if any((*needs[:3], *needs[4:8])):
        dv = None if b2 is None else low_rank.shrink(dy, rows, b2, offs, scales[1])
        made: Any = None
        if summed:
            made = base.gated_down_gradient(dy, order, weights, pre, form, spare, _pair(dv, a2))
        du = None
        if made is None:
            more = (None, None) if summed else (u, b1)  # pre has its delta, or gets it
            how: Any = (dv, a2, order.slots, order.positions, weights, offs, form, scales[0], spare)
            *made, du = low_rank.backward(base.down_gradient(dy, order), pre, *more, *how)
        dpre, act_w, dweights = made
        del made
        if du is None and b1 is not None:
            du = low_rank.shrink(dpre, None, b1, offs, scales[0])
        if dv is not None:
            da2 = low_rank.outer(dv, act_w, None, offs)
            db2 = low_rank.outer(v, dy, rows, offs, weighted=(order.slots, weights), last=True)
        del act_w
        if du is not None:
            da1 = low_rank.outer(du, x, rows, offs)
            db1 = low_rank.outer(u, dpre, None, offs, last=True)
        if needs_up_bias:
            dgate_up_bias = bias_gradient(grouped_mm, dpre, offs, gate_up_bias)
        if needs_weights and down_bias is not None:
            dweights = dweights + bias_products(dy, down_bias, topk_ids, order)
        if needs_x:
            dx = combine(base.up_gradient(dpre, order, _pair(du, a1)), order.positions)
    if needs_down_bias:
        ddown_bias = weighted_sums(dy, topk_weights, order)
    return dx, dweights if needs_weights else None, dgate_up_bias, ddown_bias, da1, db1, da2, db2


def _kernel(*arguments: Any) -> tuple[_T, ...]:
    (x, *rest), topk_ids, weights = arguments[:8], arguments[8], arguments[9:15]
    kind, numbers, *form, scale, other_scale, keep = arguments[15:]
    base = _unpacked(weights, kind, numbers)
    operands: Any = (in_standard_form(x), *rest)
    out, pre, _, u, v, order = _forward(base, operands, topk_ids, (form[0], form[1]), (scale, other_scale))
    kept = (t if keep and t is not None else x.new_empty(0) for t in (pre, u, v))
    return out, *kept, order.offs, order.rows, order.slots, order.positions


def _fake(*arguments: Any) -> tuple[_T, ...]:
    x, (_, b1, a2, _), topk_ids, keep = arguments[0], arguments[4:8], arguments[8], arguments[-1]
    experts, two_i = arguments[9].shape[:2]
    rows = topk_ids.shape[0] * topk_ids.shape[1]
    widths = (two_i, None if b1 is None else b1.shape[2], None if a2 is None else a2.shape[1])
    kept = (x.new_empty((rows, width) if keep and width is not None else 0) for width in widths)
    routing = (topk_ids.new_empty(size, dtype=torch.int32) for size in (experts, rows, rows, topk_ids.shape))
    return x.new_empty(x.shape), *kept, *routing


def _backward_kernel(dy: _T, *arguments: Any) -> tuple[_T, ...]:
    saved, weights = arguments[:16], arguments[16:22]
    kind, numbers, activation, interleaved, scale, other_scale, needs = arguments[22:]
    base, form = _unpacked(weights, kind, numbers), (activation, interleaved)
    x, *rest = saved
    gate_up_bias, a1, a2, order = rest[1], rest[3], rest[5], Permutation(*rest[11:])
    u, v = (None if a is None else t for a, t in ((a1, rest[9]), (a2, rest[10])))
    x = None if x is None else in_standard_form(x)
    summed = x is None or base.gates(x, order, gate_up_bias, form)
    saved = (x, *rest[:9], u, v, *rest[11:])
    grads = _gradients(dy, base, saved, tuple(needs), form, (scale, other_scale), summed, False)
    return tuple(dy.new_empty(0) if g is None or not n else g for g, n in zip(grads, needs, strict=True))


def _fake_backward(dy: _T, *arguments: Any) -> tuple[_T, ...]:
    operands, pre, needs = arguments[1:8], arguments[9], arguments[-1]
    like = (dy, *operands)
    dtypes = (pre.dtype, torch.float32, *(None if t is None else t.dtype for t in operands[1:]))
    each = zip(like, dtypes, needs, strict=True)
    return tuple(dy.new_empty(t.shape, dtype=d) if n else dy.new_empty(0) for t, d, n in each)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[_T, ...]) -> None:
    x, *rest, topk_ids = inputs[:9]
    ctx.how = inputs[15:21]
    kept_x = None if rest[3] is None else x
    ctx.save_for_backward(kept_x, *rest, topk_ids, *output[1:], *inputs[9:15])


def _gradient(ctx: Any, dy: _T, *_: Any) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:8])
    grads = _call_backward(dy, *ctx.saved_tensors, *ctx.how, needs)
    return (*(g if n else None for g, n in zip(grads, needs, strict=True)), *(None,) * 14)


_OPERANDS = (
    "Tensor topk_weights, Tensor? gate_up_bias, Tensor? down_bias, Tensor? a1, Tensor? b1, Tensor? a2, Tensor? b2, "
    "Tensor topk_ids"
)
_WEIGHTS = (
    "Tensor gate_up, Tensor? gate_up_scales, Tensor? gate_up_zeros, Tensor down, Tensor? down_scales, "
    "Tensor? down_zeros, str kind, SymInt[] numbers, str activation, bool interleaved, float gate_up_scale, "
    "float down_scale"
)
_call_backward = define(
    "moe_frozen_backward",
    _backward_kernel,
    f"(Tensor dy, Tensor? x, {_OPERANDS}, Tensor pre, Tensor u, Tensor v, Tensor offs, Tensor rows, Tensor slots, "
    f"Tensor positions, {_WEIGHTS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
_call = define(
    "moe_frozen",
    _kernel,
    f"(Tensor x, {_OPERANDS}, {_WEIGHTS}, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    gradient=_gradient,
    setup=_setup,
)


def _packed(kinds: tuple[Any, ...], weights: tuple[_Maybe, ...]) -> tuple[Any, ...]:
    """What `BaseProducts.parts` made, as the operators take it: three tensors of each weight, their kind, numbers."""
    half = len(weights) // 2
    none = (None,) * (3 - half)
    tensors = (*weights[:half], *none, *weights[half:], *none)
    if half == 1:
        return *tensors, "", []
    first, second = kinds
    return (*tensors, "", [*first, *second]) if half == 2 else (*tensors, first[0], [*first[1:], *second[1:]])


def _unpacked(tensors: tuple[Any, ...], kind: str, numbers: list[int]) -> BaseProducts:
    half = 3 if kind else 2 if numbers else 1
    weights = (*tensors[:half], *tensors[3 : 3 + half])
    named = (kind,) if kind else ()
    kinds = ((*named, *numbers[:2]), (*named, *numbers[2:])) if numbers else (None, None)
    return BaseProducts.of(kinds, weights)


def _pair(u: _Maybe, factor: _Maybe) -> Pair | None:
    return None if u is None or factor is None else (u, factor)


def frozen_mlp(x: _T, topk_ids: _T, topk_weights: _T, experts: Experts, lora: Lora | None) -> _T:
    """`moe_mlp` with quantised weights or with adapters; operands as checked there, x, dense weights and biases of one
    dtype."""
    count, _, _ = experts.shape
    adapters = (None, None) if lora is None else (lora.gate_up, lora.down)
    factors: list[_Maybe] = []
    for adapter in adapters:
        factors += [None, None] if adapter is None else adapter.factors(count, x.dtype)
    scales = tuple(0.0 if adapter is None else float(adapter.scale) for adapter in adapters)
    operands: Any = (x, topk_weights, experts.gate_up_bias, experts.down_bias, *factors)
    form, through = experts.form[:2], traced(x)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if not grad and not through:
        return _forward(BaseProducts(experts.gate_up, experts.down), operands, topk_ids, form, scales)[0]  # type: ignore[arg-type]
    kinds, weights = BaseProducts.parts(experts)
    if through:
        packed = _packed(kinds, weights)
        return _call(*operands, topk_ids, *packed, *form, *scales, grad)[0]  # type: ignore[no-any-return]
    return _FrozenMlp.apply(topk_ids, form, scales, kinds, *operands, *weights)
