"""What each way really runs: tensors and a function for a subject, so that its traffic can be counted by a profiler.

The unfused ways are the steps of the formulas, one torch operator to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.traffic.attention import MATH
from expertile.lab.traffic.model import OURS, TORCH, UNFUSED, Subject
from expertile.ops.attention import attention
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.pointwise.add_scalar import add_scalar
from expertile.ops.pointwise.laplacian import laplacian, laplacian_transpose
from expertile.ops.rows.layer_norm import layer_norm
from expertile.ops.rows.rms_norm import rms_norm
from expertile.ops.rows.softmax import softmax
from expertile.ragged import offs_from_sizes

Call = Callable[[], Any]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EPS = 1e-5


def prepare(subject: Subject, way: str, device: torch.device | str, seed: int = 0) -> Call:
    """Inputs on `device`, and a function that computes `subject` once, the given way.

    A backward pass has its forward pass behind it. ValueError for a way that does not exist or is not run here.
    """
    runs = _RUNS.get(subject.op, {})
    if way not in runs:
        raise ValueError(f"way: expected one of {', '.join(runs) or 'none'} for {subject.op}, got {way!r}")
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(_DTYPES[subject.dtype])

    return runs[way](subject, random)


def runnable(op: str) -> tuple[str, ...]:
    """The ways of an operator that `prepare` knows."""
    return tuple(_RUNS.get(op, {}))


Random = Callable[..., Tensor]
Run = Callable[[Subject, Random], Call]


def _softmax(compute: Callable[[Tensor], Tensor], s: Subject, random: Random) -> Call:
    return partial(compute, random(s["rows"], s["cols"]))


def unfused_softmax(x: Tensor) -> Tensor:
    m = x.amax(-1, keepdim=True)
    e = torch.exp(x - m)
    return e / e.sum(-1, keepdim=True)


def _autograd(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> Call:
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _softmax_backward(compute: Callable[[Tensor], Tensor], s: Subject, random: Random) -> Call:
    x, dy = random(s["rows"], s["cols"]).requires_grad_(), random(s["rows"], s["cols"])
    return _autograd(compute(x), (x,), dy)


def _unfused_softmax_backward(s: Subject, random: Random) -> Call:
    y, dy = torch.softmax(random(s["rows"], s["cols"]), -1), random(s["rows"], s["cols"])
    return partial(unfused_softmax_backward, dy, y)


def unfused_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    return (dy - (dy * y).sum(-1, keepdim=True)) * y


def _norm(compute: Callable[..., Any], centered: bool, s: Subject, random: Random) -> Call:
    x, w = random(s["rows"], s["cols"]), random(s["cols"])
    return partial(compute, x, w, random(s["cols"])) if centered else partial(compute, x, w)


def _norm_backward(compute: Callable[..., Any], centered: bool, s: Subject, random: Random) -> Call:
    x, w, b = (random(*shape).requires_grad_() for shape in ((s["rows"], s["cols"]), (s["cols"],), (s["cols"],)))
    dy = random(s["rows"], s["cols"])
    return _autograd(compute(x, w, b), (x, w, b), dy) if centered else _autograd(compute(x, w), (x, w), dy)


def _torch_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, _EPS)


def _torch_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, _EPS)


def _our_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return layer_norm(x, w, b, eps=_EPS)


def _our_rms_norm(x: Tensor, w: Tensor) -> Any:
    return rms_norm(x, w, eps=_EPS)


def unfused_norm(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Layer norm with a bias, RMS norm without one."""
    h = x if b is None else x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((h * h).mean(-1, keepdim=True) + _EPS)
    y = h * rstd * w
    return y if b is None else y + b


def _unfused_norm_backward(centered: bool, s: Subject, random: Random) -> Call:
    rows, row = (s["rows"], s["cols"]), (s["cols"],)
    x, w, _bias, dy = (random(*shape) for shape in (rows, row, row, rows))
    wide = x.float()
    mean = wide.mean(-1, keepdim=True) if centered else torch.zeros_like(wide[:, :1])
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + _EPS)
    shift = (-mean * rstd).to(x.dtype)
    return partial(unfused_norm_backward, dy, x, w, shift if centered else None, rstd.to(x.dtype))


