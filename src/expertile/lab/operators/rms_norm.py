"""RMS norm in the lab: forward (x, weight -> y) and backward (dy, x, weight, rstd -> dx, dweight), the weight of x's
dtype."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.operators import _rows
from expertile.lab.operators._binds import imported, one, several
from expertile.lab.operators._rows import EPS
from expertile.lab.race.operator import Call, Inputs, Workload
from expertile.ops.rows.rms_norm import rms_norm, rms_norm_backward

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


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _by_hand(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients as one writes them in torch."""
    d, n = dy.float(), x.float() * rstd[:, None]
    g = d * weight.float()
    dx = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
    return dx.to(x.dtype), (d * n).sum(0).to(weight.dtype)


def _torch_backward(w: Workload, inputs: Inputs) -> Call:
    """torch's fused gradient, which only CUDA has; by hand elsewhere."""
    dy, x, weight, rstd = inputs
    if x.device.type != "cuda":
        return lambda: _by_hand(dy, x, weight, rstd)
    column = rstd[:, None]
    fused = torch.ops.aten._fused_rms_norm_backward
    return lambda: fused(dy, x, [w["cols"]], column, weight, [True, True])


def _liger_backward(w: Workload, inputs: Inputs) -> Call:
    from liger_kernel.ops.rms_norm import _CASTING_MODE_LLAMA
    from liger_kernel.ops.rms_norm import rms_norm_backward as backward
    from liger_kernel.ops.utils import calculate_settings

    dy, x, weight, rstd = inputs
    block, warps = calculate_settings(w["cols"])
    mode = _CASTING_MODE_LLAMA.value
    return lambda: backward(dy, x, weight, rstd, 0.0, mode, block, warps, False, None)[:2]


OPERATORS = _rows.operators(
    "rms_norm",
    _rows.Pass(
        _rows.norm_inputs,
        _rows.norm_reference,
        _rows.work(4.0, 2, vectors=1),  # a square added and two products for each element
        one(partial(rms_norm, eps=EPS)),
        one(_plain),
        _plain,
        imported(
            "liger_kernel.ops.rms_norm",
            "rms_norm_forward",
            lambda f, x, weight: f(x, weight, EPS, 0.0, "llama", None)[0],
        ),
        imported("quack.rmsnorm", "rmsnorm_fwd", lambda f, x, weight: f(x, weight, eps=EPS)[0]),
    ),
    _rows.Pass(
        _rows.norm_backward_inputs,
        _rows.norm_backward_reference,
        # n, g and the sum take 4 operations for each element, dx 3, the sum over rows 2; rstd is float32.
        _rows.work(9.0, 3, vectors=2, stats=4),
        several(lambda dy, x, weight, rstd: rms_norm_backward(dy, x, weight, None, rstd)[:2]),
        _torch_backward,
        _by_hand,
        _liger_backward,
        imported("quack.rmsnorm", "rmsnorm_bwd", lambda f, dy, x, weight, rstd: f(x, weight, dy, rstd)[:2], several),
        peak_nbytes=None,
    ),
)
PRESETS = {"rows": _rows.workloads("rows", "rms_norm", _ROWS, "rmsnorm-")}
