"""What the lab's softmax, layer norm and RMS norm share: workloads of rows, the float64 truth in parts, peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from expertile.device import Device
from expertile.lab.operators._supports import Supports, anywhere, installed, on_gpu, on_hopper
from expertile.lab.race.operator import ROUNDOFF, Bind, Rival, Workload

BACKWARD = "_backward"
EPS = 1e-5
_PART = 1 << 24  # elements of the truth worked out at a time


def pair(preset: str, op: str, rows: int, cols: int, dtype: str, prefix: str = "", note: str = "") -> list[Workload]:
    """The forward and the backward workload of one shape; norms have a weight, and layer norm a bias."""
    dims: tuple[tuple[str, int | bool], ...] = (("rows", rows), ("cols", cols))
    if op != "softmax":
        dims += (("weight", True), ("bias", op == "layer_norm"))
    name = f"{prefix}{rows}x{cols}-{dtype}"
    return [
        Workload(name, preset, op, dims, dtype, note),
        Workload(f"{name}-backward", preset, op + BACKWARD, dims, dtype, note),
    ]


def forward_first(pairs: Iterable[list[Workload]]) -> tuple[Workload, ...]:
    """All forward workloads, then all backward ones."""
    listed = list(pairs)
    return tuple(p[0] for p in listed) + tuple(p[1] for p in listed)


def random(w: Workload, device: torch.device, seed: int) -> Callable[..., Tensor]:
    """Makes normal tensors of a shape in the workload's dtype, from one generator."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, device=device, generator=generator).to(w.torch_dtype)


def in_parts(w: Workload) -> Iterable[slice]:
    """Slices of rows that are small enough to work out in float64."""
    step = max(1, _PART // w["cols"])
    return (slice(start, start + step) for start in range(0, w["rows"], step))


def tolerance(w: Workload) -> tuple[float, float]:
    """float32 sums of up to 10^5 terms in any order, and one rounding to the dtype; peers keep statistics in it."""
    return max(2e-5, 2 * ROUNDOFF[w.dtype]), max(1e-4, 4 * ROUNDOFF[w.dtype])


def liger(most_cols: int = 65536) -> Supports:
    """Liger keeps a row in one program of at most `most_cols` columns (liger_kernel.ops.utils.calculate_settings)."""

    def supports(w: Workload, device: Device) -> str | None:
        if w["cols"] > most_cols:
            return f"takes at most {most_cols} columns, got {w['cols']}"
        return on_gpu(w, device)

    return installed("liger_kernel", supports, "liger-kernel")


def quack(whole_vectors: bool = False) -> Supports:
    """quack needs sm_90 or later, and for `whole_vectors` rows of whole 16-byte vectors."""

    def supports(w: Workload, device: Device) -> str | None:
        reason = on_hopper(w, device)
        if reason is None and whole_vectors and w["cols"] * w.torch_dtype.itemsize % 16:
            return f"rows must be multiples of 16 bytes, got {w['cols']} {w.dtype} columns"
        return reason

    return installed("quack", supports, "quack-kernels")


def one_result(w: Workload) -> float:
    """Bytes of a result [rows, cols]."""
    return float(w["rows"] * w["cols"] * w.torch_dtype.itemsize)


def rivals(
    ours: Bind,
    torchs: Bind,
    compiled: Bind,
    ligers: Bind,
    quacks: Bind,
    *,
    peak_nbytes: Callable[[Workload], float] | None = None,
    whole_vectors: bool = False,
) -> tuple[Rival, ...]:
    """The rivals on rows: ours, whose peak memory is `peak_nbytes`; torch, compiled torch, Liger and quack, which for
    `whole_vectors` needs those."""
    return (
        Rival("expertile", False, anywhere, ours, peak_nbytes=peak_nbytes),
        Rival("torch", True, anywhere, torchs),
        Rival("torch.compile", True, anywhere, compiled),
        Rival("liger", True, liger(), ligers),
        Rival("quack", True, quack(whole_vectors), quacks),
    )
