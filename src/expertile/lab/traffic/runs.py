"""What each way really runs, so that its traffic can be counted by a profiler. Ours and torch's ways are the lab's
rivals on the inputs of its operators; the unfused ones are the steps of the formulas, one torch operator to a step. As
a process, which Nsight Compute watches, it runs one way of one operator, once warm and once between profiler marks:

python -m expertile.lab.traffic.runs '{"op": "softmax", "dims": {"rows": 8192, "cols": 8192}, "dtype": "fp32"}' torch
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.operators import operators
from expertile.lab.race.operands import make_operands
from expertile.lab.race.operator import Inputs, Workload
from expertile.lab.race.workloads import ragged_m
from expertile.lab.traffic.attention import MATH
from expertile.lab.traffic.model import OURS, TORCH, UNFUSED
from expertile.lab.traffic.model import call as call_of
from expertile.ops.grouped_mm.api import grouped_mm

Call = Callable[[], Any]
Run = Callable[[Workload, Inputs], Call]
GROUPED = "grouped_mm"
_EPS = 1e-5


def prepare(w: Workload, way: str, device: torch.device | str, seed: int = 0) -> Call:
    """Inputs on `device`, and a function that computes `w` once, the given way; a backward pass has its forward pass
    behind it. ValueError for a way that does not exist or is not run here."""
    ways = runnable(w.op)
    if way not in ways:
        raise ValueError(f"way: expected one of {', '.join(ways) or 'none'} for {w.op}, got {way!r}")
    if w.op == GROUPED:
        return _grouped(w, way, torch.device(device), seed)
    return _WAYS[w.op][way](w, operators()[w.op].make_inputs(w, torch.device(device), seed))


def runnable(op: str) -> tuple[str, ...]:
    """The ways of an operator that `prepare` knows."""
    return (UNFUSED, TORCH, OURS) if op == GROUPED else tuple(_WAYS.get(op, ()))


def _rival(name: str) -> Run:
    """As the lab's rival of that name computes it."""

    def bind(w: Workload, inputs: Inputs) -> Call:
        with torch.enable_grad():
            return next(rival for rival in operators()[w.op].rivals if rival.name == name).bind(w, inputs)

    return bind


def _steps(compute: Callable[..., Any]) -> Run:
    """`compute` on all inputs."""
    return lambda w, inputs: lambda: compute(*inputs)


def unfused_softmax(x: Tensor) -> Tensor:
    m = x.amax(-1, keepdim=True)
    e = torch.exp(x - m)
    return e / e.sum(-1, keepdim=True)


def unfused_softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    return (dy - (dy * y).sum(-1, keepdim=True)) * y