def unfused_norm_backward(dy: Tensor, x: Tensor, w: Tensor, shift: Tensor | None, rstd: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, weight and (with a `shift` of -mean * rstd, that is for layer norm) bias."""
    n = x * rstd if shift is None else torch.addcmul(shift, x, rstd)
    g = dy * w
    gn = n * (g * n).mean(-1, keepdim=True)
    if shift is not None:
        g = g - g.mean(-1, keepdim=True)
    dx, dw = (g - gn) * rstd, (dy * n).sum(0)
    return (dx, dw) if shift is None else (dx, dw, dy.sum(0))


def _qkv(s: Subject, random: Random) -> tuple[Tensor, Tensor, Tensor]:
    b, d = s["batch"], s["head_dim"]
    keys = (b, s["kv_heads"], s["k_len"], d)
    return random(b, s["heads"], s["q_len"], d), random(*keys), random(*keys)


def _mask(s: Subject, like: Tensor) -> Tensor | None:
    if not s["causal"]:
        return None
    shape = (s["q_len"], s["k_len"])
    return torch.ones(shape, dtype=torch.bool, device=like.device).triu(s["k_len"] - s["q_len"] + 1)


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


def _attention(s: Subject, random: Random) -> Call:
    q, k, v = _qkv(s, random)
    return partial(unfused_attention, q, k, v, _mask(s, q))


def _math(s: Subject, random: Random) -> Call:
    q, k, v = _qkv(s, random)
    gqa = s["heads"] != s["kv_heads"]
    return lambda: torch.ops.aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, s["causal"], enable_gqa=gqa)[0]


def _flash(s: Subject, random: Random) -> Call:
    q, k, v = _qkv(s, random)
    return partial(_sdpa_flash, q, k, v, s["causal"])


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # The lower right corner, where ours aligns its mask, is that of equal lengths.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _ours_attention(s: Subject, random: Random) -> Call:
    q, k, v = _qkv(s, random)
    return lambda: attention(q, k, v, causal=s["causal"], backend=_own_backend(q))


def _own_backend(q: Tensor) -> str:
    """Ours, where `auto` might take SDPA's cuDNN."""
    if not q.is_cuda:
        return "auto"
    return "gluon_hopper" if torch.cuda.get_device_capability(q.device)[0] == 9 else "triton"


def _attention_backward(compute: Callable[..., Any], s: Subject, random: Random) -> Call:
    q, k, v = (x.requires_grad_() for x in _qkv(s, random))
    out = compute(q, k, v, s["causal"])
    return _autograd(out, (q, k, v), random(*out.shape))


def _unfused_attention_backward(s: Subject, random: Random) -> Call:
    if s["heads"] != s["kv_heads"]:
        raise ValueError("kv_heads: expected as many as heads for the unfused backward pass")
    q, k, v = _qkv(s, random)
    scores = (q @ k.transpose(-1, -2)).float() * s["head_dim"] ** -0.5
    mask = _mask(s, q)
    p = torch.softmax(scores if mask is None else scores.masked_fill(mask, float("-inf")), -1).to(q.dtype)
    return partial(unfused_attention_backward, q, k, v, p, random(*q.shape), mask)


def unfused_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, dout: Tensor, mask: Tensor | None
) -> tuple[Tensor, ...]:
    dv = p.transpose(-1, -2) @ dout
    dp = dout @ v.transpose(-1, -2)
    ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
    if mask is not None:
        ds = ds.masked_fill(mask, 0.0)
    ds = ds * q.shape[-1] ** -0.5
    return ds @ k, ds.transpose(-1, -2) @ q, dv


def _grid(compute: Callable[[Tensor, str], Tensor], s: Subject, random: Random) -> Call:
    return partial(compute, random(s["grids"], s["rows"], s["columns"]), s["boundary"])


def _grid_gradient(compute: Callable[[Tensor, str], Tensor], s: Subject, random: Random) -> Call:
    cut = 2 if s["boundary"] == "interior" else 0
    return partial(compute, random(s["grids"], s["rows"] - cut, s["columns"] - cut), s["boundary"])


