"""softmax in the lab: the last dimension of a matrix, forward (x -> y) and backward (dy, y -> dx)."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from expertile.lab.operators import _rows
from expertile.lab.operators._compiled import compiled_call
from expertile.lab.race.operator import Call, Operator, Workload
from expertile.ops.rows.softmax import softmax, softmax_backward
from expertile.roofline import Work

_V100 = (1024, 2048, 4096, 8192)
_NOTE = "size of report 004"
_ROWS = (
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


def _inputs(w: Workload, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    return (_rows.random(w, device, seed)(w["rows"], w["cols"]),)


def _backward_inputs(w: Workload, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    make = _rows.random(w, device, seed)
    dy = make(w["rows"], w["cols"])
    return dy, torch.softmax(make(w["rows"], w["cols"]), -1)


def _reference(w: Workload, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x,) = inputs
    out = torch.empty(x.shape, device=x.device)
    for part in _rows.in_parts(w):
        out[part] = torch.softmax(x[part].double(), -1)
    return (out,)


def _backward_reference(w: Workload, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = torch.empty(inputs[1].shape, device=inputs[1].device)
    for part in _rows.in_parts(w):
        dy, y = (x[part].double() for x in inputs)
        out[part] = y * (dy - (dy * y).sum(-1, keepdim=True))
    return (out,)


def _work(w: Workload) -> Work:
    """A comparison, a subtraction, an exponential, an addition and a product for each element."""
    n = w["rows"] * w["cols"]
    return Work(5.0 * n, 2.0 * n * w.torch_dtype.itemsize)


def _backward_work(w: Workload) -> Work:
    """Two products, an addition and a subtraction for each element."""
    n = w["rows"] * w["cols"]
    return Work(4.0 * n, 3.0 * n * w.torch_dtype.itemsize)


def _plain(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _plain_backward(dy: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


def _ours(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    (x,) = inputs
    return lambda: (softmax(x),)


def _ours_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    dy, y = inputs
    return lambda: (softmax_backward(dy, y),)


def _torch(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    (x,) = inputs
    return lambda: (_plain(x),)


def _torch_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    dy, y = inputs
    return lambda: (_plain_backward(dy, y),)


def _compiled(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    return compiled_call(w, _plain if w.op == "softmax" else _plain_backward, *inputs)


def _liger(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    from liger_kernel.ops.softmax import _softmax_forward

    (x,) = inputs
    return lambda: (_softmax_forward(x)[0],)


def _liger_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    from liger_kernel.ops.softmax import _softmax_backward
    from liger_kernel.ops.utils import calculate_settings

    dy, y = inputs
    block, warps = calculate_settings(w["cols"])
    return lambda: (_softmax_backward(dy, y, block, warps, False),)


def _quack(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    from quack.softmax import softmax_fwd

    (x,) = inputs
    return lambda: (softmax_fwd(x),)


def _quack_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    from quack.softmax import softmax_bwd

    dy, y = inputs
    return lambda: (softmax_bwd(dy, y),)


def softmax_v100() -> tuple[Workload, ...]:
    """Report 004's sizes, float32."""
    return _rows.forward_first(_rows.pair("softmax-v100", "softmax", n, n, "fp32", note=_NOTE) for n in _V100)


def rows() -> tuple[Workload, ...]:
    """Short, long and odd rows."""
    return _rows.forward_first(_rows.pair("rows", "softmax", r, c, d, "softmax-") for r, c, d in _ROWS)


OPERATORS = (
    Operator(
        "softmax",
        _inputs,
        _reference,
        _work,
        _rows.rivals(_ours, _torch, _compiled, _liger, _quack, peak_nbytes=_rows.one_result, whole_vectors=True),
        _rows.tolerance,
    ),
    Operator(
        "softmax_backward",
        _backward_inputs,
        _backward_reference,
        _backward_work,
        _rows.rivals(
            _ours_backward,
            _torch_backward,
            _compiled,
            _liger_backward,
            _quack_backward,
            peak_nbytes=_rows.one_result,
            whole_vectors=True,
        ),
        _rows.tolerance,
    ),
)
PRESETS = MappingProxyType({"softmax-v100": softmax_v100, "rows": rows})
