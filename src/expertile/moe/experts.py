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
    dgate_up          dpre^T @ x[rows], rows copied some columns at a time          gathered_wgrad

That the gradient of the routing weights is <dy[rows] @ down, f(pre)>, from what the product has in registers, is
SonicMoE's (arXiv:2512.14080): y need not be kept. dy is put in order once, for both products of it; dpre takes pre's
memory, unless the graph is kept (`retain_graph`) or compiled. Peak memory beyond the results: R (2I + I + H) elements
forward and backward. Every sum is formed in one order, so equal inputs give equal bits.

With few tokens and no gradient there is no order, and `_few` does it all.

Weights are stored as `torch.nn.Linear` has them: gate_up [E, 2I, H], down [E, H, I]. As Fp8Blocks of 128×128,
Int4Weight or Mxfp4Weight they are used as they are: see `_quantized_experts` and `_weight_only_experts`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.moe._passes import forward, gradients
from expertile.moe.permute import Permutation, check_ids, permutation
from expertile.ops.gathered_mm.activation import activate, split
from expertile.ops.gathered_mm.combine import formula as combine_formula
from expertile.ops.gathered_mm.problem import ACTIVATIONS
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.launch.device import FORMULA_DTYPES, wide
from expertile.ops.torch_op import differentiable, differentiable_once, gradients_of, graph_is_kept, traced

_T = torch.Tensor
_Maybe = torch.Tensor | None
Weight = torch.Tensor | Fp8Blocks | Int4Weight | Mxfp4Weight


def formula(
    topk_ids: _T,
    activation: str,
    interleaved: bool,
    x: _T,
    gate_up: _T,
    down: _T,
    topk_weights: _T,
    gate_up_bias: _Maybe,
    down_bias: _Maybe,
) -> _T:
    """out [T, H] in operators that can be differentiated any number of times; keeps y, act and the permuted x too."""
    order = permutation(topk_ids, gate_up.shape[0])
    pre = grouped_mm(x.index_select(0, order.rows), gate_up.transpose(1, 2), offs=order.offs, bias=gate_up_bias)
    act = activate(*split(wide(pre), interleaved), activation).to(pre.dtype)
    y = grouped_mm(act, down.transpose(1, 2), offs=order.offs, bias=down_bias)
    return combine_formula(y, order.positions, topk_weights)


