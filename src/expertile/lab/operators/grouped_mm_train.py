"""A training step of a grouped linear layer, as a model makes it.

    out[rows of g] = a[rows of g] @ weight[g]^T;  out.backward(dy);  a.grad, weight.grad

weight [G, N, K] is stored as nn.Linear stores one, and the product takes its transpose: what autograd does on the way
into `.grad` counts, which it does not where gradients are asked for by `torch.autograd.grad`. Both begin as None.

Inputs: a [M, K], weight, dy [M, N], offs [G]. dims: as `products` has them. FLOPs: 6 M N K. Bytes: a, dy, out, a's
gradient and every weight's once, and the weights of groups that have rows.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.operators import products
from expertile.lab.operators.products import REAL_MODELS, dims, rows
from expertile.lab.race.gate import full_precision
from expertile.lab.race.operator import Call, Inputs, Operator, Rival, Workload
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.roofline import Work

OP, PRESET = "grouped_mm_train", "grouped-train"
_SMALL = (4, 64, 32, 2)  # experts, hidden, FFN, top-k of what a CPU computes in a moment


def _inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    make = products.random(device, seed)
    return (make(rows(w), w["k"]), make(w["groups"], w["n"], w["k"]), make(rows(w), w["n"]), products.offs(w, device))


def _reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    a, weight, dy, _ = inputs
    out, da, dweight = (torch.zeros(t.shape, device=t.device) for t in (dy, a, weight))
    with full_precision():
        for g, start, end in products.spans(w):
            x, d, b = a[start:end].float(), dy[start:end].float(), weight[g].float()
            out[start:end], da[start:end], dweight[g] = x @ b.t(), d @ b, d.t() @ x
    return out, da, dweight


def _work(w: Workload) -> Work:
    m, n, k = rows(w), w["n"], w["k"]
    weights = (products.used(w) + w["groups"]) * n * k
    return Work(6.0 * m * n * k, 2.0 * (2 * m * (n + k) + weights))


def _memory_nbytes(w: Workload) -> float:
    """Inputs, two sets of results, and the reference in float32 with one group's."""
    m, n, k = rows(w), w["n"], w["k"]
    once = float(m * (n + k) + w["groups"] * n * k)
    return 2.0 * once + 2 * 2.0 * once + 2 * 4.0 * once


def _step(product: Callable[..., Tensor], w: Workload, inputs: Inputs) -> Call:
    a, weight, dy, offs = inputs
    a, weight = a.detach().requires_grad_(), weight.detach().requires_grad_()

    def call() -> tuple[Tensor, ...]:
        a.grad = weight.grad = None
        with torch.enable_grad():
            out = product(a, weight, offs)
            out.backward(dy)  # type: ignore[no-untyped-call]
        assert a.grad is not None and weight.grad is not None
        return out.detach(), a.grad, weight.grad

    return call


def _ours(a: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return grouped_mm(a, weight.transpose(1, 2), offs=offs)


def _torch(a: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(a, weight.transpose(1, 2), offs=offs)


def _loop(w: Workload, inputs: Inputs) -> Call:
    """F.linear for each group that has rows, whose sizes the host knows."""
    spans = [*products.spans(w)]

    def product(a: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return torch.cat([F.linear(a[start:end], weight[g]) for g, start, end in spans])

    return _step(product, w, inputs)


OPERATORS = (
    Operator(
        name=OP,
        make_inputs=_inputs,
        reference=_reference,
        work=_work,
        rivals=(
            Rival("expertile", partial(_step, _ours), peer=False, graph=False),
            Rival("torch", partial(_step, _torch), graph=False),
            Rival("loop", _loop, graph=False),
        ),
        tolerance=products.tolerance,
        memory_nbytes=_memory_nbytes,
    ),
)


def _workloads() -> tuple[Workload, ...]:
    found = []
    for model, (experts, hidden, ffn, top_k) in {"small": _SMALL, **REAL_MODELS}.items():
        tokens = 64 if model == "small" else 8192
        for projection, n, k in (("gate-up", 2 * ffn, hidden), ("down", hidden, ffn)):
            sizes = dims(experts, tokens, top_k, n, k, "uniform")
            found.append(Workload(f"{model}-{projection}", PRESET, OP, sizes, "bf16"))
    return tuple(found)


PRESETS = {PRESET: _workloads}
