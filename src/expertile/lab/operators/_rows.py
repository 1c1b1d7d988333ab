"""What the lab's softmax, layer norm and RMS norm share: workloads of rows, the float64 truth in parts, peers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.lab.operators._binds import compiled
from expertile.lab.operators._supports import installed, on_gpu, on_hopper
from expertile.lab.race.operator import (
    ROUNDOFF,
    Bind,
    Inputs,
    Operator,
    Reference,
    Rival,
    Supports,
    Workload,
    with_backward,
)
from expertile.roofline import Work

EPS = 1e-5
_PART = 1 << 24  # elements of the truth worked out at a time


Shape = tuple[int, int, str]  # rows, columns, dtype


def workloads(
    preset: str, op: str, shapes: Iterable[Shape], prefix: str = "", note: str = ""
) -> Callable[[], tuple[Workload, ...]]:
    """Builds both passes of `shapes`; norms have a weight, and layer norm a bias."""

    def of(rows: int, cols: int, dtype: str) -> Workload:
        norm = () if op == "softmax" else (("weight", True), ("bias", op == "layer_norm"))
        dims = (("rows", rows), ("cols", cols), *norm)
        return Workload(f"{prefix}{rows}x{cols}-{dtype}", preset, op, dims, dtype, note)

    return lambda: with_backward(of(*shape) for shape in shapes)


def random(w: Workload, device: torch.device, seed: int) -> Callable[..., Tensor]:
    """Makes normal tensors of a shape in the workload's dtype, from one generator."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, device=device, generator=generator).to(w.torch_dtype)


def in_parts(w: Workload) -> Iterable[slice]:
    """Slices of rows that are small enough to work out in float64."""
    step = max(1, _PART // w["cols"])
    return (slice(start, start + step) for start in range(0, w["rows"], step))


def is_centered(w: Workload) -> bool:
    """Whether a norm subtracts the mean (layer norm), and adds a bias."""
    return w.op.startswith("layer_norm")


def norm_inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    """x [rows, cols], weight [cols], and for layer norm bias [cols]."""
    make = random(w, device, seed)
    return make(w["rows"], w["cols"]), *(make(w["cols"]) for _ in range(1 + is_centered(w)))


def norm_backward_inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    """dy, x, weight and rstd [rows] float32; for layer norm bias and mean as well: dy, x, weight, bias, mean, rstd."""
    make = random(w, device, seed)
    dy, x = make(w["rows"], w["cols"]), make(w["rows"], w["cols"])
    mean, rstd = torch.empty(2, w["rows"], device=device)
    for part in in_parts(w):
        mean[part] = x[part].double().mean(-1)
        rstd[part] = _standardized(w, x[part])[1][:, 0]
    weight = make(w["cols"])
    return (dy, x, weight, make(w["cols"]), mean, rstd) if is_centered(w) else (dy, x, weight, rstd)


def _standardized(w: Workload, x: Tensor) -> tuple[Tensor, Tensor]:
    """(x - mean) * rstd, for RMS norm x * rstd, and rstd [rows, 1], in float64."""
    h = x.double()
    if is_centered(w):
        h = h - h.mean(-1, keepdim=True)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
    return h * rstd, rstd


def norm_reference(w: Workload, inputs: Inputs) -> Inputs:
    x, weight, *bias = inputs
    out = torch.empty(x.shape, device=x.device)
    for part in in_parts(w):
        out[part] = _standardized(w, x[part])[0] * weight.double() + (bias[0].double() if bias else 0.0)
    return (out,)


def norm_backward_reference(w: Workload, inputs: Inputs) -> Inputs:
    """dx, dweight, and for layer norm dbias."""
    dy, x, weight = inputs[:3]
    dx = torch.empty(x.shape, device=x.device)
    dweight, dbias = torch.zeros(2, w["cols"], dtype=torch.float64, device=x.device)
    for part in in_parts(w):
        n, rstd = _standardized(w, x[part])
        d = dy[part].double()
        g = d * weight.double()
        dh = g - n * (g * n).mean(-1, keepdim=True)
        dx[part] = rstd * (dh - g.mean(-1, keepdim=True) if is_centered(w) else dh)
        dweight += (d * n).sum(0)
        dbias += d.sum(0)
    return (dx, dweight, dbias) if is_centered(w) else (dx, dweight)


def tolerance(w: Workload) -> tuple[float, float]:
    """float32 sums of up to 10^5 terms in any order, and one rounding to the dtype; peers keep statistics in it."""
    return max(2e-5, 2 * ROUNDOFF[w.dtype]), max(1e-4, 4 * ROUNDOFF[w.dtype])


def _liger(w: Workload, device: Device) -> str | None:
    """Liger keeps a row in one program (liger_kernel.ops.utils.calculate_settings)."""
    return f"takes at most 65536 columns, got {w['cols']}" if w["cols"] > 65536 else on_gpu(w, device)


def quack(whole_vectors: bool = False) -> Supports:
    """quack needs sm_90 or later, and for `whole_vectors` rows of whole 16-byte vectors."""

    def supports(w: Workload, device: Device) -> str | None:
        reason = on_hopper(w, device)
        if reason is None and whole_vectors and w["cols"] * w.itemsize % 16:
            return f"rows must be multiples of 16 bytes, got {w['cols']} {w.dtype} columns"
        return reason

    return installed("quack", supports, "quack-kernels")


def one_result(w: Workload) -> float:
    """Bytes of a result [rows, cols]."""
    return float(w["rows"] * w["cols"] * w.itemsize)


def work(flops: float, tensors: int, vectors: int = 0, stats: int = 0) -> Callable[[Workload], Work]:
    """`flops` for each element; tensors [rows, cols], vectors [cols] of the dtype, and bytes of a row's statistics."""

    def of(w: Workload) -> Work:
        n, size = w["rows"] * w["cols"], w.itemsize
        return Work(flops * n, float((tensors * n + vectors * w["cols"]) * size + stats * w["rows"]))

    return of


@dataclass(frozen=True)
class Pass:
    """A pass of an operator on rows, and how each rival makes it; `compiled` is what torch.compile gets."""

    make_inputs: Callable[[Workload, torch.device, int], Inputs]
    reference: Reference
    work: Callable[[Workload], Work]
    ours: Bind
    torch: Bind
    compiled: Callable[..., Any]
    liger: Bind
    quack: Bind
    peak_nbytes: Callable[[Workload], float] | None = one_result


def operators(name: str, forward: Pass, backward: Pass, whole_vectors: bool = False) -> tuple[Operator, Operator]:
    """Both passes as operators, with ours, torch, compiled torch, Liger and quack, which for `whole_vectors` needs
    those."""

    def of(name: str, p: Pass) -> Operator:
        rivals = (
            Rival("expertile", p.ours, peer=False, peak_nbytes=p.peak_nbytes),
            Rival("torch", p.torch),
            Rival("torch.compile", compiled(p.compiled)),
            Rival("liger", p.liger, installed("liger_kernel", _liger, "liger-kernel")),
            Rival("quack", p.quack, quack(whole_vectors)),
        )
        return Operator(name, p.make_inputs, p.reference, p.work, rivals, tolerance)

    return of(name, forward), of(f"{name}_backward", backward)
