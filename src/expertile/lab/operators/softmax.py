"""softmax in the lab: the last dimension of a matrix, forward (x -> y) and backward (dy, y -> dx)."""

import torch
from torch import Tensor

from expertile.lab.operators import _rows
from expertile.lab.operators._binds import imported, one
from expertile.lab.race.operator import Call, Inputs, Workload
from expertile.ops.rows.softmax import softmax, softmax_backward

_V100 = tuple((n, n, "fp32") for n in (1024, 2048, 4096, 8192))  # report 004's sizes
_ROWS = (  # short, long and odd rows
    (8192, 8192, "fp32"),
    (8192, 8192, "bf16"),
    (32768, 4096, "fp32"),
    (32768, 4096, "bf16"),
    (4096, 4096, "bf16"),
    (1024, 1024, "bf16"),
    (4096, 32768, "fp32"),
    (4096, 32768, "bf16"),
    (8192, 131072, "bf16"),
    (1024, 131072, "fp32"),
    (8192, 1000, "fp32"),
    (4096, 50257, "bf16"),
    (262144, 128, "bf16"),
    (4096, 32768, "fp16"),
)


def _backward_inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    make = _rows.random(w, device, seed)
    dy = make(w["rows"], w["cols"])
    return dy, torch.softmax(make(w["rows"], w["cols"]), -1)


def _reference(w: Workload, inputs: Inputs) -> Inputs:
    (x,) = inputs
    out = torch.empty(x.shape, device=x.device)
    for part in _rows.in_parts(w):
        out[part] = torch.softmax(x[part].double(), -1)
    return (out,)


def _backward_reference(w: Workload, inputs: Inputs) -> Inputs:
    out = torch.empty(inputs[1].shape, device=inputs[1].device)
    for part in _rows.in_parts(w):
        dy, y = (x[part].double() for x in inputs)
        out[part] = y * (dy - (dy * y).sum(-1, keepdim=True))
    return (out,)


def _plain(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _plain_backward(dy: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


def _liger_backward(w: Workload, inputs: Inputs) -> Call:
    from liger_kernel.ops.softmax import _softmax_backward
    from liger_kernel.ops.utils import calculate_settings

    dy, y = inputs
    block, warps = calculate_settings(w["cols"])
    return lambda: (_softmax_backward(dy, y, block, warps, False),)


OPERATORS = _rows.operators(
    "softmax",
    _rows.Pass(
        lambda w, device, seed: (_rows.random(w, device, seed)(w["rows"], w["cols"]),),
        _reference,
        _rows.work(5.0, 2),  # a comparison, a subtraction, an exponential, an addition and a product for each element
        one(softmax),
        one(_plain),
        _plain,
        imported("liger_kernel.ops.softmax", "_softmax_forward", lambda f, x: f(x)[0]),
        imported("quack.softmax", "softmax_fwd", lambda f, x: f(x)),
    ),
    _rows.Pass(
        _backward_inputs,
        _backward_reference,
        _rows.work(4.0, 3),  # two products, an addition and a subtraction for each element
        one(softmax_backward),
        one(_plain_backward),
        _plain_backward,
        _liger_backward,
        imported("quack.softmax", "softmax_bwd", lambda f, dy, y: f(dy, y)),
    ),
    whole_vectors=True,
)
PRESETS = {
    "softmax-v100": _rows.workloads("softmax-v100", "softmax", _V100, note="size of report 004"),
    "rows": _rows.workloads("rows", "softmax", _ROWS, "softmax-"),
}