def unfused_laplacian(u: Tensor, boundary: str) -> Tensor:
    if boundary != "interior":
        u = F.pad(u, (1, 1, 1, 1), mode="constant" if boundary == "zero" else boundary)
    around = u[:, :-2, 1:-1] + u[:, 2:, 1:-1] + u[:, 1:-1, :-2] + u[:, 1:-1, 2:]
    return around - 4.0 * u[:, 1:-1, 1:-1]


def unfused_laplacian_transpose(grad: Tensor, boundary: str) -> Tensor:
    if boundary == "interior":
        return unfused_laplacian(F.pad(grad, (1, 1, 1, 1)), "zero")
    return unfused_laplacian(grad, boundary)


def _add(compute: Callable[[Tensor, float], Tensor], s: Subject, random: Random) -> Call:
    return partial(compute, random(s["elements"]), s["value"])


def _our_attention_of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return attention(q, k, v, causal=causal, backend=_own_backend(q))


def _grouped(compute: Callable[..., Any], s: Subject, random: Random) -> Call:
    sizes = s["group_sizes"]
    a, b = random(sum(sizes), s["k"]), random(len(sizes), s["n"], s["k"]).transpose(1, 2)
    return partial(compute, a, b, offs_from_sizes(sizes, a.device), sizes)


def grouped_loop(a: Tensor, b: Tensor, offs: Tensor, sizes: Sequence[int]) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[2])
    start = 0
    for group, rows in enumerate(sizes):
        if rows:
            torch.mm(a[start : start + rows], b[group], out=out[start : start + rows])
        start += rows
    return out


def _torch_grouped(a: Tensor, b: Tensor, offs: Tensor, sizes: Sequence[int]) -> Tensor:
    return F.grouped_mm(a, b, offs=offs)


def _our_grouped(a: Tensor, b: Tensor, offs: Tensor, sizes: Sequence[int]) -> Tensor:
    return grouped_mm(a, b, offs=offs)


def _torch_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


_RUNS: Mapping[str, Mapping[str, Run]] = {
    "softmax": {
        UNFUSED: partial(_softmax, unfused_softmax),
        TORCH: partial(_softmax, _torch_softmax),
        OURS: partial(_softmax, softmax),
    },
    "softmax_backward": {
        UNFUSED: _unfused_softmax_backward,
        TORCH: partial(_softmax_backward, _torch_softmax),
        OURS: partial(_softmax_backward, softmax),
    },
    "layer_norm": {
        UNFUSED: partial(_norm, unfused_norm, True),
        TORCH: partial(_norm, _torch_layer_norm, True),
        OURS: partial(_norm, _our_layer_norm, True),
    },
    "layer_norm_backward": {
        UNFUSED: partial(_unfused_norm_backward, True),
        TORCH: partial(_norm_backward, _torch_layer_norm, True),
        OURS: partial(_norm_backward, _our_layer_norm, True),
    },
    "rms_norm": {
        UNFUSED: partial(_norm, unfused_norm, False),
        TORCH: partial(_norm, _torch_rms_norm, False),
        OURS: partial(_norm, _our_rms_norm, False),
    },
    "rms_norm_backward": {
        UNFUSED: partial(_unfused_norm_backward, False),
        TORCH: partial(_norm_backward, _torch_rms_norm, False),
        OURS: partial(_norm_backward, _our_rms_norm, False),
    },
    "attention": {UNFUSED: _attention, MATH: _math, TORCH: _flash, OURS: _ours_attention},
    "attention_backward": {
        UNFUSED: _unfused_attention_backward,
        TORCH: partial(_attention_backward, _sdpa_flash),
        OURS: partial(_attention_backward, _our_attention_of),
    },
    "laplacian": {
        UNFUSED: partial(_grid, unfused_laplacian),
        OURS: partial(_grid, lambda u, boundary: laplacian(u, boundary=boundary)),
    },
    "laplacian_backward": {
        UNFUSED: partial(_grid_gradient, unfused_laplacian_transpose),
        OURS: partial(_grid_gradient, lambda grad, boundary: laplacian_transpose(grad, boundary=boundary)),
    },
    "grouped_mm": {
        UNFUSED: partial(_grouped, grouped_loop),
        TORCH: partial(_grouped, _torch_grouped),
        OURS: partial(_grouped, _our_grouped),
    },
    "add_scalar": {TORCH: partial(_add, torch.add), OURS: partial(_add, add_scalar)},
}
