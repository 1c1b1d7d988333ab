"""A tiny operator with right, wrong and broken rivals: outputs 2 x and the sums of its rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expertile.lab.operators import Operator, Rival, Workload
from expertile.roofline import Work


def workload(rows: int = 24, cols: int = 40, dtype: str = "fp32", **fields: Any) -> Workload:
    values = {"name": f"{rows}x{cols}-{dtype}", "preset": "toy", "op": "double", "dtype": dtype, **fields}
    return Workload(dims=(("rows", rows), ("cols", cols)), **values)


def make_inputs(w: Workload, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(w["rows"], w["cols"], device=device, generator=generator).to(w.torch_dtype),)


def reference(w: Workload, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = inputs[0].double()
    return 2 * x, 2 * x.sum(1)


def work(w: Workload) -> Work:
    size = w.torch_dtype.itemsize
    return Work(2.0 * w["rows"] * w["cols"], 2.0 * w["rows"] * w["cols"] * size + w["rows"] * 4)


def rival(name: str, compute: Callable[[Tensor], Any], **more: Any) -> Rival:
    """A rival that computes `compute(x)` anew on every call."""
    bind = more.pop("bind", lambda w, inputs: lambda: compute(inputs[0]))
    return Rival(name, bind, **{"peer": False, **more})


def right(x: Tensor) -> tuple[Tensor, ...]:
    return 2 * x, 2 * x.float().sum(1)


def raises(x: Tensor) -> tuple[Tensor, ...]:
    raise RuntimeError("tile out of range")


def operator(*rivals: Rival) -> Operator:
    return Operator("double", make_inputs, reference, work, rivals, lambda w: (2e-2, 2e-2))
