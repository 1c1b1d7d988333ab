"""Ways to compute an MoE layer from (x, router, gate_up, down), and `dense`: products of the same FLOPs.

In torch there are several ways to bring results back to their tokens, and which is fastest under torch.compile differs
from size to size: each is a rival of its own. The router is the same in all that have none of their own.

- "": gathered by the inverse permutation, weighted and summed in float32;
- "-index-add": weighted in expert order, added by index_add in bfloat16 and whatever order;
- "-weighted": weighted in bfloat16 in expert order, gathered and summed;
- "-permuted": the same between two permutations whose gradients are gathers too, instead of additions;
- "-weighted-act": the weights go to the I columns before the down product instead of the H after it;
- "-permuted-act": both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.operators._binds import compiled_for
from expertile.lab.operators._supports import installed, on_gpu, on_hopper
from expertile.lab.race.gate import full_precision
from expertile.lab.race.operator import Call, Supports, Workload, anywhere
from expertile.moe.experts import moe_mlp
from expertile.moe.logits import router_logits_and_x
from expertile.moe.router import RouterConfig, route
from expertile.roofline import Work

Tensors = tuple[Tensor, ...]
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]  # x, router, gate_up, down, top_k -> out


@dataclass(frozen=True)
class Way:
    """`make(w, tensors)` returns a function that computes out; it follows autograd if the tensors do. `interleaves`: it
    wants rows of gate and up in turn, put so before anything is timed, and gives their gradient so. `compiles`: its
    first call compiles or tunes."""

    name: str
    make: Callable[[Workload, Tensors], Callable[[], Tensor]]
    supports: Supports = anywhere
    peer: bool = True
    graph: bool = True
    interleaves: bool = False
    compiles: bool = False

    def arrange(self, tensors: Tensors) -> Tensors:
        x, router, gate_up, down = tensors
        return x, router, interleaved(gate_up) if self.interleaves else gate_up, down


def _eager(layer: Layer) -> Callable[[Workload, Tensors], Callable[[], Tensor]]:
    def make(w: Workload, tensors: Tensors) -> Callable[[], Tensor]:
        x, router, gate_up, down = tensors
        top_k = w["top_k"]
        return lambda: layer(x, router, gate_up, down, top_k)

    return make


def _compiled(layer: Layer) -> Callable[[Workload, Tensors], Callable[[], Tensor]]:
    return lambda w, tensors: _eager(compiled_for(w, layer))(w, tensors)


def ours(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    logits, x = router_logits_and_x(x, router, overwrite_gradient=True)
    routing = route(logits, RouterConfig(router.shape[0], top_k), want_scores=False)
    return moe_mlp(x, gate_up, down, routing.topk_ids, routing.topk_weights)


def _routed(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(ids int64, weights float32) [T, k]; of the softmax over all experts, the chosen divided by their sum."""
    weights, ids = torch.softmax(F.linear(x, router), -1, dtype=torch.float32).topk(top_k)
    return ids, weights / weights.sum(-1, keepdim=True)


def _ends(ids: Tensor, experts: int) -> Tensor:
    """Rows up to each expert's last, without a look at the host."""
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32)).cumsum(0, dtype=torch.int32)


def _experts(rows: Tensor, gate_up: Tensor, down: Tensor, offs: Tensor, weights: Tensor | None = None) -> Tensor:
    gate, up = F.grouped_mm(rows, gate_up.transpose(-2, -1), offs=offs).chunk(2, -1)
    act = F.silu(gate) * up
    act = act if weights is None else act * weights.to(act.dtype)
    return F.grouped_mm(act, down.transpose(-2, -1), offs=offs)


