"""What stands between the products of an MoE layer, kernel by kernel: preset "moe-routing".

| operator | what |
|-|-|
| moe_permutation | `permutation` of the ids; torch's stable `argsort` is the least that it needs |
| moe_route, moe_route_scores | `route` of bf16 logits, without and with the scores that auxiliary losses want |
| moe_route_backward | the gradient of the logits from that of the weights |
| moe_round | `round_groups` to tiles of 128 rows, one candidate a token; held against its formulas on the CPU |

Inputs: logits [T, E] bf16, ids [T, k] int32, weights [T, k] float32. The logits of a token are E different multiples of
1/64, so that there is one right choice.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from expertile.lab.operators._binds import several
from expertile.lab.race.operator import Bind, Call, Inputs, Operator, Rival, Workload
from expertile.moe.permute import permutation
from expertile.moe.rounding import round_groups
from expertile.moe.router import RouterConfig, plan_of, route, select_backward
from expertile.roofline import Work

SHAPES = (  # T, E, k
    (32768, 128, 8),
    (24576, 128, 8),
    (1, 128, 8),
    (16, 128, 8),
    (128, 128, 8),
    (32768, 256, 8),
    (32768, 64, 4),
)
TILE = 128
MODES = ("nearest", "adaptive")
_OPS = ("moe_permutation", "moe_route", "moe_route_scores", "moe_route_backward")


def workload(op: str, tokens: int, experts: int, top_k: int, mode: str = "") -> Workload:
    """`op` on T tokens, E experts and top-k; `mode` is that of "moe_round"."""
    dims: tuple[tuple[str, int | str], ...] = (("tokens", tokens), ("experts", experts), ("top_k", top_k))
    name = f"{op.removeprefix('moe_').replace('_', '-')}{f'-{mode}' * bool(mode)}-T{tokens}-E{experts}-k{top_k}"
    return Workload(name, "moe-routing", op, (*dims, ("mode", mode)) if mode else dims, "bf16")


def workloads() -> tuple[Workload, ...]:
    """Every kernel at each of `SHAPES` and at one that a CPU computes in a moment; rounding only where an expert has a
    tile of rows on average."""
    found = []
    for shape in (*SHAPES, (600, 8, 2)):
        tokens, experts, top_k = shape
        found += [workload(op, *shape) for op in _OPS]
        if tokens * top_k >= TILE * experts:
            found += [workload("moe_round", *shape, mode) for mode in MODES]
    return tuple(found)


def _shape(w: Workload) -> tuple[int, int, int]:
    return w["tokens"], w["experts"], w["top_k"]


def _logits(w: Workload, device: torch.device, seed: int) -> Tensor:
    tokens, experts, _ = _shape(w)
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.rand(tokens, experts, device=device, generator=generator).argsort(1)
    return ((order - experts // 2) / 64).bfloat16()


def _gradient_inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    logits = _logits(w, device, seed)
    dweights = torch.randn(w["tokens"], w["top_k"], generator=torch.Generator().manual_seed(seed)).to(device)
    return logits, logits.topk(w["top_k"]).indices.int(), dweights


def _candidates(w: Workload, device: torch.device, seed: int) -> Inputs:
    """(ids, weights) [T, k + 1]; the weights of a token's first k sum to 1."""
    best = _logits(w, device, seed).topk(w["top_k"] + 1)
    exps = torch.softmax(best.values, 1, dtype=torch.float32)
    return best.indices.int(), exps / exps[:, :-1].sum(1, keepdim=True)


