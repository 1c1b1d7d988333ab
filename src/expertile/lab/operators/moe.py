"""The MoE feed-forward layer in the lab, routing included: "moe" (forward) and "moe_train" (forward and backward).

    logits = x @ router^T;  the k largest;  w = their softmax;  out[t] = Σ_j w[t, j] · down[e] @ (silu(gate) · up),
    (gate, up) = gate_up[e] @ x[t],  e = ids[t, j]

Inputs: x [T, H], router [E, H], gate_up [E, 2I, H], down [E, H, I]; with "moe_train" also dy [T, H]. A call of
"moe_train" gives out and the gradients of x, router, gate_up and down.

dims: tokens, hidden, intermediate, experts, top_k, routing. Tokens go where `race/routing.py` sends them with seed 0,
in every set of inputs; logits are so far apart that no two ways to compute them in 16 bits choose differently. Bytes:
x, router, the weights of the experts that have tokens and out once; in training also dy and every gradient, those of
idle experts included.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from expertile.lab.operators._binds import with_gradients
from expertile.lab.operators._moe_rivals import WAYS, Way, dense, dense_reference, dense_work, interleaved
from expertile.lab.operators.products import REAL_MODELS
from expertile.lab.race.gate import full_precision
from expertile.lab.race.operator import ROUNDOFF, Call, Inputs, Operator, Rival, Workload
from expertile.lab.race.record import DENSE
from expertile.lab.race.routing import topk_ids
from expertile.roofline import Work

Size = tuple[int, int, int, int, int]  # T, H, I, E, k

# Of SonicMoE's paper (arXiv:2512.14080): the sizes that it gives in full first, then every row of its table.
SIZES: tuple[Size, ...] = ((32768, 4096, 1024, 128, 8), (24576, 1536, 256, 128, 8), (32768, 4096, 512, 128, 8))
SMALL: Size = (96, 64, 32, 8, 2)  # what a CPU computes in a moment
_SONIC: tuple[tuple[int, int, tuple[tuple[int, int, int], ...]], ...] = (  # T, H, (I, E, k) …
    (40960, 768, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
    (24576, 1536, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
    (32768, 4096, ((256, 256, 16), (512, 128, 8), (1024, 64, 4), (2048, 64, 4))),
)
_MODELS = ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b", "mixtral-8x7b")


def size(w: Workload) -> Size:
    """(T, H, I, E, k)."""
    return w["tokens"], w["hidden"], w["intermediate"], w["experts"], w["top_k"]


@lru_cache(maxsize=64)
def _ids(routing: str, tokens: int, experts: int, top_k: int) -> NDArray[np.int32]:
    return topk_ids(routing, tokens, experts, top_k, seed=0)


@lru_cache(maxsize=512)
def used(w: Workload) -> int:
    """Experts that have tokens."""
    t, _, _, e, k = size(w)
    return len(np.unique(_ids(w["routing"], t, e, k)))


def tokens_and_router(w: Workload, device: torch.device, seed: int) -> Inputs:
    """x, of unit variance, and router."""
    t, h, _, e, k = size(w)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=torch.float32)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    router = torch.linalg.qr(normal(h, e)).Q.t().to(w.torch_dtype).contiguous()
    chosen = torch.from_numpy(_ids(w["routing"], t, e, k)).to(device).long()
    logits = (uniform(t, e) - 1.5).scatter_(1, chosen, 1.5 * uniform(t, k))
    with full_precision():
        rows, x = router.float(), normal(t, h)
        x = (x + (logits - x @ rows.t()) @ rows).to(w.torch_dtype)
    return x, router


def make_inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    """x has unit variance, weights that of 1 / inputs, so that every intermediate is of the order of 1."""
    t, h, i, e, _ = size(w)
    generator = torch.Generator(device).manual_seed(seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=w.torch_dtype)

    inputs = (*tokens_and_router(w, device, seed), normal(e, 2 * i, h).mul_(h**-0.5), normal(e, h, i).mul_(i**-0.5))
    return (*inputs, normal(t, h)) if w.op == "moe_train" else inputs


def routed(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(ids, weights) [T, k], in float32."""
    best = torch.topk(x.float() @ router.float().t(), top_k, dim=1)
    return best.indices, torch.softmax(best.values, 1)


