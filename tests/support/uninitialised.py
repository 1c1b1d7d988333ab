"""Every operator and backend on memory that holds NaN (or large integers, or bytes of NaN) before it is written.

What a buffer holds that `torch.empty` hands out must reach no result. Two things see to it: `Filled` fills what the
code of expertile allocates, and `leave_nan_behind` frees memory full of NaN, which torch's own code allocates next.
Inputs hold NaN in the rows past offs[-1].
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import expertile as xt
from expertile.moe.permute import permutation
from expertile.moe.rounding import round_groups
from expertile.moe.router import RouterConfig
from expertile.ops.attention.backends import BACKENDS as ATTENTION
from expertile.ops.gathered_mm import api as gathered
from expertile.ops.gathered_mm.backends import BACKENDS as GATHERED
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.gathered_mm.problem import ACTIVATIONS
from expertile.ops.grouped_mm.backends import BACKENDS as GROUPED
from expertile.ops.quantize.api import (
    quantize_activations,
    quantize_per_row,
    quantize_rms_norm,
    quantize_swiglu,
    quantize_tokens,
    quantize_weights,
)
from expertile.ops.scaled_grouped_mm.backends import BACKENDS as SCALED
from expertile.ops.weight_only_mm.backends import BACKENDS as WEIGHT_ONLY

Tensors = tuple[torch.Tensor, ...]
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


class Filled(TorchDispatchMode):
    """Uninitialised tensors hold zeros, or what is worst for their dtype."""

    def __init__(self, worst: bool) -> None:
        super().__init__()
        self.worst = worst

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name.removeprefix("aten::") in _EMPTY and out.device.type != "meta":
            fill(out, self.worst)
        return out


def fill(x: torch.Tensor, worst: bool) -> None:
    if not worst:
        (x.view(torch.uint8) if x.dtype.itemsize == 1 else x).zero_()
    elif x.dtype.itemsize == 1:  # NaN in e4m3
        x.view(torch.uint8).fill_(0x7F)
    elif x.is_floating_point():
        x.fill_(float("nan"))
    else:
        x.fill_(torch.iinfo(x.dtype).max)


def leave_nan_behind(device: str) -> None:
    """Free blocks of every size up to 4 MiB that are full of NaN."""
    held = [torch.full((1 << e,), float("nan"), device=device) for e in range(4, 21) for _ in range(4)]
    del held


def difference(operation: Callable[[], Tensors], device: str) -> str | None:
    """What differs between memory that held zeros and memory that held the worst; None if nothing does. ValueError of
    a backend that does not take the problem."""
    found = []
    for worst in (False, True):
        if worst:
            leave_nan_behind(device)
        with Filled(worst):
            found.append(operation())
    for place, (clean, dirty) in enumerate(zip(*found, strict=True)):
        x, y = (t.double() if t.is_floating_point() else t for t in (clean, dirty))
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            return f"result {place} is not finite even on zeros"
        # Some backends' sums are in any order; a NaN or a large integer is no rounding error.
        if not torch.allclose(x.double(), y.double(), rtol=2e-2, atol=2e-2 * float(x.double().abs().max() + 1e-30)):
            return f"result {place} depends on what its memory held: {int((x != y).sum())} of {x.numel()} elements"
    return None


SIZES, PAST = (5, 0, 33, 1, 20), 11
USED = sum(SIZES)


class Data:
    """Random tensors of one device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype, tokens: tuple[int, ...]) -> None:
        self.device, self.dtype, self.tokens = device, dtype, tokens
        self.generator = torch.Generator().manual_seed(0)
        self.offs = self.ints(torch.tensor(SIZES).cumsum(0))

    def ints(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int32).to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype).to(self.device)

    def rows(self, *shape: int, dim: int = 0) -> torch.Tensor:
        """With NaN past the last group."""
        x = self.normal(*shape)
        x.narrow(dim, USED, PAST).fill_(float("nan"))
        return x


