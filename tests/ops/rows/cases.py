"""Shapes, configs and the float64 truth that the tests of softmax, layer norm and RMS norm share."""

import torch

from expertile.ops.rows.config import RowConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Relative Frobenius error of one rounding to the dtype, with room for float32 sums in another order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
SHAPES = ((3, 1), (5, 2), (4, 37), (3, 64), (2, 3, 100), (7,), (1, 129), (6, 96))

# Small tiles for the interpreter: one tile per program, several rows, several pieces, programs that stay, streamed.
TO_INTERPRET = (
    None,
    RowConfig(1, 128, 4),
    RowConfig(4, 128, 4),
    RowConfig(2, 32, 1),
    RowConfig(2, 64, 1, programs_per_sm=1, num_stages=2),
    RowConfig(1, 32, 1, streamed=True),
)


def fits(config: RowConfig | None, cols: int) -> bool:
    """Whether the row is held in at most five pieces."""
    return config is None or config.streamed or config.pieces(cols) <= 5


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu", scale: float = 1.0):
    """Normal values in `dtype`, the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error against a float64 tensor; infinite for a NaN, a wrong shape."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return error.item() if error.isfinite() else float("inf")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "result", factor: float = 1.0) -> None:
    """`actual` is `expected` (float64) up to the rounding of its own dtype."""
    error = relative_error(actual, expected)
    # A softmax of 262144 columns lies among float16's subnormal numbers: rounding alone costs more than usual there.
    limit = max(factor * TOLERANCE[actual.dtype], 1.1 * relative_error(expected.to(actual.dtype), expected))
    assert error <= limit, f"{name}: relative error {error:.2e} in {actual.dtype}"


def leaf(x: torch.Tensor | None) -> torch.Tensor | None:
    """A float64 copy of x that takes gradients."""
    return None if x is None else x.detach().double().requires_grad_()


def norm64(h, weight, bias, eps, centered):
    """Layer norm or RMS norm in float64, by its definition."""
    if centered:
        h = h - h.mean(-1, keepdim=True)
    y = h / torch.sqrt(h.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def assert_softmax_gradient(dx: torch.Tensor, dy: torch.Tensor, y: torch.Tensor) -> None:
    """dx is y * (dy - sum(dy * y)) for the y that was returned, up to roundings of its terms."""
    y64, dy64 = y.detach().double(), dy.double()
    dot = (y64 * dy64).sum(-1, keepdim=True)
    unit = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dx.dtype]
    smallest = 6e-8 if dx.dtype is torch.float16 else 1e-37
    allowed = unit * y64 * (dy64.abs() + (y64 * dy64.abs()).sum(-1, keepdim=True)) + smallest
    excess = ((dx.double() - y64 * (dy64 - dot)).abs() / allowed).max().item()
    assert excess <= 1.0, f"dx: {excess:.2f} times the error allowed in {dx.dtype}"
