"""RMS norm in the lab: forward (x, weight -> y) and backward (dy, x, weight, rstd -> dx, dweight), the weight of x's
dtype."""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.operators import _rows
from expertile.lab.operators._compiled import compiled_call
from expertile.lab.operators._rows import EPS
from expertile.lab.race.operator import Call, Operator, Workload
from expertile.ops.rows.rms_norm import rms_norm, rms_norm_backward
from expertile.roofline import Work

# Hidden sizes of well-known models: Qwen3 30B (2048), Llama 3 8B (4096), Qwen2.5 14B (5120), DeepSeek-V3 (7168),
# Llama 3 70B (8192); and heads of 128 normalised one by one.
_ROWS = (
    (16384, 2048, "bf16"),
    (16384, 4096, "bf16"),
    (16384, 4096, "fp32"),
    (16384, 5120, "bf16"),
    (16384, 7168, "bf16"),
    (8192, 8192, "bf16"),
    (4096, 32768, "bf16"),
    (262144, 128, "bf16"),
    (256, 7168, "bf16"),
    (16384, 4096, "fp16"),
)


def _work(w: Workload) -> Work:
    """A square added and two products for each element."""
    n, size = w["rows"] * w["cols"], w.torch_dtype.itemsize
    return Work(4.0 * n, (2.0 * n + w["cols"]) * size)


def _backward_work(w: Workload) -> Work:
    """n, g and the sum take 4 operations for each element, dx 3, the sum over rows 2; rstd is float32."""
    n, size = w["rows"] * w["cols"], w.torch_dtype.itemsize
    return Work(9.0 * n, (3.0 * n + 2 * w["cols"]) * size + 4.0 * w["rows"])


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _by_hand(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients as one writes them in torch."""
    d, n = dy.float(), x.float() * rstd[:, None]
    g = d * weight.float()
    dx = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
    return dx.to(x.dtype), (d * n).sum(0).to(weight.dtype)


def _ours(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    x, weight = inputs

    def call() -> tuple[Tensor, ...]:
        y = rms_norm(x, weight, eps=EPS)
        assert isinstance(y, Tensor)
        return (y,)

    return call


def _ours_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    dy, x, weight, rstd = inputs

    def call() -> tuple[Tensor, ...]:
        dx, dweight, _ = rms_norm_backward(dy, x, weight, None, rstd)
        assert dweight is not None
        return dx, dweight

    return call


def _torch(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    return lambda: (_plain(*inputs),)


def _torch_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    """torch's fused gradient, which only CUDA has; by hand elsewhere."""
    dy, x, weight, rstd = inputs
    if x.device.type != "cuda":
        return lambda: _by_hand(dy, x, weight, rstd)
    column = rstd[:, None]
    fused = torch.ops.aten._fused_rms_norm_backward
    return lambda: fused(dy, x, [w["cols"]], column, weight, [True, True])


def _compiled(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    return compiled_call(w, _plain, *inputs)


def _compiled_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    return compiled_call(w, _by_hand, *inputs)


def _liger(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    x, weight = inputs
    return lambda: (rms_norm_forward(x, weight, EPS, 0.0, "llama", None)[0],)


def _liger_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    from liger_kernel.ops.rms_norm import _CASTING_MODE_LLAMA
    from liger_kernel.ops.rms_norm import rms_norm_backward as backward
    from liger_kernel.ops.utils import calculate_settings

    dy, x, weight, rstd = inputs
    block, warps = calculate_settings(w["cols"])
    mode = _CASTING_MODE_LLAMA.value
    return lambda: backward(dy, x, weight, rstd, 0.0, mode, block, warps, False, None)[:2]


def _quack(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    from quack.rmsnorm import rmsnorm_fwd

    x, weight = inputs
    return lambda: (rmsnorm_fwd(x, weight, eps=EPS)[0],)


def _quack_backward(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    from quack.rmsnorm import rmsnorm_bwd

    dy, x, weight, rstd = inputs
    return lambda: rmsnorm_bwd(x, weight, dy, rstd)[:2]


def rows() -> tuple[Workload, ...]:
    """Hidden sizes of well-known models, and long rows."""
    return _rows.forward_first(_rows.pair("rows", "rms_norm", r, c, d, "rmsnorm-") for r, c, d in _ROWS)


OPERATORS = (
    Operator(
        "rms_norm",
        _rows.norm_inputs,
        _rows.norm_reference,
        _work,
        _rows.rivals(_ours, _torch, _compiled, _liger, _quack, peak_nbytes=_rows.one_result),
        _rows.tolerance,
    ),
    Operator(
        "rms_norm_backward",
        _rows.norm_backward_inputs,
        _rows.norm_backward_reference,
        _backward_work,
        _rows.rivals(_ours_backward, _torch_backward, _compiled_backward, _liger_backward, _quack_backward),
        _rows.tolerance,
    ),
)
PRESETS = MappingProxyType({"rows": rows})