def gathered_back(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    ids, weights = _routed(x, router, top_k)
    order, inverse, ends = _sorted(ids, router.shape[0])
    y = _experts(x.index_select(0, order // top_k), gate_up, down, ends)
    of_token = y.index_select(0, inverse).unflatten(0, (x.shape[0], top_k))
    return (of_token.float() * weights[..., None]).sum(1).to(x.dtype)


class _Permute(torch.autograd.Function):
    """Rows x[order // top_k]. The gradient gathers each token's rows and sums them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class Permuted(torch.autograd.Function):
    """Rows y[order]. The gradient is grad[inverse]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return y.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(slots in expert order, where each slot went, rows up to each expert's last)."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=ids.device))
    return order, inverse, _ends(flat, experts)


def index_added(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    ids, weights = _routed(x, router, top_k)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    tokens = order // top_k
    y = _experts(x.index_select(0, tokens), gate_up, down, _ends(flat, router.shape[0]))
    return torch.zeros_like(x).index_add(0, tokens, y * weights.flatten()[order, None].to(y.dtype))


def weighted(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    ids, weights = _routed(x, router, top_k)
    order, inverse, ends = _sorted(ids, router.shape[0])
    y = _experts(x.index_select(0, order // top_k), gate_up, down, ends)
    y = y * weights.flatten()[order, None].to(y.dtype)
    return y[inverse].view(x.shape[0], top_k, -1).sum(1)


def permuted(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    ids, weights = _routed(x, router, top_k)
    order, inverse, ends = _sorted(ids, router.shape[0])
    rows = _Permute.apply(x, order, inverse, top_k)
    y = _experts(rows, gate_up, down, ends)
    of_token = Permuted.apply(y, inverse, order).unflatten(0, (x.shape[0], top_k))
    return (of_token * weights[..., None].to(y.dtype)).sum(1)


def weighted_act(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    ids, weights = _routed(x, router, top_k)
    order, inverse, ends = _sorted(ids, router.shape[0])
    of_rows = weights.flatten()[order, None]
    y = _experts(x.index_select(0, order // top_k), gate_up, down, ends, of_rows)
    return y[inverse].view(x.shape[0], top_k, -1).sum(1)


def permuted_act(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    ids, weights = _routed(x, router, top_k)
    order, inverse, ends = _sorted(ids, router.shape[0])
    of_rows = Permuted.apply(weights.flatten(), order, inverse)[:, None]
    y = _experts(_Permute.apply(x, order, inverse, top_k), gate_up, down, ends, of_rows)
    return Permuted.apply(y, inverse, order).view(x.shape[0], top_k, -1).sum(1)


def _liger(w: Workload, tensors: Tensors) -> Callable[[], Tensor]:
    """Tunes itself; reads the number of tiles on the host."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    x, router, gate_up, down = tensors

    def run() -> Tensor:
        ids, weights = _routed(x, router, w["top_k"])
        return LigerFusedMoEFunction.apply(x, gate_up, down, ids.int(), weights.to(x.dtype))

    return run


def _transformers(w: Workload, tensors: Tensors) -> Callable[[], Tensor]:
    """Experts of transformers' Qwen3-MoE with experts_implementation="grouped_mm", behind the router above."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    x, router, gate_up, down = tensors
    config = Qwen3MoeConfig(
        hidden_size=w["hidden"],
        moe_intermediate_size=w["intermediate"],
        num_experts=w["experts"],
        num_experts_per_tok=w["top_k"],
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    # As attributes, so that gradients go to the tensors themselves and not to new parameters.
    del experts.gate_up_proj, experts.down_proj
    experts.gate_up_proj, experts.down_proj = gate_up, down

    def run() -> Tensor:
        ids, weights = _routed(x, router, w["top_k"])
        return experts(x, ids, weights.to(x.dtype))

    return run


def interleaved(gate_up: Tensor) -> Tensor:
    """[E, 2I, H] with rows (gate 0, up 0, gate 1, …) instead of all of gate, then all of up."""
    return gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def _sonic(w: Workload, tensors: Tensors) -> Callable[[], Tensor]:
    """With its own router, whose softmax is over the chosen: the same weights."""
    from sonicmoe import moe_TC_softmax_topk_layer
    from sonicmoe.enums import ActivationType

    x, router, gate_up, down = tensors
    train, top_k = w.op == "moe_train", w["top_k"]

    def run() -> Tensor:
        stream = torch.cuda.current_stream(x.device).cuda_stream
        weights = gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
        return moe_TC_softmax_topk_layer(x, router, *weights, top_k, stream, ActivationType.SWIGLU, not train)[0]

    return run


WAYS = (
    Way("expertile", _eager(ours), peer=False),
    Way("torch", _eager(gathered_back)),
    Way("torch-index-add", _eager(index_added)),
    Way("torch.compile", _compiled(gathered_back), compiles=True),
    Way("torch.compile-index-add", _compiled(index_added), compiles=True),
    Way("torch.compile-weighted", _compiled(weighted), compiles=True),
    Way("torch.compile-permuted", _compiled(permuted), compiles=True),
    Way("torch.compile-weighted-act", _compiled(weighted_act), compiles=True),
    Way("torch.compile-permuted-act", _compiled(permuted_act), compiles=True),
    Way("liger", _liger, installed("liger_kernel", on_gpu), graph=False, compiles=True),
    Way("transformers", _transformers, installed("transformers", anywhere)),
    Way("sonicmoe", _sonic, installed("sonicmoe", on_hopper), interleaves=True, compiles=True),
)


def _products(x: Tensor, gate_up: Tensor, down: Tensor, dy: Tensor | None) -> tuple[Tensor, ...]:
    """x [R, H] through one expert's weights without activation: half of x @ gate_up^T goes on to down. With dy also the
    four products of a backward pass: the gradient of the pre-activation is stood in for by the pre-activation."""
    pre = x @ gate_up.t()
    act = pre[:, : down.shape[1]]
    out = act @ down.t()
    if dy is None:
        return (out,)
    return out, dy @ down, dy.t() @ act, pre @ gate_up, pre.t() @ x


def _operands(w: Workload, inputs: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Each token's row top_k times."""
    x, _, gate_up, down, *dy = inputs
    top_k = w["top_k"]
    return x.repeat(top_k, 1), gate_up[0], down[0], dy[0].repeat(top_k, 1) if dy else None


def dense(w: Workload, inputs: Tensors) -> Call:
    operands = _operands(w, inputs)
    return lambda: _products(*operands)


def dense_reference(w: Workload, inputs: Tensors) -> Tensors:
    x, gate_up, down, dy = _operands(w, inputs)
    with full_precision():
        return _products(x.float(), gate_up.float(), down.float(), None if dy is None else dy.float())


def dense_work(w: Workload) -> Work:
    """Each operand once, each result once."""
    rows, h, i, train = w["tokens"] * w["top_k"], w["hidden"], w["intermediate"], w.op == "moe_train"
    moved = 2 * rows * h + 3 * h * i  # x, out, weights
    if train:
        moved += 2 * rows * h + rows * i + 3 * h * i  # dy, dx, dact, gradients of the weights
    return Work((18.0 if train else 6.0) * rows * h * i, float(w.itemsize * moved))
