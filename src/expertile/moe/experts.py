"""moe_mlp: the gated MLPs of all experts, applied to the tokens that were routed to them.

For token t and its experts e = topk_ids[t, j], with routing weights w,

    out[t] = sum over j of w[t, j] * (down[e] @ act(gate_up[e] @ x[t] + gate_up_bias[e]) + down_bias[e])

R = T * k rows; E experts, hidden size H, intermediate size I; 6 R H I FLOPs forward and 12 backward. Forward:

    order    stable permutation of the slots by expert                        `permute`
    up       pre = x[rows] @ gate_up^T, act = f(pre) in its epilogue          gathered_gated_mm: no permuted copy of x
    down     y = act @ down^T                                                 grouped_mm
    combine  out[t] = sum of w * y over the token's rows, in the order of j   combine: no atomics

What is kept for the backward pass is x, pre [R, 2I] and the routing; act, y and the permuted x are not:

    dpre, act_w, dw   from dy[rows] @ down and pre, one product with an epilogue    gated_backward_mm
    ddown             dy[rows]^T @ act_w                                            gathered_wgrad
    dx                dpre @ gate_up, then each token's rows summed                 grouped_mm, combine
    dgate_up          dpre^T @ x[rows]                                              gathered_wgrad

That the gradient of the routing weights is <dy[rows] @ down, f(pre)>, from what the product has in registers, is
SonicMoE's (arXiv:2512.14080): y need not be kept. dpre takes pre's memory, unless the graph is kept (`retain_graph`) or
compiled. Peak memory beyond the results: R (2I + I + H) elements. Every sum is formed in one order: equal inputs give
equal bits. With few tokens and no gradient there is no order, and `_few` does it all; quantised weights: see `_frozen`.
"""

from typing import Any

import torch

from expertile.formats.int4 import Int4Weight
from expertile.moe._frozen import frozen_mlp
from expertile.moe._passes import Form, Operands, forward, gradients
from expertile.moe.expert_weights import Experts, Weight, autocasts
from expertile.moe.lora import Lora
from expertile.moe.permute import check_ids, permutation
from expertile.ops.gathered_mm.activation import activate, split
from expertile.ops.gathered_mm.combine import formula as combine_formula
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.autograd import by_columns
from expertile.ops.launch.device import wide, wide_dtype
from expertile.ops.torch_op import batched, define, gradients_of, graph_is_kept, traced

_T = torch.Tensor
_Maybe = torch.Tensor | None


def formula(operands: Operands, topk_ids: _T, activation: str, interleaved: bool) -> _T:
    """out [T, H] in operators that can be differentiated any number of times; keeps y, act and the permuted x too."""
    x, gate_up, down, topk_weights, gate_up_bias, down_bias = operands
    order = permutation(topk_ids, gate_up.shape[0])
    pre = grouped_mm(x.index_select(0, order.rows), gate_up.transpose(1, 2), offs=order.offs, bias=gate_up_bias)
    act = activate(*split(wide(pre), interleaved), activation).to(pre.dtype)
    y = grouped_mm(act, down.transpose(1, 2), offs=order.offs, bias=down_bias)
    return combine_formula(y, order.positions, topk_weights)


class _MoeMlp(torch.autograd.Function):
    """Autograd for eager calls; compiled ones go through the operators below, with the same functions."""

    @staticmethod
    def forward(ctx: Any, topk_ids: _T, form: Form, *operands: Any) -> _T:  # type: ignore[override]
        out, pre, order = forward(operands, topk_ids, form, True)  # type: ignore[arg-type]
        assert order is not None
        ctx.form = form
        ctx.save_for_backward(*operands, topk_ids, pre, order.offs, order.rows, order.slots, order.positions)
        return out

    @staticmethod
    def backward(ctx: Any, dy: _T) -> tuple[Any, ...]:  # type: ignore[override]
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or batched(dy):  # create_graph=True: the gradients are differentiated in turn
            topk_ids, (activation, interleaved, _) = saved[6], ctx.form
            again = lambda *operands: formula(operands, topk_ids, activation, interleaved)  # noqa: E731
            return None, None, *gradients_of(again, saved[:6], dy)
        kept = (*saved[:4], *saved[5:])
        return None, None, *gradients(dy, kept, ctx.form, needs, overwrite_pre=not graph_is_kept())