class _MoeMlp(torch.autograd.Function):
    """Autograd for eager calls; compiled ones go through the operators below, with the same functions."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: _T,
        gate_up: _T,
        down: _T,
        topk_weights: _T,
        gate_up_bias: _Maybe,
        down_bias: _Maybe,
        topk_ids: _T,
        activation: str,
        interleaved: bool,
        batch_invariant: bool,
    ) -> _T:
        out, pre, order = forward(
            x,
            gate_up,
            down,
            topk_ids,
            topk_weights,
            gate_up_bias,
            down_bias,
            activation,
            interleaved,
            True,
            batch_invariant,
        )
        assert order is not None
        ctx.activation, ctx.interleaved, ctx.batch_invariant = activation, interleaved, batch_invariant
        ctx.save_for_backward(
            x,
            gate_up,
            down,
            topk_weights,
            gate_up_bias,
            down_bias,
            topk_ids,
            pre,
            order.offs,
            order.rows,
            order.slots,
            order.positions,
        )
        return out

    @staticmethod
    def backward(ctx: Any, dy: _T) -> tuple[Any, ...]:  # type: ignore[override]
        x, gate_up, down, topk_weights, gate_up_bias, down_bias, topk_ids, pre, *order = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated in turn
            again = partial(formula, topk_ids, ctx.activation, ctx.interleaved)
            inputs = (x, gate_up, down, topk_weights, gate_up_bias, down_bias)
            return (*gradients_of(again, inputs, dy), None, None, None, None)
        grads = gradients(
            dy,
            x,
            gate_up,
            down,
            topk_ids,
            topk_weights,
            pre,
            Permutation(*order),
            down_bias,
            ctx.activation,
            ctx.interleaved,
            ctx.needs_input_grad[:6],
            ctx.batch_invariant,
            overwrite_pre=not graph_is_kept(),
        )
        return (*grads, None, None, None, None)


@torch.library.custom_op(
    "expertile::moe_mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor gate_up, Tensor down, Tensor topk_weights, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor topk_ids, str activation, bool interleaved, bool save_pre, bool batch_invariant) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _mlp_op(
    x: _T,
    gate_up: _T,
    down: _T,
    topk_weights: _T,
    gate_up_bias: _Maybe,
    down_bias: _Maybe,
    topk_ids: _T,
    activation: str,
    interleaved: bool,
    save_pre: bool,
    batch_invariant: bool,
) -> tuple[_T, _T, _T, _T, _T, _T]:
    check_ids(topk_ids, gate_up.shape[0], topk_ids.device.type == "cpu")
    out, pre, order = forward(
        x,
        gate_up,
        down,
        topk_ids,
        topk_weights,
        gate_up_bias,
        down_bias,
        activation,
        interleaved,
        save_pre,
        batch_invariant,
    )
    pre = x.new_empty((0, gate_up.shape[1])) if pre is None else pre
    if order is None:
        return out, pre, *_no_order(gate_up, topk_ids)
    return out, pre, order.offs, order.rows, order.slots, order.positions


def _no_order(gate_up: _T, topk_ids: _T) -> tuple[_T, _T, _T, _T]:
    """Room for a Permutation."""
    sizes = (gate_up.shape[:1], (topk_ids.numel(),), (topk_ids.numel(),), topk_ids.shape)
    offs, rows, slots, positions = (topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)
    return offs, rows, slots, positions


@_mlp_op.register_fake
def _(
    x: _T,
    gate_up: _T,
    down: _T,
    topk_weights: _T,
    gate_up_bias: _Maybe,
    down_bias: _Maybe,
    topk_ids: _T,
    activation: str,
    interleaved: bool,
    save_pre: bool,
    batch_invariant: bool,
) -> tuple[_T, _T, _T, _T, _T, _T]:
    num_slots = topk_ids.shape[0] * topk_ids.shape[1]
    pre = x.new_empty((num_slots if save_pre else 0, gate_up.shape[1]))
    return x.new_empty(x.shape), pre, *_no_order(gate_up, topk_ids)


@torch.library.custom_op(
    "expertile::moe_mlp_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor topk_weights, Tensor? down_bias, "
    "Tensor topk_ids, Tensor pre, Tensor offs, Tensor rows, Tensor slots, Tensor positions, str activation, "
    "bool interleaved, bool batch_invariant, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _mlp_backward_op(
    dy: _T,
    x: _T,
    gate_up: _T,
    down: _T,
    topk_weights: _T,
    down_bias: _Maybe,
    topk_ids: _T,
    pre: _T,
    offs: _T,
    rows: _T,
    slots: _T,
    positions: _T,
    activation: str,
    interleaved: bool,
    batch_invariant: bool,
    needs: list[bool],
) -> tuple[_T, ...]:
    grads = gradients(
        dy,
        x,
        gate_up,
        down,
        topk_ids,
        topk_weights,
        pre,
        Permutation(offs, rows, slots, positions),
        down_bias,
        activation,
        interleaved,
        tuple(needs),
        batch_invariant,
    )
    return tuple(x.new_empty(0) if g is None else g for g in grads)


@_mlp_backward_op.register_fake
def _(
    dy: _T,
    x: _T,
    gate_up: _T,
    down: _T,
    topk_weights: _T,
    down_bias: _Maybe,
    topk_ids: _T,
    pre: _T,
    offs: _T,
    rows: _T,
    slots: _T,
    positions: _T,
    activation: str,
    interleaved: bool,
    batch_invariant: bool,
    needs: list[bool],
) -> tuple[_T, ...]:
    e, two_i, h = gate_up.shape
    shapes = (tuple(x.shape), (e, two_i, h), (e, h, two_i // 2), tuple(topk_weights.shape), (e, two_i), (e, h))
    dtypes = (x.dtype, x.dtype, x.dtype, torch.float32, x.dtype, x.dtype)
    return tuple(
        x.new_empty(s, dtype=d) if n else x.new_empty(0) for s, d, n in zip(shapes, dtypes, needs, strict=True)
    )


_call_backward = differentiable_once(_mlp_backward_op)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[_T, ...]) -> None:
    x, gate_up, down, topk_weights, _, down_bias, topk_ids, *form = inputs
    ctx.form = (*form[:2], form[3])
    _, pre, offs, rows, slots, positions = output
    ctx.save_for_backward(x, gate_up, down, topk_weights, down_bias, topk_ids, pre, offs, rows, slots, positions)


def _gradient(ctx: Any, dy: _T, *_: Any) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:6])
    grads = _call_backward(dy, *ctx.saved_tensors, *ctx.form, needs)
    return (*(g if n else None for g, n in zip(grads, needs, strict=True)), *(None,) * 5)


_call = differentiable(_mlp_op, _gradient, _setup)


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
) -> torch.Tensor:
    """Each token's experts, weighted and summed; `expertile.moe.experts` has the formula.

    Args:
        x: [T, H], bfloat16, float16 or float32; or float64, for gradcheck, in torch's own operators. T may be 0.
        gate_up: [E, 2I, H] of x's dtype, gate and up rows as `interleaved` says; or Fp8Blocks with blocks of 128×128,
            Int4Weight or Mxfp4Weight, of that shape.
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
            tokens. ValueError with float64 and quantised weights, whose products have no such form.

    Returns:
        [T, H] in x's dtype. Differentiable in x, topk_weights, weights and biases: any number of times (the second
        derivative in grouped_mm and torch's operators, which keep all intermediate results), under torch.compile and
        torch.func once. With quantised weights once, in all but the weights (the backward pass in x's dtype, from the
        weights' values, of which 4-bit ones are dequantised in parts). A derivative that is not there raises a
        RuntimeError. No host synchronisation: it can be captured in a CUDA graph.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check = check or (isinstance(topk_ids, torch.Tensor) and topk_ids.device.type == "cpu" and not traced(topk_ids))
    kind = _check(x, gate_up, down, topk_ids, topk_weights, activation, gate_up_bias, down_bias, check)
    if batch_invariant:
        require_invariant(kind, x.dtype)
    topk_weights = topk_weights.to(wide(x[:0]).dtype)
    if kind is not torch.Tensor:
        from expertile.moe import _quantized_experts, _weight_only_experts

        mlp: Any = _quantized_experts.fp8_mlp if kind is Fp8Blocks else _weight_only_experts.weight_only_mlp
        return mlp(x, gate_up, down, topk_ids, topk_weights, activation, interleaved, gate_up_bias, down_bias)
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, gate_up, down = (t.to(dtype) for t in (x, gate_up, down))
        gate_up_bias, down_bias = (None if b is None else b.to(dtype) for b in (gate_up_bias, down_bias))
    if x.dtype is torch.float64:
        return formula(topk_ids, activation, interleaved, x, gate_up, down, topk_weights, gate_up_bias, down_bias)
    operands = (x, gate_up, down, topk_weights, gate_up_bias, down_bias)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if traced(x):
        return _call(*operands, topk_ids, activation, interleaved, grad, batch_invariant)[0]
    if grad:
        return _MoeMlp.apply(*operands, topk_ids, activation, interleaved, batch_invariant)
    return forward(
        x,
        gate_up,
        down,
        topk_ids,
        topk_weights,
        gate_up_bias,
        down_bias,
        activation,
        interleaved,
        False,
        batch_invariant,
    )[0]


def require_invariant(kind: type, dtype: torch.dtype) -> None:
    """ValueError where experts of that kind have no batch-invariant form."""
    if kind is not torch.Tensor:
        raise ValueError(f"batch_invariant: expected False with {kind.__name__}, whose products depend on the batch")
    if dtype is torch.float64:
        raise ValueError("batch_invariant: expected float32, bfloat16 or float16, got torch.float64")


def _shape(weight: object) -> tuple[int, ...]:
    if isinstance(weight, Fp8Blocks):
        return tuple(weight.values.shape)
    return tuple(weight.shape) if isinstance(weight, torch.Tensor | Int4Weight | Mxfp4Weight) else ()


def _check(
    x: object,
    gate_up: object,
    down: object,
    topk_ids: object,
    topk_weights: object,
    activation: str,
    gate_up_bias: object,
    down_bias: object,
    values: bool,
) -> type:
    """The kind of the weights. ValueError unless everything fits together."""
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.dtype not in FORMULA_DTYPES:
        raise ValueError(f"x: expected [T, H], float32, bfloat16, float16 or float64, got {_described(x)}")
    kind = next((k for k in (torch.Tensor, Fp8Blocks, Int4Weight, Mxfp4Weight) if isinstance(gate_up, k)), None)
    if kind is None or not isinstance(down, kind):
        raise ValueError(
            "gate_up, down: expected two tensors, Fp8Blocks, Int4Weights or Mxfp4Weights, "
            f"got {type(gate_up).__name__} and {type(down).__name__}"
        )
    if kind is not torch.Tensor and x.dtype is torch.float64:
        raise ValueError(f"x: expected float32, bfloat16 or float16 beside {kind.__name__}, got {x.dtype}")
    shape, hidden = _shape(gate_up), x.shape[1]
    if len(shape) != 3 or shape[1] % 2 or shape[2] != hidden:
        raise ValueError(f"gate_up: expected shape [E, 2I, {hidden}] for x {list(x.shape)}, got {list(shape)}")
    experts, inner = shape[0], shape[1] // 2
    if _shape(down) != (experts, hidden, inner):
        raise ValueError(f"down: expected shape {[experts, hidden, inner]}, got {list(_shape(down))}")
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        _check_like(x, gate_up=(gate_up, shape), down=(down, (experts, hidden, inner)))
    elif isinstance(gate_up, Fp8Blocks) and isinstance(down, Fp8Blocks):
        for name, block in (("gate_up", gate_up.block), ("down", down.block)):
            if block != (128, 128):
                raise ValueError(f"{name}: expected blocks of (128, 128), got {block}")
    _check_like(x, gate_up_bias=(gate_up_bias, (experts, 2 * inner)), down_bias=(down_bias, (experts, hidden)))
    check_ids(topk_ids, experts, values)
    assert isinstance(topk_ids, torch.Tensor)
    if topk_ids.shape[0] != x.shape[0] or topk_ids.shape[1] < 1 or topk_ids.device != x.device:
        raise ValueError(f"topk_ids: expected [{x.shape[0]}, k] on {x.device}, k >= 1, got {_described(topk_ids)}")
    floating = isinstance(topk_weights, torch.Tensor) and topk_weights.is_floating_point()
    if not isinstance(topk_weights, torch.Tensor) or not floating or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights: expected shape {list(topk_ids.shape)}, floating point, got {_described(topk_weights)}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {activation!r}")
    return kind


def _described(x: object) -> str:
    return f"{list(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__


def _check_like(x: torch.Tensor, **arguments: tuple[object, tuple[int, ...]]) -> None:
    """ValueError unless each argument is None or a tensor of that shape, with x's dtype (or to be cast) and device."""
    for name, (t, shape) in arguments.items():
        if t is None:
            continue
        cast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
        right = isinstance(t, torch.Tensor) and tuple(t.shape) == shape and t.device == x.device
        if not right or not (cast or t.dtype is x.dtype):  # type: ignore[attr-defined]
            raise ValueError(f"{name}: expected {list(shape)} {x.dtype} on {x.device}, got {_described(t)}")
