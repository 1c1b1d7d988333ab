"""Adapters of low rank (LoRA, arXiv:2106.09685) for the experts of a layer, over frozen weights of any kind.

For expert e, A_e [r, in] and B_e [out, r], the product with a weight becomes x @ (W_e + scale · B_e A_e)^T. W stays as
it is, in bf16, FP8, INT4 or MXFP4, and no sum of the size of W is formed: R rows in expert order pass small factors.

    up       u = s x[rows] @ A^T, pre = x[rows] @ W^T (+ bias)                   shrink, the base's product
    act      act = f(pre + u @ B^T), v = s act @ A2^T                            activated: pre is kept as it is
    down     y = act @ W2^T (+ bias) + v @ B2^T                                  the base's product, expand
    dact     dv = s dy[rows] @ B2, da = dy[rows] @ W2                            shrink, the base's product
    dpre     f' of da + dv @ A2, the routing weights' gradient, du = s dpre @ B  backward
    dx       dpre @ W + du @ A, each token's rows summed                         the base's product, expand, combine
    dA, dB   sums over each expert's rows: dA = du^T x[rows], dB = dpre^T u, …     outer

What is kept beside the base's is u and v, [R, r] each.

Dense weights on sm_90: the products with u, v, dv and du are more steps of K of the base's products
(`ops/low_rank/joined.py`), which keep their fused epilogues; pre comes with its delta. v and du are then products of
their own. Bytes beyond the base's, of Qwen3-30B-A3B's layer with 8192 tokens (R = 65,536, H = 2048, I = 768, r = 16) in
bfloat16: 101 MB (act read for v), 201 MB (dpre for du), 302 MB (act and dpre for dA2 and dB), and four passes of 268 MB
over x and dy, which L2 holds.

Other weights and GPUs: the delta of pre must be there before the activation, so pre leaves the base's product without
its activation epilogue. It is kept without its delta, which `backward` adds again: that costs a product with r columns
and saves writing pre twice. Bytes: in place of act's and dpre's reads for v and du, forward 201 MB (pre read again) and
537 MB (y read and written), backward 201 MB (da written and read) and 537 MB (dx's rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton

from expertile.moe._base_products import BaseProducts
from expertile.moe._passes import bias_products, bias_sums, weighted_sums
from expertile.moe.expert_weights import Experts
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.grouped_mm.backend import Pair
from expertile.ops.low_rank import api as low_rank
from expertile.ops.torch_op import graph_is_kept, once_differentiable

_T = torch.Tensor
_Maybe = torch.Tensor | None


@dataclass(frozen=True)
class Adapter:
    """The adapters of all experts for one weight, as PEFT stores them (`target_parameters`).

    a: [E · r, in], floating point: row e · r + i is row i of A_e (`lora_A.weight`).
    b: [out, r · E], floating point: column i · E + e is column i of B_e (`lora_B.weight`).
    scale: alpha / r, or alpha / √r.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def check(self, name: str, experts: int, out: int, columns: int, device: torch.device) -> None:
        """ValueError, with the argument's `name`, unless it fits a weight [experts, out, columns] on `device`."""
        a, b = self.a, self.b
        for part, x in (("a", a), ("b", b)):
            right = isinstance(x, torch.Tensor) and x.dim() == 2 and x.is_floating_point() and x.device == device
            if not right:
                found = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
                raise ValueError(
                    f"lora.{name}.{part}: expected two dimensions, floating point, on {device}, got {found}"
                )
        if a.shape[0] == 0 or a.shape[0] % experts or a.shape[1] != columns:
            raise ValueError(f"lora.{name}.a: expected [{experts} r, {columns}], got {list(a.shape)}")
        if tuple(b.shape) != (out, a.shape[0]):
            raise ValueError(f"lora.{name}.b: expected {[out, a.shape[0]]}, got {list(b.shape)}")

    def delta(self, experts: int, dtype: torch.dtype) -> torch.Tensor:
        """scale · B_e A_e of all experts, [E, out, in] in `dtype`: what the kernels never form."""
        a, b = self._by_expert(experts)
        return self.scale * (b.to(dtype) @ a.to(dtype))

    def factors(self, experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [E, rank, in], B [E, out, rank]) in `dtype`, contiguous, r filled up with zeros to a rank that the kernels
        take. Differentiable."""
        a, b = self._by_expert(experts)
        r = a.shape[1]
        rank = max(low_rank.LEAST_RANK, triton.next_power_of_2(r))
        a = a.to(dtype) if r == rank else F.pad(a.to(dtype), (0, 0, 0, rank - r))
        if low_rank.on_device(self.b):
            return a.contiguous(), _Turned.apply(self.b, experts, rank, dtype)
        b = b.to(dtype) if r == rank else F.pad(b.to(dtype), (0, rank - r))
        return a.contiguous(), b.contiguous()

    def _by_expert(self, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        r = self.a.shape[0] // experts
        return self.a.unflatten(0, (experts, r)), self.b.unflatten(1, (r, experts)).permute(2, 0, 1)


@dataclass(frozen=True)
class Lora:
    """Adapters for `moe_mlp`: of gate_up, in H and out 2I with rows in gate_up's order, of down, in I and out H, or of
    both. None: no adapter of that weight."""

    gate_up: Adapter | None = None
    down: Adapter | None = None

    def check(self, experts: Experts, device: torch.device) -> None:
        """ValueError unless there is an adapter, all fit, and the weights under them are frozen."""
        e, two_i, h = experts.shape
        given = {"gate_up": (self.gate_up, two_i, h), "down": (self.down, h, two_i // 2)}
        if self.gate_up is None and self.down is None:
            raise ValueError("lora: expected an adapter for gate_up or down, got none")
        for name, (adapter, out, columns) in given.items():
            if adapter is not None:
                adapter.check(name, e, out, columns, device)
        if experts.batch_invariant:
            raise ValueError("batch_invariant: expected False with lora, whose products have no such form")
        trained = [n for n in given if getattr(getattr(experts, n), "requires_grad", False)]
        if trained and torch.is_grad_enabled():
            raise ValueError(f"{trained[0]}: expected a frozen weight under lora, got one with requires_grad")

    def merged(self, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense (gate_up, down) with the adapters added, differentiable in them: for float64's formula."""
        e, *_ = experts.shape
        pairs = ((experts.gate_up, self.gate_up), (experts.down, self.down))
        first, second = (w if adapter is None else w + adapter.delta(e, w.dtype) for w, adapter in pairs)
        return first, second