def _gradients(function: Callable[..., Any], inputs: Tensors, used: int | None = None) -> Tensors:
    """The result's first `used` rows, and gradients of the inputs."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    out = tuple(o[:used] for o in out)
    return (*(o.detach() for o in out), *torch.autograd.grad(sum((o * o.detach()).sum() for o in out), inputs))


def _grouped(d: Data, backend: str) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    # No multiple of 32: on a CPU with AMX oneDNN reads past the ends of such rows, into the padding of the next.
    total, k, n = USED + PAST, 88, 72
    a, b, bias = d.rows(total, k), d.normal(5, n, k), d.normal(5, n)
    options = {"offs": d.offs, "backend": backend}
    yield "rows", lambda: (xt.grouped_mm(a, b.transpose(1, 2), **options)[:USED],)
    yield "bias", lambda: (xt.grouped_mm(a, b.transpose(1, 2), bias=bias, **options)[:USED],)
    wide = {"out_dtype": torch.float32, **options}
    yield "out_dtype", lambda: (xt.grouped_mm(a, b.transpose(1, 2).contiguous(), **wide)[:USED],)
    dy, x = d.rows(total, n), d.rows(total, k)
    yield "summed", lambda: (xt.grouped_mm(dy.t(), x, **options),)
    columns = d.rows(k, total, dim=1)
    yield "columns", lambda: (xt.grouped_mm(b, columns, **options)[:, :USED],)
    batch = d.normal(5, 13, k)
    yield "batched", lambda: (xt.grouped_mm(batch, b.transpose(1, 2), backend=backend),)
    whole = d.normal(total, k)
    yield (
        "gradients",
        lambda: _gradients(lambda a, b: xt.grouped_mm(a, b.transpose(1, 2), **options)[:USED], (whole, b)),
    )


def _gathered(d: Data, backend: str) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    tokens, k, n, total = 30, 40, 48, USED + PAST
    x, b, dy = d.normal(tokens, k), d.normal(5, n, k).transpose(1, 2), d.normal(tokens, k)
    rows = torch.randint(0, tokens, (total,), generator=d.generator)
    slots = torch.randperm(tokens * 3, generator=d.generator)[:total]
    rows[USED:], slots[USED:] = 0, 0
    rows, slots, options = d.ints(rows), d.ints(slots), {"backend": backend}
    yield "mm", lambda: (gathered.gathered_mm(x, b, rows, d.offs, **options)[:USED],)
    bias, weights = d.normal(5, n), torch.rand(tokens, 3, generator=d.generator).to(d.device)
    down, pre, grads = d.normal(5, n // 2, k), d.rows(total, n), d.normal(total, n)
    for activation in ACTIVATIONS:
        form = {"activation": activation, "interleaved": activation == "gpt_oss", **options}
        yield (
            f"gated {activation}",
            lambda form=form: tuple(
                t[:USED] for t in gathered.gathered_gated_mm(x, b, rows, d.offs, bias=bias, **form)
            ),
        )

        def backward(form: dict[str, Any] = form) -> Tensors:
            dpre, act, dweights = gathered.gated_backward_mm(dy, down, rows, slots, weights, pre, d.offs, **form)
            return dpre[:USED], act[:USED], dweights

        yield f"backward {activation}", backward
    yield "wgrad", lambda: (gathered.gathered_wgrad(x, rows, grads, d.offs, **options),)
    yield "wgrad of the other", lambda: (gathered.gathered_wgrad(grads, rows, x, d.offs, gather_b=True, **options),)
    yield (
        "gradients",
        lambda: _gradients(lambda x, b: gathered.gathered_mm(x, b, rows, d.offs, **options)[:USED], (x, b)),
    )


def _weight_only(d: Data, backend: str) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    a = d.rows(USED + PAST, 128)
    for group, symmetric in ((32, True), (128, False)):
        w = xt.Int4Weight.quantize(d.normal(5, 24, 128), group, symmetric)
        yield f"group {group}", lambda w=w: (xt.grouped_mm(a, w, offs=d.offs, backend=backend)[:USED],)
    mxfp4 = xt.Mxfp4Weight.quantize(d.normal(5, 24, 96))
    b = d.rows(USED + PAST, 96)
    yield "mxfp4", lambda: (xt.grouped_mm(b, mxfp4, offs=d.offs, backend=backend)[:USED],)


def _scaled(d: Data, backend: str) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    a, w = quantize_activations(d.normal(USED + PAST, 272)), quantize_weights(d.normal(5, 144, 272))
    options = {"offs": d.offs, "backend": backend, "out_dtype": d.dtype}

    def call() -> Tensors:
        return (xt.scaled_grouped_mm(a.values, w.values.transpose(1, 2), a.scales, w.scales, **options)[:USED],)

    yield "blocks", call


def _attention(d: Data, backend: str) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    for name, shape, options in (("plain", (2, 4, 37, 40), {}), ("causal", (1, 2, 70, 64), {"causal": True})):
        q, k, v = d.normal(*shape), d.normal(*shape), d.normal(*shape)
        yield (
            name,
            lambda q=q, k=k, v=v, options=options: _gradients(
                lambda q, k, v: xt.attention(q, k, v, backend=backend, return_lse=True, **options), (q, k, v)
            ),
        )
    starts, packed = d.ints(torch.tensor([0, 5, 5, 70])), d.normal(70, 2, 64)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 65, "max_seqlen_k": 65}
    yield "packed", lambda: _gradients(lambda q: xt.attention(q, q, q, backend=backend, **lengths), (packed,))


def _moe(d: Data) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    experts, hidden, inner = 6, 128, 128
    up, down, up_bias, down_bias = (
        d.normal(*s) / 8
        for s in ((experts, 2 * inner, hidden), (experts, hidden, inner), (experts, 2 * inner), (experts, hidden))
    )
    for tokens in d.tokens:
        x, weights = d.normal(tokens, hidden), torch.rand(tokens, 2, generator=d.generator).to(d.device)
        ids = d.ints(torch.randint(-1, experts, (tokens, 2), generator=d.generator))  # -1: dropped; the last has none
        ids[ids == experts - 1] = experts
        logits = d.normal(tokens, experts)
        yield (
            f"mlp {tokens}",
            lambda x=x, ids=ids, weights=weights: (
                xt.moe_mlp(x, up, down, ids, weights, gate_up_bias=up_bias, down_bias=down_bias),
            ),
        )
        yield (
            f"mlp gradients {tokens}",
            lambda x=x, ids=ids, weights=weights: _gradients(
                lambda x, up, down, weights, b, c: xt.moe_mlp(x, up, down, ids, weights, gate_up_bias=b, down_bias=c),
                (x, up, down, weights, up_bias, down_bias),
            ),
        )

        def order(ids: torch.Tensor = ids) -> Tensors:
            found = permutation(ids, experts)
            return found.offs, found.rows, found.slots, found.positions

        yield f"permutation {tokens}", order
        y, positions = d.normal(2 * tokens, hidden), permutation(ids, experts).positions
        yield (
            f"combine {tokens}",
            lambda y=y, positions=positions, weights=weights: _gradients(
                lambda y, weights: combine(y, positions, weights), (y, weights)
            ),
        )
        for rounding in (None, "nearest", "adaptive"):
            config = RouterConfig(experts, 2, rounding=rounding, tile=4, candidates=2, capacity_factor=1.5)

            def routed(logits: torch.Tensor = logits, config: RouterConfig = config) -> Tensors:
                found = xt.route(logits.requires_grad_(), config)
                (dlogits,) = torch.autograd.grad(found.topk_weights.square().sum() + found.scores.sum(), logits)
                return found.topk_ids, found.topk_weights.detach(), found.scores.detach(), dlogits

            yield f"route {rounding} {tokens}", routed
        distinct = d.ints(torch.rand(tokens, experts, generator=d.generator).argsort(1)[:, :3])
        yield (
            f"round {tokens}",
            lambda ids=distinct, tokens=tokens: (
                round_groups(
                    ids,
                    torch.rand(tokens, 3, generator=torch.Generator().manual_seed(1)).to(d.device),
                    experts,
                    top_k=2,
                    tile=4,
                ),
            ),
        )
        for name, pair in (
            ("fp8", lambda: (quantize_weights(up), quantize_weights(down))),
            ("int4", lambda: (xt.Int4Weight.quantize(up), xt.Int4Weight.quantize(down))),
            ("mxfp4", lambda: (xt.Mxfp4Weight.quantize(up), xt.Mxfp4Weight.quantize(down))),
        ):
            if d.dtype is torch.float32 and name != "fp8":
                continue
            quantised = pair()
            yield (
                f"mlp {name} {tokens}",
                lambda x=x, ids=ids, weights=weights, w=quantised: (xt.moe_mlp(x, *w, ids, weights),),
            )


def _rows(d: Data) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    for shape in ((7, 37), (3, 1030), (130, 256)):
        x, weight, residual = d.normal(*shape), d.normal(shape[1]), d.normal(*shape)
        yield f"softmax {shape}", lambda x=x: _gradients(xt.softmax, (x,))
        for norm in (xt.layer_norm, xt.rms_norm):
            yield f"{norm.__name__} {shape}", lambda x=x, w=weight, norm=norm: _gradients(norm, (x, w))
            yield (
                f"{norm.__name__} of a sum {shape}",
                lambda x=x, w=weight, r=residual, norm=norm: _gradients(
                    lambda x, w, r: norm(x, w, residual=r), (x, w, r)
                ),
            )
    grid = d.normal(2, 19, 33)
    yield "add_scalar", lambda: _gradients(lambda x: xt.add_scalar(x, 1.5), (grid,))
    for boundary in ("zero", "replicate", "circular", "interior"):
        yield f"laplacian {boundary}", lambda b=boundary: _gradients(lambda x: xt.laplacian(x, boundary=b), (grid,))


def _quantised(d: Data) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    x, w, weight, pre = d.normal(USED + PAST, 272), d.normal(3, 150, 272), d.normal(272), d.normal(USED, 544)

    def flat(*blocks: Any) -> Tensors:
        parts = [(b,) if isinstance(b, torch.Tensor) else (b.values.float(), b.scales) for b in blocks]
        return tuple(t for part in parts for t in part)

    yield "activations", lambda: flat(quantize_activations(x))
    yield "activations per row", lambda: flat(quantize_per_row(x))
    yield "activations both ways", lambda: flat(*quantize_activations(x, offs=d.offs))
    yield "tokens", lambda: flat(*quantize_tokens(x, d.offs))
    yield "weights", lambda: flat(quantize_weights(w))
    yield "rms norm", lambda: flat(quantize_rms_norm(x, weight))
    yield "swiglu", lambda: flat(quantize_swiglu(pre, interleaved=True))


BY_BACKEND = {
    f"{family}:{b.name}": (make, b.name)
    for family, make, backends in (
        ("grouped", _grouped, GROUPED),
        ("gathered", _gathered, GATHERED),
        ("weight-only", _weight_only, WEIGHT_ONLY),
        ("scaled", _scaled, SCALED),
        ("attention", _attention, ATTENTION),
    )
    for b in backends
}
WITHOUT_BACKEND = {"moe": _moe, "rows": _rows, "quantised": _quantised}
NAMES = (*BY_BACKEND, *WITHOUT_BACKEND)


def failures(
    name: str, device: str, dtype: torch.dtype, tokens: tuple[int, ...] = (1, 3, 50, 600)
) -> tuple[list[str], int]:
    """(what depends on uninitialised memory, how many operations ran) of one backend or family; MoE's for so many
    `tokens`."""
    data, wrong, ran = Data(device, dtype, tokens), [], 0
    if name in BY_BACKEND:
        make, backend = BY_BACKEND[name]
        operations = make(data, backend)
    else:
        operations = WITHOUT_BACKEND[name](data)
    for what, operation in operations:
        try:
            found = difference(operation, device)
        except ValueError as e:
            if "cannot take this problem" in str(e):
                continue
            raise
        ran += 1
        if found is not None:
            wrong.append(f"{name} {what}: {found}")
    return wrong, ran