def unfused_norm(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Layer norm with a bias, RMS norm without one."""
    h = x if b is None else x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((h * h).mean(-1, keepdim=True) + _EPS)
    y = h * rstd * w
    return y if b is None else y + b


def _norm_backward(w: Workload, inputs: Inputs) -> Call:
    """Gradients of x, weight and, for layer norm, which has a shift of -mean * rstd, bias."""
    dy, x, weight, *_, stats = inputs
    rstd = stats[:, None]
    shift = (-inputs[4][:, None] * rstd).to(x.dtype) if w.op.startswith("layer_norm") else None
    rstd = rstd.to(x.dtype)

    def call() -> tuple[Tensor, ...]:
        n = x * rstd if shift is None else torch.addcmul(shift, x, rstd)
        g = dy * weight
        gn = n * (g * n).mean(-1, keepdim=True)
        if shift is not None:
            g = g - g.mean(-1, keepdim=True)
        dx, dw = (g - gn) * rstd, (dy * n).sum(0)
        return (dx, dw) if shift is None else (dx, dw, dy.sum(0))

    return call


def _mask(w: Workload, like: Tensor) -> Tensor | None:
    if not w["causal"]:
        return None
    shape = (w["q_len"], w["k_len"])
    return torch.ones(shape, dtype=torch.bool, device=like.device).triu(w["k_len"] - w["q_len"] + 1)


def _attention(w: Workload, inputs: Inputs) -> Call:
    q, keys, values = inputs
    mask, group = _mask(w, q), w["heads"] // w["kv_heads"]

    def call() -> Tensor:
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (keys, values))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return torch.softmax(scores, -1) @ v

    return call


def _math(w: Workload, inputs: Inputs) -> Call:
    q, k, v = inputs
    gqa = w["heads"] != w["kv_heads"]
    return lambda: torch.ops.aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, w["causal"], enable_gqa=gqa)[0]


def _flash_backward(w: Workload, inputs: Inputs) -> Call:
    """As autograd calls it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dout = inputs[0]
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs[1:]]
    # The lower right corner, where ours aligns its mask, is that of equal lengths.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=w["causal"], enable_gqa=w["heads"] != w["kv_heads"])
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _attention_backward(w: Workload, inputs: Inputs) -> Call:
    if w["heads"] != w["kv_heads"]:
        raise ValueError("kv_heads: expected as many as heads for the unfused backward pass")
    dout, q, k, v = inputs
    mask = _mask(w, q)
    scores = (q @ k.transpose(-1, -2)).float() * w["head_dim"] ** -0.5
    p = torch.softmax(scores if mask is None else scores.masked_fill(mask, float("-inf")), -1).to(q.dtype)

    def call() -> tuple[Tensor, ...]:
        dv = p.transpose(-1, -2) @ dout
        dp = dout @ v.transpose(-1, -2)
        ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
        if mask is not None:
            ds = ds.masked_fill(mask, 0.0)
        ds = ds * q.shape[-1] ** -0.5
        return ds @ k, ds.transpose(-1, -2) @ q, dv

    return call


def _grouped(w: Workload, way: str, device: torch.device, seed: int) -> Call:
    made = make_operands(ragged_m(w.name, "", w["group_sizes"], w["k"], w["n"], w.dtype), device, seed)
    a, b, offs = made.a, made.b, made.offs
    if way == TORCH:
        return lambda: F.grouped_mm(a, b, offs=offs)
    return lambda: grouped_mm(a, b, offs=offs, backend="loop" if way == UNFUSED else "auto")


_TORCH_AND_OURS: Mapping[str, Run] = {TORCH: _rival("torch"), OURS: _rival("expertile")}
# By slices, as one writes the stencil in torch, is its unfused way; torch has no other.
_STENCIL: Mapping[str, Run] = {UNFUSED: _rival("torch"), OURS: _rival("expertile")}
_WAYS: Mapping[str, Mapping[str, Run]] = {
    "softmax": {UNFUSED: _steps(unfused_softmax), **_TORCH_AND_OURS},
    "softmax_backward": {UNFUSED: _steps(unfused_softmax_backward), **_TORCH_AND_OURS},
    "layer_norm": {UNFUSED: _steps(unfused_norm), **_TORCH_AND_OURS},
    "layer_norm_backward": {UNFUSED: _norm_backward, **_TORCH_AND_OURS},
    "rms_norm": {UNFUSED: _steps(unfused_norm), **_TORCH_AND_OURS},
    "rms_norm_backward": {UNFUSED: _norm_backward, **_TORCH_AND_OURS},
    "attention": {UNFUSED: _attention, MATH: _math, **_TORCH_AND_OURS, TORCH: _rival("sdpa_fa2")},
    "attention_backward": {UNFUSED: _attention_backward, **_TORCH_AND_OURS, TORCH: _flash_backward},
    "laplacian": _STENCIL,
    "laplacian_backward": _STENCIL,
    "add_scalar": _TORCH_AND_OURS,
}


def encode(w: Workload) -> str:
    """A call as the child's first argument."""
    return json.dumps({"op": w.op, "dims": w.shape(), "dtype": w.dtype})


def decode(text: str) -> Workload:
    """The call of the child's first argument."""
    data = json.loads(text)
    dims = tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in data["dims"].items())
    return call_of(data["op"], dims, data["dtype"])


def main(arguments: list[str]) -> None:
    """Run `arguments` (subject, way) on the current GPU."""
    call = prepare(decode(arguments[0]), arguments[1], "cuda")
    call()  # compiles, tunes and fills the allocator
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
