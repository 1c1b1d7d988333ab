"""Random batches of random layers and products: a token's bits must be those of the whole pool.

A pool is a layer or product with its tokens, computed once as one batch. A case takes some of them, in another order,
number or neighbourhood, and compares every bit.
"""

import multiprocessing
import random
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from expertile.moe import MoE, moe_mlp
from expertile.ops.grouped_mm.api import grouped_mm

PER_POOL = 100  # cases that share weights and the pool's bits
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
T = torch.Tensor


@dataclass(frozen=True)
class Form:
    """What a layer or product is but for its sizes. `step`: sizes are multiples of it; `experts`: at most."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    experts: int = 32
    step: int = 16
    layer: Mapping[str, Any] = field(default_factory=dict)  # arguments of MoE; of a product none


_GROUPED_SIGMOID = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}
_GPT_OSS = {
    "bias": True,
    "router_bias": True,
    "interleaved": True,
    "activation": "gpt_oss",
    "order": "topk_then_softmax",
}
FORMS = (
    Form("softmax", experts=128),
    Form(
        "sigmoid-groups-shared",
        layer={**_GROUPED_SIGMOID, "shared_intermediate_size": 96, "router_dtype": torch.float32},
    ),
    Form("gpt-oss", layer=_GPT_OSS),
    Form("half-geglu", torch.float16, layer={"activation": "geglu", "normalize": False}),
    Form("mlp"),
    Form("product"),
    Form("product-bias-float32"),
    Form("product-rows-of-b"),
    Form("float32", torch.float32, experts=16),
    Form("odd-reglu", experts=16, step=1, layer={"activation": "reglu"}),
)


def bits(x: T) -> T:
    return x.contiguous().view(_BITS[x.element_size()])


@dataclass(frozen=True)
class Pool:
    """Tokens and what makes rows of them: `run(x, at)` for rows x that are, or stand in for, tokens `at`."""

    what: dict[str, Any]
    x: T
    run: Callable[[T, T], T]


def pool(number: int, device: torch.device, small: bool) -> Pool:
    """The layer or product of number `number` with its tokens; sizes are drawn."""
    form, draw = FORMS[number % len(FORMS)], random.Random(f"pool {number}")
    torch.manual_seed(number)
    tokens = 48 if small else 8192
    slow = form.dtype is torch.float32 or form.step == 1
    wide = 5 if small else 32 if slow else 128  # sizes reach 16 times that
    unit = 4 if form.step == 1 else 8
    experts = unit * draw.randint(1, 2 if small else form.experts // unit)
    top_k = min(draw.choice((1, 2, 4, 8)), experts // 2)
    hidden, inner = (
        form.step * draw.randint(max(1, wide // 4), wide * 16 // form.step // (1 if form.step > 1 else 2))
        for _ in range(2)
    )
    if form.name == "softmax" and not small and draw.random() < 0.5:
        experts, top_k, hidden, inner = 128, 8, 2048, 768
    x = torch.randn(tokens, hidden, device=device).to(form.dtype)
    what = {"form": form.name, "tokens": tokens, "H": hidden, "I": inner, "E": experts, "k": top_k}

    def weight(*shape: int) -> T:
        return torch.randn(shape, device=device).to(form.dtype) * shape[-1] ** -0.5

    if form.name.startswith("product"):
        b, offs_of = weight(experts, inner, hidden).transpose(1, 2), torch.randint(experts, (tokens,), device=device)
        b = b.contiguous() if form.name == "product-rows-of-b" else b
        extra = form.name == "product-bias-float32"
        bias = weight(experts, inner) if extra else None
        out_dtype = torch.float32 if extra else None

        def product(rows: T, at: T) -> T:
            group, order = offs_of[at].sort(stable=True)
            ends = torch.searchsorted(group, torch.arange(experts, device=device), right=True).to(torch.int32)
            out = grouped_mm(rows[order], b, offs=ends, bias=bias, out_dtype=out_dtype, batch_invariant=True)
            return torch.empty_like(out).index_copy(0, order, out)

        return Pool(what, x, product)
    if form.name == "mlp":
        gate_up, down = weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)
        ids = torch.rand(tokens, experts, device=device).argsort(1)[:, :top_k].to(torch.int32)
        ids = torch.where(torch.rand(ids.shape, device=device) < 0.2, -1, ids)  # dropped slots
        weights = torch.rand(tokens, top_k, device=device)
        return Pool(what, x, lambda rows, at: moe_mlp(rows, gate_up, down, ids[at], weights[at], batch_invariant=True))
    layer = MoE(
        hidden, inner, experts, top_k, device=device, dtype=form.dtype, batch_invariant=True, **form.layer
    ).requires_grad_(False)
    if layer.correction_bias is not None:
        layer.correction_bias.uniform_(-0.1, 0.1)
    return Pool(what, x, lambda rows, at: layer(rows))


KINDS = ("subset", "prefix", "permutation", "repeated", "neighbours", "strided")


def rows_of(kind: str, x: T, count: int, made: torch.Generator) -> tuple[T, T, T]:
    """(rows, the token of each, which of them count)."""
    tokens, device = x.shape[0], x.device
    at = torch.randperm(tokens, device=device, generator=made)[:count]
    counted = torch.ones(count, dtype=torch.bool, device=device)
    if kind == "prefix":
        at = torch.arange(count, device=device)
    elif kind == "permutation":
        at = torch.randperm(count, device=device, generator=made)
    elif kind == "repeated":
        at = at[torch.randint(max(1, count // 8), (count,), device=device, generator=made)]
    rows = x[at]
    if kind == "neighbours":  # every other row is something else: large, or not a number
        counted = torch.arange(count, device=device) % 2 == 0
        other = torch.randn(rows.shape, device=device, generator=made).to(x.dtype) * 300
        other[1::4] = torch.nan
        rows = torch.where(counted[:, None], rows, other)
    elif kind == "strided":  # a view of wider rows that starts anywhere
        wide = x.new_zeros((count, x.shape[1] + 3))
        wide[:, 1:-2] = rows
        rows = wide[:, 1:-2]
    return rows, at, counted


def with_gradient(pool: Pool, rows: T, at: T, dy: T) -> tuple[T, T]:
    """(out, gradient of rows)."""
    rows = rows.detach().requires_grad_()
    out = pool.run(rows, at)
    (grad,) = torch.autograd.grad(out, rows, dy[at].to(out.dtype))
    return out.detach(), grad


class Cases:
    """The cases of one pool, and the bits that each of its tokens must have."""

    def __init__(self, number: int, device: torch.device, small: bool) -> None:
        self.device, self.pool = device, pool(number, device, small)
        everyone = torch.arange(self.pool.x.shape[0], device=device)
        with torch.no_grad():
            self.out = bits(self.pool.run(self.pool.x, everyone))
        torch.manual_seed(number)
        self.dy = torch.randn(self.pool.x.shape[0], self.out.shape[1], device=device)
        out, grad = with_gradient(self.pool, self.pool.x, everyone, self.dy)
        self.grad = bits(grad)
        self.trained = (bits(out) != self.out).sum()  # a forward pass with a gradient gives the same bits

    def case(self, number: int) -> tuple[dict[str, Any], T]:
        """(what it was, on the device how many elements differ)."""
        draw = random.Random(f"case {number}")
        tokens = self.pool.x.shape[0]
        kind, count = draw.choice(KINDS), min(tokens, int(2 ** draw.uniform(0, tokens.bit_length())))
        made = torch.Generator(self.device).manual_seed(number)
        rows, at, counted = rows_of(kind, self.pool.x, count, made)
        graded = number % 16 == 0 and kind != "neighbours"  # a gradient of what is not a number is none
        if graded:
            out, grad = with_gradient(self.pool, rows, at, self.dy)
        else:
            with torch.no_grad():
                out = self.pool.run(rows, at)
        wrong = ((bits(out) != self.out[at]) & counted[:, None]).sum()
        if graded:
            wrong = wrong + (bits(grad) != self.grad[at]).sum()
        if number % PER_POOL == 0:
            wrong = wrong + self.trained
        what = {"case": number, "kind": kind, "tokens": count, "gradient": graded, "pool": self.pool.what}
        return what, wrong


def cases_of_pool(device: str, small: bool, first: int, end: int, deadline: float) -> dict[str, list[dict[str, Any]]]:
    """The cases from `first` to `end`, all of one pool, until `deadline` (time.time): what was "done", "failures" with
    how many elements differ, and "errors", of which there are 20 at most."""
    found: dict[str, list[dict[str, Any]]] = {"done": [], "failures": [], "errors": []}
    cases: Cases | None = None
    counts: list[T] = []
    if device == "cuda":
        torch.cuda.empty_cache()
    for number in range(first, end):
        if time.time() > deadline or len(found["errors"]) >= 20:
            break
        try:
            cases = cases or Cases(number // PER_POOL, torch.device(device), small)
            what, wrong = cases.case(number)
        except Exception:
            found["errors"].append({"case": number, "error": traceback.format_exc()[-2000:]})
            continue
        found["done"].append(what)
        counts.append(wrong)
    differing = torch.stack(counts).tolist() if counts else []
    found["failures"] = [what | {"elements": n} for what, n in zip(found["done"], differing, strict=True) if n]
    return found


def fuzz(
    device: torch.device, small: bool, first: int, cases: int, seconds: float, processes: int = 0
) -> dict[str, Any]:
    """Pool by pool, by `processes` side by side, each compiling what its pools need; 0: in this one."""
    start, end, deadline = time.monotonic(), first + cases, time.time() + seconds
    starts = [first, *range((first // PER_POOL + 1) * PER_POOL, end, PER_POOL)]
    jobs = [(device.type, small, at, min(end, (at // PER_POOL + 1) * PER_POOL), deadline) for at in starts]
    if processes:
        with multiprocessing.get_context("spawn").Pool(processes) as workers:
            parts = workers.starmap(cases_of_pool, jobs, chunksize=1)
    else:
        parts = [cases_of_pool(*job) for job in jobs]
    done, failures, errors = ([x for part in parts for x in part[name]] for name in ("done", "failures", "errors"))
    tokens = [what["tokens"] for what in done]
    return {
        "cases": len(done),
        "asked": cases,
        "first": first,
        "with_gradient": sum(what["gradient"] for what in done),
        "tokens_min": min(tokens, default=0),
        "tokens_max": max(tokens, default=0),
        "pools": sum(bool(part["done"]) for part in parts),
        "processes": processes,
        "seconds": time.monotonic() - start,
        "failures": failures[:200],
        "num_failures": len(failures),
        "errors": errors[:200],
    }
