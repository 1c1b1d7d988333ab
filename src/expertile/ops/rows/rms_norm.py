"""RMS norm over the last dimension, forward and backward, with the residual addition before it if wanted.

    h = x + residual            (rounded to the residual's dtype; h = x without one)
    rstd = 1 / sqrt(sum_c h^2 / C + eps)
    y = h * rstd * weight + bias

With n = h * rstd and g = dy * weight (Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, differentiated):
    dh = rstd * (g - n * mean_c(g * n)) + dsum,  dweight = sum_r dy * n,  dbias = sum_r dy

float32 inside. The kernels and their limits are layer norm's (layer_norm.py), with one reduction less each way: forward
2 * R * C * itemsize bytes (twice that with a residual), backward 3 * R * C * itemsize; memory limits both.
"""

from torch import Tensor

from expertile.ops.rows.config import RowConfig
from expertile.ops.rows.norm_autograd import normalize, row_norm_backward


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    return_stats: bool = False,
    config: RowConfig | None = None,
    backward_config: RowConfig | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Divide the last dimension by its root mean square; values and gradients as
    `torch.nn.functional.rms_norm(x, (C,), weight, eps)`, and a bias if there is one.

    Args:
        x: [..., C], float32, bfloat16 or float16, or float64 (in plain torch); any strides (rows that are
            not contiguous are copied first).
        weight, bias: [C] each or None; float32, bfloat16, float16 or float64, which need not be x's dtype.
        eps: added to the mean square.
        residual: x's shape, x's dtype or float32; what is normalised is x + residual.
        return_stats: also return rstd.
        config, backward_config: how rows are laid onto programs; chosen from the shape by default. Not under
            torch.compile.

    Returns:
        y, of x's shape and dtype; or a tuple (y, sum, rstd) of y and what was asked for: with a residual the sum
        x + residual in the residual's dtype, differentiable; with `return_stats` rstd [...] float32, which carries no
        gradient.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    return normalize(x, weight, bias, residual, eps, False, return_stats, config, backward_config)


def rms_norm_backward(
    dy: Tensor, h: Tensor, weight: Tensor | None, bias: Tensor | None, rstd: Tensor, *, dsum: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dh, dweight, dbias) from what `rms_norm` saw and returned: h [..., C] the normalised input (the sum, with a
    residual), rstd [...] float32, dsum the gradient of the sum. For those who keep their own graph; autograd calls it
    otherwise. Not checked."""
    return row_norm_backward(dy, h, weight, bias, None, rstd, dsum, (weight is not None, bias is not None))
