"""What stands between the products of an MoE layer, in a CUDA graph: part "kernels" of results/<gpu>/moe/.

| name | what |
|-|-|
| perm | `permutation` of the ids |
| route, route+scores | `route` of bf16 logits, without and with the scores that auxiliary losses want |
| route_bwd | the gradient of the logits from that of the weights |
| round_nearest, round_adaptive | `round_groups` to tiles of 128 rows, one candidate a token |
| torch topk | softmax in float32 and `topk`: what route replaces |
| torch argsort | a stable `argsort` of the ids: the least that anybody needs for perm |

Each is held against formulas in torch, or its own on the CPU, on the very inputs. Sets of inputs rotate, together
larger than the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertile.lab.measure.interleaved import Budget, TimedCall, release, time_interleaved
from expertile.lab.race.case import Site, set_count
from expertile.lab.race.gate import compare
from expertile.lab.race.parts import figures
from expertile.moe.permute import Permutation, permutation
from expertile.moe.rounding import round_groups
from expertile.moe.router import RouterConfig, Routing, plan_of, route, select_backward

Tensors = tuple[Tensor, ...]
SHAPES = (  # T, E, k
    (32768, 128, 8),
    (24576, 128, 8),
    (1, 128, 8),
    (16, 128, 8),
    (128, 128, 8),
    (32768, 256, 8),
    (32768, 64, 4),
)
_TILE = 128
_MODES = ("nearest", "adaptive")
_TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2.0**-8, 2.0**-6)}  # of `compare`


@dataclass(frozen=True)
class Kernel:
    """`call()` is timed; `seen` picks of its result what must be `expected()`: integers exactly, and floats within
    some roundings of their dtype."""

    call: Callable[[], Any]
    seen: Callable[[Any], Tensors]
    expected: Callable[[], Tensors]


def kernels(tokens: int, experts: int, top_k: int, device: torch.device, seed: int = 0) -> dict[str, Kernel]:
    """All of the module's table on random logits; rounding only where an expert has a tile of rows on average."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(tokens, experts, device=device, generator=generator).bfloat16()
    dweights = torch.randn(tokens, top_k, device=device, generator=generator)
    config = RouterConfig(experts, top_k)
    ids = route(logits, config, want_scores=False).topk_ids

    def torch_topk() -> Tensors:
        best = torch.softmax(logits, -1, dtype=torch.float32).topk(top_k)
        return best.values, best.indices

    def expected_routing() -> Tensors:
        best = torch_topk()[0]
        return best / best.sum(1, keepdim=True), logits.topk(top_k).values  # which of equal logits is not compared

    def routed(found: Routing) -> Tensors:
        return found.topk_weights, logits.gather(1, found.topk_ids.long())

    def sorted_slots() -> Tensor:
        return ids.flatten().argsort(stable=True)

    def expected_order() -> Tensors:
        slots = sorted_slots()
        positions = torch.empty_like(slots).scatter_(0, slots, torch.arange(slots.numel(), device=device))
        ends = ids.flatten().bincount(minlength=experts).cumsum(0)
        return tuple(t.int() for t in (ends, slots // top_k, slots, positions.view(ids.shape)))

    def placed(found: Permutation) -> Tensors:
        return found.offs, found.rows, found.slots, found.positions

    def expected_gradient() -> Tensors:
        with torch.enable_grad():
            leaf = logits.float().requires_grad_()
            return torch.autograd.grad(torch.softmax(leaf.gather(1, ids.long()), 1), leaf, dweights)

    plan = plan_of(config)  # autograd runs where its forward pass did, which is no stream of a graph
    found = {
        "perm": Kernel(lambda: permutation(ids, experts), placed, expected_order),
        "route": Kernel(lambda: route(logits, config, want_scores=False), routed, expected_routing),
        "route+scores": Kernel(
            lambda: route(logits, config),
            lambda r: (*routed(r), r.scores),
            lambda: (*expected_routing(), torch.softmax(logits.float(), 1)),
        ),
        "route_bwd": Kernel(
            lambda: select_backward(logits, ids, dweights, None, plan), lambda grad: (grad,), expected_gradient
        ),
    }
    if tokens * top_k >= _TILE * experts:
        wide = route(logits, RouterConfig(experts, top_k + 1, normalize=False), want_scores=False)
        share = wide.topk_weights / wide.topk_weights[:, :top_k].sum(1, keepdim=True)
        for mode in _MODES:
            found[f"round_{mode}"] = _rounding(wide.topk_ids, share, experts, top_k, mode)
    found["torch topk"] = Kernel(
        torch_topk, lambda best: (best[0],), lambda: (torch.softmax(logits.float(), 1).topk(top_k).values,)
    )
    found["torch argsort"] = Kernel(
        sorted_slots, lambda slots: (ids.flatten()[slots],), lambda: (ids.flatten().sort().values,)
    )
    return found


def _rounding(ids: Tensor, weights: Tensor, experts: int, top_k: int, mode: str) -> Kernel:
    def rounded(ids: Tensor, weights: Tensor) -> Tensor:
        return round_groups(ids, weights, experts, top_k=top_k, tile=_TILE, mode=mode)

    # Equal on every machine, so the formulas of the CPU say what a kernel must give.
    return Kernel(lambda: rounded(ids, weights), lambda r: (r.cpu(),), lambda: (rounded(ids.cpu(), weights.cpu()),))


def check(made: Mapping[str, Kernel]) -> None:
    """RuntimeError for a kernel whose result is not the expected one."""
    for name, kernel in made.items():
        got, want = kernel.seen(kernel.call()), kernel.expected()
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            if a.is_floating_point():
                reason = compare((a,), (b,), _TOLERANCE[a.dtype]).reason
            else:
                reason = "" if torch.equal(a, b) else "other integers than expected"
            if reason:
                raise RuntimeError(f"{name}: output {index}: {reason}")


def _over(made: Sequence[Kernel]) -> Callable[[int], Any]:
    return lambda index: made[index].call()


def kernels_part(tokens: int, experts: int, top_k: int) -> dict[str, Any]:
    """What says which part it is."""
    return {"part": "kernels", "T": tokens, "E": experts, "k": top_k}


def measure_kernels(tokens: int, experts: int, top_k: int, site: Site, budget: Budget) -> dict[str, Any]:
    """The part: "us" of each, "reasons" of those that have none; in CUDA graphs, on a CPU in eager calls.

    RuntimeError if a result is wrong.
    """
    device = site.torch_device
    nbytes = tokens * (6 * experts + 48 * top_k)  # logits and scores; ids, weights, rows, slots, positions, ...
    with torch.no_grad():
        sets = [kernels(tokens, experts, top_k, device, i) for i in range(set_count(nbytes, site))]
        check(sets[0])
        outcomes = time_interleaved(
            [TimedCall(name, _over([made[name] for made in sets])) for name in sets[0]],
            policy="graph" if device.type == "cuda" else "eager",
            device=device,
            num_sets=len(sets),
            budget=budget,
        )
    seconds = figures(outcomes)["seconds"]
    release(device)
    return kernels_part(tokens, experts, top_k) | {
        "us": {name: s * 1e6 for name, s in seconds.items() if isinstance(s, float)},
        "reasons": {name: s for name, s in seconds.items() if not isinstance(s, float)},
        "input_sets": len(sets),
    }