def _permutation_reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    ids = inputs[0]
    slots = ids.flatten().argsort(stable=True)
    positions = torch.empty_like(slots).scatter_(0, slots, torch.arange(slots.numel(), device=ids.device))
    ends = ids.flatten().bincount(minlength=w["experts"]).cumsum(0)
    return tuple(t.double() for t in (ends, slots // w["top_k"], slots, positions.view(ids.shape)))


def _routing(scores: bool) -> Callable[[Workload, Inputs], Call]:
    def bind(w: Workload, inputs: Inputs) -> Call:
        config = RouterConfig(w["experts"], w["top_k"])

        def call() -> tuple[Tensor, ...]:
            found = route(inputs[0], config, want_scores=scores)
            own = found.topk_weights, found.topk_ids
            return own if found.scores is None else (*own, found.scores)

        return call

    return bind


def _routing_reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    best = inputs[0].float().topk(w["top_k"])
    return torch.softmax(best.values, 1), best.indices.double()


def _topk_reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    """The weights are not divided by their sum."""
    best = inputs[0].float().topk(w["top_k"]).indices
    return torch.softmax(inputs[0].double(), 1).gather(1, best), best.double()


def _backward(w: Workload, inputs: Inputs) -> Call:
    plan = plan_of(RouterConfig(w["experts"], w["top_k"]))  # not through autograd, whose stream no graph captures
    logits, ids, dweights = inputs
    return lambda: (select_backward(logits, ids, dweights, None, plan),)


def _backward_reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    logits, ids, dweights = inputs
    with torch.enable_grad():
        leaf = logits.float().requires_grad_()
        return torch.autograd.grad(torch.softmax(leaf.gather(1, ids.long()), 1), leaf, dweights)


def _rounded(w: Workload, ids: Tensor, weights: Tensor) -> Tensor:
    return round_groups(ids, weights, w["experts"], top_k=w["top_k"], tile=TILE, mode=w["mode"])


def _bytes(of_token: Callable[[int, int], int], of_expert: int = 0) -> Callable[[Workload], Work]:
    """`of_token(E, k)` for each token, `of_expert` for each expert; nothing is computed that counts as FLOPs."""

    def work(w: Workload) -> Work:
        tokens, experts, top_k = _shape(w)
        return Work(0.0, float(tokens * of_token(experts, top_k) + of_expert * experts))

    return work


def _within(rel_error: float, max_error: float) -> Callable[[Workload], tuple[float, float]]:
    return lambda w: (rel_error, max_error)


def _ours(bind: Bind) -> Rival:
    return Rival("expertile", bind, peer=False)


_EXACTLY, _FLOAT32 = _within(0.0, 0.0), _within(1e-5, 1e-4)  # an id that is one off exceeds either
_ARGSORT = Rival(
    "torch.argsort",
    lambda w, inputs: lambda: (inputs[0].flatten().argsort(stable=True),),
    reference=lambda w, inputs: _permutation_reference(w, inputs)[2:3],
    work=_bytes(lambda e, k: 12 * k),
)
_TOPK = Rival(
    "torch.topk",
    several(lambda logits, k: torch.softmax(logits, -1, dtype=torch.float32).topk(k), "top_k"),
    reference=_topk_reference,
    work=_bytes(lambda e, k: 2 * e + 12 * k),
)

OPERATORS = (
    Operator(
        "moe_permutation",
        lambda w, device, seed: (_logits(w, device, seed).topk(w["top_k"]).indices.int(),),
        _permutation_reference,
        _bytes(lambda e, k: 16 * k, 4),
        (_ours(several(lambda ids, experts: vars(permutation(ids, experts)).values(), "experts")), _ARGSORT),
        _EXACTLY,
    ),
    Operator(
        "moe_route",
        lambda w, device, seed: (_logits(w, device, seed),),
        _routing_reference,
        _bytes(lambda e, k: 2 * e + 8 * k),
        (_ours(_routing(scores=False)), _TOPK),
        _FLOAT32,
    ),
    Operator(
        "moe_route_scores",
        lambda w, device, seed: (_logits(w, device, seed),),
        lambda w, inputs: (*_routing_reference(w, inputs), torch.softmax(inputs[0].float(), 1)),
        _bytes(lambda e, k: 6 * e + 8 * k),
        (_ours(_routing(scores=True)),),
        _FLOAT32,
    ),
    Operator(
        "moe_route_backward",
        _gradient_inputs,
        _backward_reference,
        _bytes(lambda e, k: 2 * e + 10 * k),
        (_ours(_backward),),
        _within(2.0**-8, 2.0**-6),
    ),
    Operator(
        "moe_round",
        _candidates,
        lambda w, inputs: (_rounded(w, *(t.cpu() for t in inputs)).to(inputs[0].device).double(),),
        _bytes(lambda e, k: 12 * (k + 1)),
        (_ours(lambda w, inputs: lambda: (_rounded(w, *inputs),)),),
        _EXACTLY,
    ),
)
PRESETS = {"moe-routing": workloads}