def _mlp(*arguments: Any) -> tuple[_T, ...]:
    *operands, topk_ids, activation, interleaved, save_pre, invariant = arguments
    x, gate_up = operands[:2]
    check_ids(topk_ids, gate_up.shape[0], topk_ids.device.type == "cpu")
    form = (activation, interleaved, invariant)
    out, pre, order = forward(operands, topk_ids, form, save_pre)  # type: ignore[arg-type]
    pre = x.new_empty((0, gate_up.shape[1])) if pre is None else pre
    if order is None:
        return out, pre, *_no_order(gate_up, topk_ids)
    return out, pre, order.offs, order.rows, order.slots, order.positions


def _no_order(gate_up: _T, topk_ids: _T) -> tuple[_T, ...]:
    """Room for a Permutation."""
    sizes = (gate_up.shape[:1], (topk_ids.numel(),), (topk_ids.numel(),), topk_ids.shape)
    return tuple(topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)


def _fake_mlp(*arguments: Any) -> tuple[_T, ...]:
    (x, gate_up), topk_ids, save_pre = arguments[:2], arguments[6], arguments[9]
    num_slots = topk_ids.shape[0] * topk_ids.shape[1]
    pre = x.new_empty((num_slots if save_pre else 0, gate_up.shape[1]))
    return x.new_empty(x.shape), pre, *_no_order(gate_up, topk_ids)


def _mlp_backward(dy: _T, *arguments: Any) -> tuple[_T, ...]:
    *saved, activation, interleaved, invariant, needs = arguments
    grads = gradients(dy, tuple(saved), (activation, interleaved, invariant), tuple(needs))
    return tuple(dy.new_empty(0, dtype=saved[0].dtype) if g is None else g for g in grads)


def _fake_backward(dy: _T, x: _T, gate_up: _T, down: _T, topk_weights: _T, *rest: Any) -> tuple[_T, ...]:
    e, two_i, h = gate_up.shape
    shapes = (tuple(x.shape), (e, two_i, h), (e, h, two_i // 2), tuple(topk_weights.shape), (e, two_i), (e, h))
    dtypes = (x.dtype, x.dtype, x.dtype, torch.float32, x.dtype, x.dtype)
    each = zip(shapes, dtypes, rest[-1], strict=True)
    grads = [x.new_empty(s, dtype=d) if n else x.new_empty(0) for s, d, n in each]
    for i, weight in ((1, gate_up), (2, down)):
        if grads[i].dim() == 3 and by_columns(weight):
            grads[i] = grads[i].view(e, *weight.mT.shape[1:]).mT
    return tuple(grads)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[_T, ...]) -> None:
    *operands, topk_ids, activation, interleaved, _, invariant = inputs
    ctx.form = (activation, interleaved, invariant)
    ctx.save_for_backward(*operands[:4], operands[5], topk_ids, *output[1:])


def _gradient(ctx: Any, dy: _T, *_: Any) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:6])
    grads = _call_backward(dy, *ctx.saved_tensors, *ctx.form, needs)
    return (*(g if n else None for g, n in zip(grads, needs, strict=True)), *(None,) * 5)


