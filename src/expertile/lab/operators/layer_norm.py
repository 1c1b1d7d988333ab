"""layer norm in the lab: forward (x, weight, bias -> y) and backward (dy, x, weight, bias, mean, rstd -> dx, dweight,
dbias), weight and bias of x's dtype. quack wants its parameters in float32 and gets such copies, made beforehand."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.lab.operators import _rows
from expertile.lab.operators._binds import imported, one, several
from expertile.lab.operators._rows import EPS
from expertile.lab.race.operator import Call, Inputs, Workload
from expertile.ops.rows.layer_norm import layer_norm, layer_norm_backward

_V100 = tuple((16384, cols, "fp32") for cols in (256, 512, 768, 1024, 2048, 4096))  # report 004's sizes
_ROWS = (  # the same in bfloat16; long and odd rows
    *((rows, cols, "bf16") for rows, cols, _ in _V100),
    (8192, 8192, "fp32"),
    (8192, 8192, "bf16"),
    (4096, 32768, "fp32"),
    (4096, 32768, "bf16"),
    (16384, 5120, "bf16"),
    (16384, 1000, "fp32"),
    (16384, 4096, "fp16"),
)


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def _plain_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Inputs:
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, [x.shape[-1]], mean[:, None], rstd[:, None], weight, bias, [True, True, True]
    )


def _torch_backward(w: Workload, inputs: Inputs) -> Call:
    dy, x, weight, bias, mean, rstd = inputs
    if x.device.type == "cpu":  # where torch keeps the statistics in x's dtype
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    return lambda: _plain_backward(dy, x, weight, bias, mean, rstd)


def _liger_backward(w: Workload, inputs: Inputs) -> Call:
    from liger_kernel.ops.layer_norm import layer_norm_backward as backward

    # Its forward pass stores the statistics in x's dtype.
    dy, x, weight, bias, *stats = inputs
    mean, rstd = (s.to(x.dtype) for s in stats)
    return lambda: backward(dy, x, weight, bias, mean, rstd)


def _quack(w: Workload, inputs: Inputs) -> Call:
    from quack.rmsnorm import layernorm_fwd

    x, weight, bias = inputs[0], inputs[1].float(), inputs[2].float()
    return lambda: (layernorm_fwd(x, weight, bias, eps=EPS),)


def _quack_backward(w: Workload, inputs: Inputs) -> Call:
    from quack.rmsnorm import layernorm_bwd

    dy, x, weight, _, mean, rstd = inputs
    weight = weight.float()
    return lambda: layernorm_bwd(x, weight, dy, rstd, mean)


OPERATORS = _rows.operators(
    "layer_norm",
    _rows.Pass(
        _rows.norm_inputs,
        _rows.norm_reference,
        # Additions for the mean, a difference and its square added, two products and an addition for each element.
        _rows.work(8.0, 2, vectors=2),
        one(partial(layer_norm, eps=EPS)),
        one(_plain),
        _plain,
        imported("liger_kernel.ops.layer_norm", "layer_norm_forward", lambda f, *inputs: f(*inputs, EPS)[0]),
        _quack,
    ),
    _rows.Pass(
        _rows.norm_backward_inputs,
        _rows.norm_backward_reference,
        # n, g and both sums take 7 operations for each element, dx 5, the sums over rows 3; statistics are float32.
        _rows.work(15.0, 3, vectors=4, stats=8),
        several(layer_norm_backward),
        _torch_backward,
        _plain_backward,
        _liger_backward,
        _quack_backward,
        peak_nbytes=None,
    ),
)
PRESETS = {
    "layernorm-v100": _rows.workloads("layernorm-v100", "layer_norm", _V100, note="size of report 004: 32 x 512 rows"),
    "rows": _rows.workloads("rows", "layer_norm", _ROWS, "layernorm-"),
}
