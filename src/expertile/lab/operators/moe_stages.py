"""The steps of `moe/experts.py`, forward and backward, called one after another with real operands: part "stages" of
results/<gpu>/moe/. `STAGES` names them.

What the chain of steps gives, completed by the router's gradient, is held against the float32 reference of
`operators.moe` before any step is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.measure.interleaved import Budget, TimedCall, release, time_interleaved
from expertile.lab.operators.moe import Size, make_inputs, tolerance, train_reference, workload
from expertile.lab.race.case import Site
from expertile.lab.race.gate import compare
from expertile.lab.race.parts import figures
from expertile.moe.permute import permutation
from expertile.moe.router import RouterConfig, route
from expertile.ops.gathered_mm.api import gated_backward_mm, gathered_gated_mm, gathered_wgrad
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.roofline import Work, bound


@dataclass(frozen=True)
class Steps:
    """`calls` by the names of `STAGES`, in order; `results`: out and the gradients of x, router, gate_up and
    down, put together from what the steps gave."""

    calls: Mapping[str, Callable[[], Any]]
    results: tuple[Tensor, ...]


def steps(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, dy: Tensor, top_k: int) -> Steps:
    """Each step bound to what the ones before it gave; shapes as in `operators.moe`."""
    experts = router.shape[0]
    config = RouterConfig(experts, top_k)
    calls: dict[str, Callable[[], Any]] = {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        calls[name] = call
        return call()

    def up(save_pre: bool) -> tuple[Tensor, Tensor | None]:
        return gathered_gated_mm(
            x, gate_up.transpose(1, 2), order.rows, offs, activation="swiglu", interleaved=False, save_pre=save_pre
        )

    logits = step("router linear", lambda: F.linear(x, router))
    routing = step("route", lambda: route(logits, config, want_scores=False))
    ids, weights = routing.topk_ids, routing.topk_weights
    order = step("permutation", lambda: permutation(ids, experts))
    offs, rows = order.offs, order.rows
    act, pre = step("up+act (keeps pre)", lambda: up(True))
    step("up+act (infer)", lambda: up(False))
    y = step("down", lambda: grouped_mm(act, down.transpose(1, 2), offs=offs))
    out = step("combine", lambda: combine(y, order.positions, weights))
    dpre, act_w, dweights = step(
        "B gated_backward",
        lambda: gated_backward_mm(
            dy, down.transpose(1, 2), rows, order.slots, weights, pre, offs, activation="swiglu", interleaved=False
        ),
    )
    ddown = step("B wgrad down", lambda: gathered_wgrad(dy, rows, act_w, offs))
    dgate_up = step("B wgrad up", lambda: gathered_wgrad(dpre, rows, x, offs, gather_b=True))
    dx_rows = step("B dgrad", lambda: grouped_mm(dpre, gate_up, offs=offs))
    dx = step("B combine", lambda: combine(dx_rows, order.positions))
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        (dlogits,) = torch.autograd.grad(route(leaf, config, want_scores=False).topk_weights, leaf, dweights)
    return Steps(calls, (out, dx + dlogits @ router, dlogits.t() @ x, dgate_up, ddown))


def _on_any_set(call: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda _: call()


def stages_part(shape: Size) -> dict[str, Any]:
    """What says which part it is."""
    return {"part": "stages", "size": list(shape)}


def measure_stages(shape: Size, site: Site, budget: Budget) -> dict[str, Any]:
    """The part: "seconds" of each step, in eager calls that take turns.

    RuntimeError if a result is wrong, or a step cannot be timed.
    """
    w = workload("layer", "moe", shape, train=True)
    inputs = make_inputs(w, site.torch_device, 0)
    with torch.no_grad():
        x, router, gate_up, down, dy = inputs
        made = steps(x, router, gate_up, down, dy, w["top_k"])
        verdict = compare(made.results, train_reference(w, inputs), tolerance(w))
        release(site.torch_device)
        if not verdict.ok:
            raise RuntimeError(f"the steps give a wrong result: {verdict.reason}")
        works = stage_works(shape)
        outcomes = time_interleaved(
            [
                TimedCall(name, _on_any_set(call), bound(works[name], site.device, w.dtype).seconds)
                for name, call in made.calls.items()
            ],
            policy="eager",
            device=site.torch_device,
            budget=budget,
        )
    found = figures(outcomes)
    reasons = [f"{name}: {value}" for name, value in found["seconds"].items() if not isinstance(value, float)]
    if reasons:
        raise RuntimeError("; ".join(reasons))
    return stages_part(shape) | found | {"rel_error": verdict.rel_error}


STAGES = {
    "router linear": "logits",
    "route": "choice of experts",
    "permutation": "permutation",
    "up+act (keeps pre)": "up-projection and activation",
    "up+act (infer)": "the same, pre not kept",
    "down": "down-projection",
    "combine": "combine",
    "B gated_backward": "dpre, act_w, dweights",
    "B wgrad down": "ddown",
    "B wgrad up": "dgate_up",
    "B dgrad": "dx of each row",
    "B combine": "dx of each token",
}


def stage_works(size: Size, itemsize: int = 2) -> dict[str, Work]:
    """Useful FLOPs, and bytes with each input and output counted once, of each of `STAGES` for T tokens, hidden size H,
    intermediate size I, E experts (all with rows) and top-k; 16-bit elements."""
    t, h, i, e, k = size
    rows, dtype, s = t * k, torch.bfloat16, itemsize
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
        "B gated_backward": gathered(Product.BACKWARD, i, (h * i, i, 1), weights_shape=(t, k)),
        "B wgrad down": wgrad(h, i, "a"),
        "B wgrad up": wgrad(2 * i, h, "b"),
        "B dgrad": grouped(h, 2 * i, (2 * i * h, h, 1)),
        "B combine": Work(1.0 * rows * h, s * (rows + t) * h + 4.0 * rows),
    }
