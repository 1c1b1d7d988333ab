"""Layer norm over the last dimension, forward and backward, with the residual addition before it if wanted.

    h = x + residual            (rounded to the residual's dtype; h = x without one)
    mean = sum_c h / C,  var = sum_c (h - mean)^2 / C,  rstd = 1 / sqrt(var + eps)
    y = (h - mean) * rstd * weight + bias

With n = (h - mean) * rstd and g = dy * weight (Ba, Kiros, Hinton, "Layer Normalization", 2016, differentiated):
    dh = rstd * (g - mean_c(g) - n * mean_c(g * n)) + dsum,  dweight = sum_r dy * n,  dbias = sum_r dy

float32 inside; the variance about the mean, never E[h^2] - E[h]^2. Bytes, with E = R * C * itemsize: forward 2 E (4 E
with a residual), backward 3 E, plus 8 R of statistics and C of parameters; memory limits both. Sums over rows are added
up by few programs that stride over the rows, then by a second kernel in a fixed order: the same bits in every run.
"""

import torch

from expertile.ops.rows.config import RowConfig
from expertile.ops.rows.norm_autograd import normalize, row_norm_backward


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    return_stats: bool = False,
    config: RowConfig | None = None,
    backward_config: RowConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Normalise the last dimension to mean 0 and variance 1; values and gradients as
    `torch.nn.functional.layer_norm(x, (C,), weight, bias, eps)`.

    Args:
        x: [..., C], float32, bfloat16 or float16, or float64 (in plain torch); any strides (rows that are
            not contiguous are copied first).
        weight, bias: [C] each or None; float32, bfloat16, float16 or float64, which need not be x's dtype.
        eps: added to the variance.
        residual: x's shape, x's dtype or float32; what is normalised is x + residual.
        return_stats: also return the statistics.
        config, backward_config: how rows are laid onto programs; chosen from the shape by default. Not under
            torch.compile.

    Returns:
        y, of x's shape and dtype; or a tuple (y, sum, mean, rstd) of y and what was asked for: with a residual the
        sum x + residual in the residual's dtype, differentiable; with `return_stats` mean and rstd [...] float32,
        which carry no gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    return normalize(x, weight, bias, residual, eps, True, return_stats, config, backward_config)


def layer_norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    dsum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dh, dweight, dbias) from what `layer_norm` saw and returned: h [..., C] the normalised input (the sum, with a
    residual), mean and rstd [...] float32, dsum the gradient of the sum. For those who keep their own graph; autograd
    calls it otherwise. Not checked."""
    return row_norm_backward(dy, h, weight, bias, mean, rstd, dsum, (weight is not None, bias is not None))