class _Turned(torch.autograd.Function):
    """B as PEFT lays it out, [out, r · E], -> [E, out, rank] in `dtype`, in one pass; and back."""

    @staticmethod
    def forward(ctx: Any, b: _T, experts: int, rank: int, dtype: torch.dtype) -> _T:  # type: ignore[override]
        ctx.like, ctx.experts = b.detach()[:0], experts
        turned = torch.empty((experts, b.shape[0], rank), dtype=dtype, device=b.device)
        low_rank.turn(b.detach().unflatten(1, (-1, experts)).permute(2, 0, 1), turned)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: _T) -> tuple[Any, ...]:  # type: ignore[override]
        out = ctx.like.new_empty((grad.shape[1], ctx.like.shape[1]))
        low_rank.turn(grad, out.unflatten(1, (-1, ctx.experts)).permute(2, 0, 1))
        return out, None, None, None


class _LoraMlp(torch.autograd.Function):
    """Traced through by torch.compile. a1, b1: factors of gate_up's adapter, or None; a2, b2 those of down's."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: _T,
        topk_weights: _T,
        gate_up_bias: _Maybe,
        down_bias: _Maybe,
        a1: _Maybe,
        b1: _Maybe,
        a2: _Maybe,
        b2: _Maybe,
        topk_ids: _T,
        activation: str,
        interleaved: bool,
        scales: tuple[float, float],
        kinds: tuple[Any, ...],
        *weights: _Maybe,
    ) -> _T:
        base = BaseProducts.of(kinds, weights)
        order = permutation(topk_ids, base.experts)
        u = None if a1 is None else low_rank.shrink(x, order.rows, a1.transpose(1, 2), order.offs, scales[0])
        both = base.gated_up(x, order, gate_up_bias, activation, interleaved, _pair(u, b1))
        if both is None:
            pre = base.up(x, order, gate_up_bias)
            act, v = low_rank.activated(pre, u, b1, a2, order.offs, activation, interleaved, scales[1])
        else:
            act, pre = both
            v = None if a2 is None else low_rank.shrink(act, None, a2.transpose(1, 2), order.offs, scales[1])
        y = base.down_of(act, order, down_bias, _pair(v, b2))
        ctx.form, ctx.kinds, ctx.scales, ctx.summed = (activation, interleaved), kinds, scales, both is not None
        routing = (order.offs, order.rows, order.slots, order.positions)
        kept = (x, topk_weights, gate_up_bias, down_bias, a1, b1, a2, b2, topk_ids, pre, u, v)
        ctx.save_for_backward(*kept, *routing, *weights)
        return combine(y, order.positions, topk_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: _T) -> tuple[Any, ...]:  # type: ignore[override]
        x, topk_weights, gate_up_bias, down_bias, a1, b1, a2, b2, topk_ids, pre, u, v, *rest = ctx.saved_tensors
        order, base = Permutation(*rest[:4]), BaseProducts.of(ctx.kinds, rest[4:])
        needs_x, needs_weights, needs_up_bias, needs_down_bias = ctx.needs_input_grad[:4]
        offs, rows, weights = order.offs, order.rows, topk_weights.contiguous()
        dy = dy.contiguous().to(x.dtype)
        dv = None if b2 is None else low_rank.shrink(dy, rows, b2, offs, ctx.scales[1])
        dpre, act_w, dweights, du = _gradients(base, dy, order, weights, pre, u, b1, dv, a2, ctx)
        da1 = db1 = da2 = db2 = dx = dgate_up_bias = ddown_bias = None
        if dv is not None:
            da2 = low_rank.outer(dv, act_w, None, offs)
            db2 = low_rank.outer(v, dy, rows, offs, weighted=(order.slots, weights), last=True)
        del act_w
        if du is not None:
            da1 = low_rank.outer(du, x, rows, offs)
            db1 = low_rank.outer(u, dpre, None, offs, last=True)
        if needs_up_bias:
            dgate_up_bias = bias_sums(dpre, offs).to(gate_up_bias.dtype)
        if needs_down_bias:
            ddown_bias = weighted_sums(dy, topk_weights, order)
        if needs_weights and down_bias is not None:
            dweights = dweights + bias_products(dy, down_bias, topk_ids, order)
        if needs_x:
            dx = combine(base.up_gradient(dpre, order, _pair(du, a1)), order.positions)
        grads = (dx, dweights if needs_weights else None, dgate_up_bias, ddown_bias, da1, db1, da2, db2)
        return *grads, *(None,) * (len(rest) + 1)


def _pair(u: _Maybe, factor: _Maybe) -> Pair | None:
    return None if u is None or factor is None else (u, factor)


def _gradients(
    base: BaseProducts,
    dy: _T,
    order: Permutation,
    weights: _T,
    pre: _T,
    u: _Maybe,
    b1: _Maybe,
    dv: _Maybe,
    a2: _Maybe,
    ctx: Any,
) -> tuple[_T, _T, _T, _Maybe]:
    """(dpre, act_w, dweights, du) as `low_rank.backward` makes them, in the base's product where that can."""
    scale, spare = ctx.scales[0], not graph_is_kept()
    if not ctx.summed:
        how: Any = (order.slots, order.positions, weights, order.offs, *ctx.form, scale, spare)
        return low_rank.backward(base.down_gradient(dy, order), pre, u, b1, dv, a2, *how)
    activation, interleaved = ctx.form
    made = base.gated_down_gradient(dy, order, weights, pre, activation, interleaved, spare, _pair(dv, a2))
    du = None if b1 is None else low_rank.shrink(made[0], None, b1, order.offs, scale)
    return *made, du


def lora_mlp(x: _T, topk_ids: _T, topk_weights: _T, experts: Experts, lora: Lora) -> _T:
    """`moe_mlp` with adapters; operands as checked there, x, dense weights and biases of one dtype."""
    count, _, _ = experts.shape
    factors: list[_Maybe] = []
    for adapter in (lora.gate_up, lora.down):
        factors += [None, None] if adapter is None else adapter.factors(count, x.dtype)
    scales = tuple(0.0 if adapter is None else float(adapter.scale) for adapter in (lora.gate_up, lora.down))
    kinds, weights = BaseProducts.parts(experts)
    biases = (experts.gate_up_bias, experts.down_bias)
    return _LoraMlp.apply(x, topk_weights, *biases, *factors, topk_ids, *experts.form[:2], scales, kinds, *weights)
