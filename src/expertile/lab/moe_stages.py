"""The steps of `moe/experts.py`, forward and backward, called one after another with real operands: part "stages" of
results/<gpu>/moe/. `report.moe.STAGES` names them.

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

from expertile.lab.arena import Site
from expertile.lab.measure import Budget, Candidate, release, time_interleaved
from expertile.lab.operators.gate import compare
from expertile.lab.operators.moe import Size, make_inputs, tolerance, train_reference, workload
from expertile.lab.parts import figures
from expertile.lab.report.moe import stage_works
from expertile.moe.permute import permutation
from expertile.moe.router import RouterConfig, route
from expertile.ops.gathered_mm.api import gated_backward_mm, gathered_gated_mm, gathered_wgrad
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.roofline import bound


@dataclass(frozen=True)
class Steps:
    """`calls` by the names of `report.moe.STAGES`, in order; `results`: out and the gradients of x, router, gate_up and
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
                Candidate(name, _on_any_set(call), bound(works[name], site.device, w.dtype).seconds)
                for name, call in made.calls.items()
            ],
            policy="eager", device=site.torch_device, budget=budget,
        )  # fmt: skip
    found = figures(outcomes)
    reasons = [f"{name}: {value}" for name, value in found["seconds"].items() if not isinstance(value, float)]
    if reasons:
        raise RuntimeError("; ".join(reasons))
    return stages_part(shape) | found | {"rel_error": verdict.rel_error}
