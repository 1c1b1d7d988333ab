"""The steps of `moe/experts.py`, forward and backward, each timed alone: operator "moe_stage", preset "moe-stages".

Inputs are those of "moe_train"; `bind` computes the steps before a stage. Its result is held against the float32
computation of all steps up to it. The order of a token's experts is not compared where two logits are equal in
bfloat16: of routing the weights, of the permutation each expert's rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.operators import moe
from expertile.lab.race.gate import full_precision
from expertile.lab.race.operator import Call, Inputs, Operator, Rival, Workload
from expertile.moe.permute import permutation
from expertile.moe.router import RouterConfig, route
from expertile.ops.gathered_mm.api import gated_backward_mm, gathered_gated_mm, gathered_wgrad
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.gathered_mm.pointwise import ordered
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.gathered_mm.run import copies_rows
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.roofline import Work


def workload(size: moe.Size, stage: str, name: str = "") -> Workload:
    """`stage`, one of `STAGES`, of the layer at (T, H, I, E, k)."""
    name = name or moe.named(size)
    whole = moe.workload(name, "moe-stages", size)
    return replace(whole, name=f"{name}: {stage}", op="moe_stage", dims=(*whole.dims, ("stage", stage)))


def workloads() -> tuple[Workload, ...]:
    """Every stage at the sizes of preset "moe", and at one that a CPU computes in a moment."""
    large = [workload(size, stage) for size in moe.SIZES for stage in STAGES]
    return (*large, *(workload(moe.SMALL, stage, "small") for stage in STAGES))


def calls(inputs: Inputs, top_k: int) -> dict[str, Callable[[], Any]]:
    """Each stage bound to what the ones before it gave; shapes as in `operators.moe`."""
    x, router, gate_up, down, dy = inputs
    experts = router.shape[0]
    config = RouterConfig(experts, top_k)
    form: Any = {"activation": "swiglu", "interleaved": False}
    found: dict[str, Callable[[], Any]] = {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        found[name] = call
        return call()

    def up(save_pre: bool) -> tuple[Tensor, Tensor | None]:
        return gathered_gated_mm(x, gate_up.transpose(1, 2), order.rows, offs, save_pre=save_pre, **form)

    logits = step("router linear", lambda: F.linear(x, router))
    routing = step("route", lambda: route(logits, config, want_scores=False))
    ids, weights = routing.topk_ids, routing.topk_weights
    order = step("permutation", lambda: permutation(ids, experts))
    offs, rows = order.offs, order.rows
    act, pre = step("up+act (keeps pre)", lambda: up(True))
    step("up+act (infer)", lambda: up(False))
    y = step("down", lambda: grouped_mm(act, down.transpose(1, 2), offs=offs))
    step("combine", lambda: combine(y, order.positions, weights))
    dy_rows = step("B order dy", lambda: ordered(dy, rows, offs))
    # The layer puts dy in order where weight gradients would copy it; elsewhere that stage is none of its own.
    of_dy = (dy_rows, None) if copies_rows(dy, rows, down.shape[2], offs) else (dy, rows)
    # Not over pre, as in the layer: a stage is computed again and again.
    saved = (of_dy[0], down.transpose(1, 2), of_dy[1], order.slots, weights, pre, offs)
    dpre, act_w, _ = step("B gated_backward", lambda: gated_backward_mm(*saved, **form))
    step("B wgrad down", lambda: gathered_wgrad(of_dy[0], of_dy[1], act_w, offs))
    step("B wgrad up", lambda: gathered_wgrad(dpre, rows, x, offs, gather_b=True))
    dx_rows = step("B dgrad", lambda: grouped_mm(dpre, gate_up, offs=offs))
    step("B combine", lambda: combine(dx_rows, order.positions))
    return found


# What of a stage's result is compared.
_SEEN: Mapping[str, Callable[[Any], tuple[Tensor, ...]]] = MappingProxyType(
    {
        "route": lambda found: (found.topk_weights,),
        "permutation": lambda found: (found.offs, found.rows),
        "up+act (keeps pre)": lambda found: found,
        "up+act (infer)": lambda found: found[:1],
        "B gated_backward": lambda found: found[:2],
    }
)


def _bind(w: Workload, inputs: Inputs) -> Call:
    with torch.no_grad():
        call = calls(inputs, w["top_k"])[w["stage"]]
    seen = _SEEN.get(w["stage"], lambda found: (found,))
    return lambda: seen(call())


def reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    """What the stage must give, in float32: rows in the order of the experts, each expert's in that of the tokens."""
    with full_precision():
        return next(found for stage, found in _references(inputs, w["top_k"]) if stage == w["stage"])