_call_backward = define(
    "moe_mlp_backward",
    _mlp_backward,
    "(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor topk_weights, Tensor? down_bias, "
    "Tensor topk_ids, Tensor pre, Tensor offs, Tensor rows, Tensor slots, Tensor positions, str activation, "
    "bool interleaved, bool batch_invariant, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
_call = define(
    "moe_mlp",
    _mlp,
    "(Tensor x, Tensor gate_up, Tensor down, Tensor topk_weights, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor topk_ids, str activation, bool interleaved, bool save_pre, bool batch_invariant) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_mlp,
    gradient=_gradient,
    setup=_setup,
)


def moe_mlp(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "swiglu",
    interleaved: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    check: bool = False,
    batch_invariant: bool = False,
    lora: Lora | None = None,
) -> torch.Tensor:
    """Each token's experts, weighted and summed; `expertile.moe.experts` has the formula.

    Args:
        x: [T, H], bfloat16, float16 or float32; or float64, for gradcheck, in torch's own operators. T may be 0.
        gate_up: [E, 2I, H] of x's dtype, gate and up rows as `interleaved` says; or Fp8Blocks with blocks of 128×128,
            Int4Weight or Mxfp4Weight, of that shape; or Mxfp4Fp8Weight. Beside that and Fp8Blocks x and the activation
            are rounded to FP8, with a scale for each 1×128; or, beside Mxfp4Fp8Weight, for each row (of "swiglu"
            1×128).
        down: [E, H, I], of the same kind.
        topk_ids: [T, k] int32 or int64. E and -1 mark a dropped slot. Any other id out of range is an error, which is
            found on a CPU always and on a GPU with `check`; without, the slot is dropped there.
        topk_weights: [T, k], floating point; used in float32 (float64 with x). Those of dropped slots are ignored.
        activation: "swiglu", "geglu" (tanh), "reglu" or "gpt_oss"; formulas in `ops.gathered_mm.activation`.
        interleaved: gate_up's rows are (gate 0, up 0, gate 1, up 1, …); otherwise all of gate, then all of up.
        gate_up_bias, down_bias: [E, 2I] and [E, H] of x's dtype.
        check: also look at the values of topk_ids, which waits for the GPU.
        batch_invariant: a token's bits depend on that token, its experts and their weights alone: not on how many
            tokens there are, nor on which, nor on whether a gradient is wanted. Where that holds, and what of: see
            `grouped_mm`. It holds of the gradients of x and topk_weights too; those of weights and biases are sums over
            tokens. ValueError with float64, quantised weights and lora, whose products have no such form.
        lora: adapters of low rank for gate_up, down or both, `expertile.moe.lora.Lora`; gate_up and down, of any kind,
            are then frozen. Differentiable in the adapters too, once.

    Returns:
        [T, H] in x's dtype. Differentiable in x, topk_weights, weights and biases: any number of times (the second
        derivative in grouped_mm and torch's operators, which keep all intermediate results), under torch.compile and
        torch.func once. With quantised weights once, in all but the weights (the backward pass in x's dtype, from the
        weights' values, of which 4-bit ones are dequantised in parts). A derivative that is not there raises a
        RuntimeError. No host synchronisation: it can be captured in a CUDA graph.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    experts = Experts(gate_up, down, gate_up_bias, down_bias, activation, interleaved, batch_invariant)
    return experts_mlp(experts, x, topk_ids, topk_weights, check, lora)


def experts_mlp(
    experts: Experts, x: _T, topk_ids: _T, topk_weights: _T, check: bool = False, lora: Lora | None = None
) -> _T:
    """`moe_mlp` of experts as one value."""
    check = check or (isinstance(topk_ids, torch.Tensor) and topk_ids.device.type == "cpu" and not traced(topk_ids))
    kind = experts.check(x, topk_ids, topk_weights, check)
    if lora is not None:
        if not isinstance(lora, Lora):
            raise ValueError(f"lora: expected a Lora or None, got {type(lora).__name__}")
        lora.check(experts, x.device)
    if autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        if kind is Int4Weight and (scales := experts.gate_up.scales.dtype) is not dtype:  # which its products need
            with torch.autocast(x.device.type, dtype=scales):
                return experts_mlp(experts, x, topk_ids, topk_weights, lora=lora).to(dtype)
        x, experts = x.to(dtype), experts.map(lambda t: t.to(dtype))
    topk_weights = topk_weights.to(wide_dtype(x))
    if x.dtype is not torch.float64 and (lora is not None or kind is not torch.Tensor):
        return frozen_mlp(x, topk_ids, topk_weights, experts, lora)
    if lora is not None:
        experts = Experts.of((*lora.merged(experts), *experts.tensors[2:]), experts.form)
    operands: Operands = (x, *experts.tensors[:2], topk_weights, *experts.tensors[2:])
    if x.dtype is torch.float64:
        return formula(operands, topk_ids, *experts.form[:2])
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if traced(*operands):
        return _call(*operands, topk_ids, *experts.form[:2], grad, experts.batch_invariant)[0]
    if grad:
        return _MoeMlp.apply(topk_ids, experts.form, *operands)
    return forward(operands, topk_ids, experts.form, False)[0]