def by_expert(
    expert: Callable[..., Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    own: Sequence[Tensor] = (),
    dy: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """out[t] = Σ_j weights[t, j] · expert(e, x[t], *(each of `own`)[e]), e = ids[t, j], in float32;
    with `dy` also the gradients of x, weights and `own`."""
    train = dy is not None
    out, *gradients = (torch.zeros_like(t, dtype=torch.float32) for t in (x, *((x, weights, *own) if train else ())))
    with full_precision(), torch.set_grad_enabled(train):
        for e in ids.unique().tolist():
            slots = tokens, _ = (ids == e).nonzero(as_tuple=True)
            parts = (x[tokens], weights[slots], *(t[e] for t in own))
            rows, weight, *of_expert = leaves = [t.detach().float().requires_grad_(train) for t in parts]
            y = expert(e, rows, *of_expert) * weight[:, None]
            out[tokens] += y.detach()  # a token meets an expert once
            if dy is not None:
                found = torch.autograd.grad(y, leaves, dy[tokens].float())
                gradients[0][tokens] += found[0]
                for whole, where, part in zip(gradients[1:], (slots, *[e] * len(own)), found[1:], strict=True):
                    whole[where] = part
    return (out, *gradients)


def _expert(_: int, rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up.t()).chunk(2, 1)
    return (F.silu(gate) * up) @ down.t()


def reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    """out; with "moe_train" also dx, drouter, dgate_up and ddown."""
    x, router, gate_up, down, *dy = inputs
    with full_precision():
        ids, weights = routed(x, router, w["top_k"])
        found = by_expert(_expert, x, ids, weights, (gate_up, down), *dy)
        if not dy:
            return found
        out, dx, dweights, *of_own = found
        dchosen = weights * (dweights - (weights * dweights).sum(1, keepdim=True))
        dlogits = dx.new_zeros(x.shape[0], w["experts"]).scatter_(1, ids, dchosen)
        dx += dlogits @ router.float()
        return out, dx, dlogits.t() @ x.float(), *of_own


def work(w: Workload) -> Work:
    t, h, i, e, k = size(w)
    read = 2 * t * h + e * h + used(w) * 3 * h * i  # 2: x and out
    return Work(6.0 * t * k * h * i, float(w.itemsize * read))


def train_work(w: Workload) -> Work:
    t, h, i, e, _ = size(w)
    forward, gradients = work(w), 2 * t * h + e * h + e * 3 * h * i  # 2: dy and dx
    return Work(3.0 * forward.flops, forward.nbytes + w.itemsize * gradients)


def tolerance(w: Workload) -> tuple[float, float]:
    """Pre-activation, activation, y and out are rounded, as are routing weights and the partial sums of index_add in
    some; in training their gradients as well. A slot left out changes some element by a tenth of the largest."""
    return 4 * ROUNDOFF[w.dtype], 12 * ROUNDOFF[w.dtype]


def routing_nbytes(w: Workload) -> float:
    """Logits, ids, weights, and the permutation: offs, rows, slots, positions."""
    t, _, _, e, k = size(w)
    return float(w.itemsize * t * e + 20 * t * k + 4 * e)


def peak(w: Workload) -> float:
    """In combine: act, y and out."""
    t, h, i, _, k = size(w)
    return w.itemsize * float(t * k * (i + h) + t * h) + routing_nbytes(w)


def train_peak(w: Workload) -> float:
    """Beside out, pre, dpre and ddown, whichever is more: act_w and the copy of dy in expert order; dgate_up and that
    of x; or dgate_up, dx of each row and dx."""
    t, h, i, e, k = size(w)
    rows = t * k
    kept = t * h + rows * 4 * i + e * h * i
    most = max(rows * (i + h), 2 * e * h * i + rows * h + t * h)
    return w.itemsize * float(kept + most) + routing_nbytes(w) + 4.0 * rows


def memory_nbytes(w: Workload) -> float:
    """Inputs and a second gate_up, results three times and in float32 once, the peak of a call twice, and the rows of
    `dense` with its results and references. Weights take part whole, and once: their reference goes by expert."""
    t, h, i, e, k = size(w)
    inputs, outputs, rows = 2 * t * h + e * h + 5 * e * h * i, t * h, 4 * t * k * h
    if w.op == "moe_train":
        outputs, rows = 2 * t * h + e * h + 3 * e * h * i, 2 * rows
    peak_nbytes = train_peak(w) if w.op == "moe_train" else peak(w)
    return w.itemsize * float(inputs + 5 * outputs + rows) + 2 * peak_nbytes


def _binding(way: Way, w: Workload, inputs: Inputs) -> Call:
    run = way.make(w, way.arrange(inputs))
    if way.compiles:
        with torch.no_grad():
            run()
    return lambda: (run(),)


def _training(way: Way, w: Workload, inputs: Inputs) -> Call:
    *tensors, dy = inputs
    leaves = tuple(t.detach().requires_grad_() for t in way.arrange(tuple(tensors)))
    call = with_gradients(way.make(w, leaves), leaves, dy)
    if way.compiles:
        call()
    return call


def _interleaved_reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    out, dx, drouter, dgate_up, ddown = reference(w, inputs)
    return out, dx, drouter, interleaved(dgate_up), ddown


def _rival(way: Way, train: bool) -> Rival:
    bind, formula = (_training, train_peak) if train else (_binding, peak)
    own_reference = _interleaved_reference if train and way.interleaves else None
    own = Rival(way.name, partial(bind, way), way.supports, way.peer, way.graph, reference=own_reference)
    return own if way.peer else replace(own, peak_nbytes=formula)


def workload(name: str, preset: str, shape: Size, train: bool = False, note: str = "") -> Workload:
    """Uniformly routed, bfloat16. ValueError unless H >= E >= k: fewer dimensions hold no E orthonormal rows."""
    t, h, i, e, k = shape
    if not h >= e >= k >= 1:
        raise ValueError(f"shape: expected hidden >= experts >= top_k >= 1, got {h}, {e}, {k}")
    dims = (("tokens", t), ("hidden", h), ("intermediate", i), ("experts", e), ("top_k", k), ("routing", "uniform"))
    return Workload(name + "-train" * train, preset, "moe_train" if train else "moe", dims, "bf16", note)


def _both(preset: str, sizes: Iterable[Size], small: Size) -> tuple[Workload, ...]:
    """Forward and training of each, and of one that a CPU computes in a moment."""
    found = [(named(shape), shape) for shape in sizes] + [("small", small)]
    return tuple(workload(name, preset, shape, train) for train in (False, True) for name, shape in found)


def named(shape: Size) -> str:
    return "T{}-H{}-I{}-E{}-k{}".format(*shape)


def layers() -> tuple[Workload, ...]:
    """Three sizes of SonicMoE's table and one layer of each model at 8192 tokens, forward and training."""
    of_models = (_of_model("moe", m, 8192, train) for train in (False, True) for m in _MODELS)
    return *_both("moe", SIZES, SMALL), *of_models


def sonic() -> tuple[Workload, ...]:
    return _both("moe-sonic", ((t, h, *iek) for t, h, rows in _SONIC for iek in rows), (192, 96, 32, 8, 4))


def _of_model(preset: str, model: str, tokens: int, train: bool = False) -> Workload:
    note = "sizes of the published configuration; softmax over the chosen, SwiGLU, no bias"
    experts, hidden, intermediate, top_k = REAL_MODELS[model]
    return workload(f"{model}-tokens{tokens}", preset, (tokens, hidden, intermediate, experts, top_k), train, note)


def decode() -> tuple[Workload, ...]:
    """Sizes of real models, all routed and activated as the layer above is."""
    models = [_of_model("moe-decode", model, t) for model in _MODELS for t in (1, 8, 32, 128)]
    return (*models, workload("small", "moe-decode", (8, 192, 96, 16, 2)))


_FORWARD, _TRAIN = (tuple(_rival(way, train) for way in WAYS) for train in (False, True))
_DENSE = Rival(DENSE, dense, reference=dense_reference, work=dense_work)
OPERATORS = (
    Operator("moe", make_inputs, reference, work, _FORWARD, tolerance, (_DENSE,), memory_nbytes),
    Operator("moe_train", make_inputs, reference, train_work, _TRAIN, tolerance, (_DENSE,), memory_nbytes),
)
PRESETS = {"moe": layers, "moe-sonic": sonic, "moe-decode": decode}
