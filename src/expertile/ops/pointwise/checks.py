"""Which tensors `add_scalar` and `laplacian` take."""

import torch

from expertile.ops.launch.device import FORMULA_DTYPES

VECTOR_BYTES = 16  # the widest load of one thread


def check_tensor(name: str, x: object, least_dims: int = 0) -> None:
    """TypeError or ValueError unless `x` is a tensor that these operators take."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in FORMULA_DTYPES or (x.dtype is torch.float64 and x.device.type != "cpu"):
        raise ValueError(f"{name}: expected float32, bfloat16 or float16 (on a CPU also float64), got {x.dtype}")
    if x.dim() < least_dims:
        raise ValueError(f"{name}: expected {least_dims} dimensions or more, got shape {list(x.shape)}")