def _references(inputs: Inputs, top_k: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Stage after stage, each computed when it is asked for."""
    x, router, gate_up, down, dy = inputs
    logits = x.float() @ router.float().t()
    best = logits.topk(top_k)
    weights = torch.softmax(best.values, 1)
    order = best.indices.flatten().argsort(stable=True)
    rows, ends = order // top_k, best.indices.flatten().bincount(minlength=router.shape[0]).cumsum(0)
    yield "router linear", (logits,)
    yield "route", (weights,)
    yield "permutation", (ends.double(), rows.double())
    spans = list(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))

    def grouped(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[i:j] @ b[e].float() for e, (i, j) in enumerate(spans)])

    def wgrad(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a[i:j].t() @ b[i:j] for i, j in spans])

    def of_tokens(of_rows: Tensor) -> Tensor:
        return torch.zeros(x.shape, device=x.device).index_add_(0, rows, of_rows)

    xs, weight = x[rows].float(), weights.flatten()[order, None]
    pre = grouped(xs, gate_up.transpose(1, 2))
    gate, up = pre.chunk(2, 1)
    sigmoid = torch.sigmoid(gate)
    act = gate * sigmoid * up
    yield "up+act (keeps pre)", (act, pre)
    yield "up+act (infer)", (act,)
    y = grouped(act, down.transpose(1, 2))
    yield "down", (y,)
    yield "combine", (of_tokens(weight * y),)
    del y
    dys = dy[rows].float()
    yield "B order dy", (dys,)
    dact = weight * grouped(dys, down)
    dpre = torch.cat((dact * up * sigmoid * (1 + gate * (1 - sigmoid)), dact * gate * sigmoid), 1)
    yield "B gated_backward", (dpre, weight * act)
    yield "B wgrad down", (wgrad(dys, weight * act),)
    yield "B wgrad up", (wgrad(dpre, xs),)
    dx_rows = grouped(dpre, gate_up)
    yield "B dgrad", (dx_rows,)
    yield "B combine", (of_tokens(dx_rows),)


def stage_works(size: moe.Size) -> dict[str, Work]:
    """Useful FLOPs, and bytes with each input and output counted once, of each of `STAGES` for T tokens, hidden size H,
    intermediate size I, E experts (all with rows) and top-k; 16-bit elements."""
    t, h, i, e, k = size
    rows, dtype, s = t * k, torch.bfloat16, 2
    up, down = (2 * i * h, 1, h), (h * i, 1, i)  # strides of the weights as [E, K, N]

    def gathered(product: Product, n: int, strides: tuple[int, ...], **options: Any) -> Work:
        return GatherProblem(product, e, rows, n, h, t, dtype, (h, 1), strides, activation="swiglu", **options).work()

    def wgrad(m: int, n: int, which: str) -> Work:
        return GatherProblem(Product.WGRAD, e, m, n, rows, t, dtype, (m, 1), (n, 1), which).work()

    def grouped(n: int, inner: int, strides: tuple[int, ...]) -> Work:
        return Problem(
            Layout.RAGGED_M, e, rows, n, inner, dtype, dtype, (inner, 1), strides, True, True, False, "cuda"
        ).work()

    return {
        "router linear": Work(2.0 * t * h * e, s * (t * h + e * h + t * e)),
        "route": Work(0.0, s * t * e + 8.0 * rows),
        "permutation": Work(0.0, 20.0 * rows + 4 * e),
        "up+act (keeps pre)": gathered(Product.GATED, 2 * i, up),
        "up+act (infer)": gathered(Product.GATED, 2 * i, up, save_pre=False),
        "down": grouped(h, i, down),
        "combine": Work(2.0 * rows * h, s * (rows + t) * h + 8.0 * rows),
        "B order dy": Work(0.0, s * (t + rows) * h + 4.0 * rows),
        "B gated_backward": gathered(Product.BACKWARD, i, (h * i, i, 1), weights_shape=(t, k), gathered=""),
        "B wgrad down": wgrad(h, i, ""),
        "B wgrad up": wgrad(2 * i, h, "b"),
        "B dgrad": grouped(h, 2 * i, (2 * i * h, h, 1)),
        "B combine": Work(1.0 * rows * h, s * (rows + t) * h + 4.0 * rows),
    }


STAGES = tuple(stage_works(moe.SMALL))


def _as_layer(w: Workload) -> Workload:
    return replace(w, op="moe_train")


OPERATORS = (
    Operator(
        "moe_stage",
        lambda w, device, seed: moe.make_inputs(_as_layer(w), device, seed),
        reference,
        lambda w: stage_works(moe.size(w))[w["stage"]],
        (Rival("expertile", _bind, peer=False),),
        moe.tolerance,
        memory_nbytes=lambda w: 2 * moe.memory_nbytes(_as_layer(w)),
        set_nbytes=lambda w: moe.train_work(w).nbytes,
    ),
)
PRESETS = {"moe-stages": workloads}
