"""FP8 quantisers: e4m3 values and float32 scales of activations and weights, each element read once.

    scale[r, b] = max |x[r, c]| / 448 over the 128 columns c of block b      activations, 1×128
    scale[r] = max |x[r, c]| / 448 over all columns c                        activations, per row
    scale[n, b] = max |w| / 448 over a block of 128×128                      weights
    values = x / scale, rounded to nearest even

with the scale of a block of zeros 1 and none below 2^-126; with `power_of_two` scales are rounded up to 2^i, so that
multiplying by them is exact. Bit for bit what `expertile.formats.fp8.Fp8Blocks.quantize` makes of the same tensor.

What comes back, values · scale, differs from x by at most 2^-4 |x|, of elements below 2^-6 · scale (of the largest one
in their block: 2^-6 / 448) by at most 2^-10 · scale; normally distributed data by 2.6 % in relative Frobenius norm
(arXiv:2209.05433 for the format). Fused, the activation is quantised as float32 makes it, not rounded to x's dtype
first.

Memory limits all of them: itemsize · T · K bytes read (twice that for SwiGLU's two halves, or a norm with a transposed
copy), T · K + 4 T · ceil(K / 128) written, and as much again for the transposed copy. Triton, from compute capability
8.9 on, where GPUs convert to e4m3; plain torch elsewhere.
"""

from typing import Any, overload

import torch
import triton
from torch import Tensor

from expertile.formats.fp8 import Fp8Blocks
from expertile.ops.checks import check_dims, check_index, check_number, require_tensors
from expertile.ops.grouped_mm.problem import check_offs_values
from expertile.ops.launch.device import capability
from expertile.ops.quantize import launch as kernels
from expertile.ops.rows.config import check_input
from expertile.ops.torch_op import define, traced
from expertile.ragged import sizes_from_offs

Both = tuple[Fp8Blocks, Fp8Blocks, Tensor]


def _on_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels serve x: on a GPU that converts to e4m3, or interpreted."""
    return capability(x.get_device()) >= (8, 9) if x.is_cuda else triton.knobs.runtime.interpret


def _computed(x: Tensor, source: str, weight: Tensor | None, eps: float) -> Tensor:
    """What is quantised, [..., K] float32, in plain torch: without a gradient, as by the kernels."""
    wide = x.detach().float()
    if source == "plain":
        return wide
    if source == "rms_norm":
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return wide if weight is None else wide * weight.detach().float()
    gate, up = (wide[..., ::2], wide[..., 1::2]) if source == "swiglu_interleaved" else wide.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _rows(x: Tensor, source: str, weight: Tensor | None, eps: float, power_of_two: bool) -> kernels.Quantized:
    if _on_kernels(x):
        return kernels.quantize_rows(x, source, weight, eps, power_of_two)
    made = Fp8Blocks.quantize(_computed(x, source, weight, eps), (1, 128), power_of_two)
    return made.values, kernels.scales_like(x, made.scales.shape[-1]).copy_(made.scales)


def _per_row(x: Tensor) -> kernels.Quantized:
    if x.numel() == 0:  # no largest element of a row without any
        return x.to(torch.float8_e4m3fn), torch.ones((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if _on_kernels(x) and x.shape[-1] <= kernels.MOST_IN_ROW:
        return kernels.quantize_per_row(x)
    made = Fp8Blocks.quantize(x.detach(), (1, x.shape[-1]))
    return made.values, made.scales


def _tokens(
    x: Tensor, offs: Tensor, source: str, weight: Tensor | None, eps: float, power_of_two: bool, *, both: bool
) -> tuple[Tensor, ...]:
    """(values, scales,) transposed values, transposed scales, offs: the first two only if `both`."""
    if _on_kernels(x):
        rows, turned, ends = kernels.quantize_tokens(x, offs, source, weight, eps, power_of_two, both)
        return (*(rows or ()), *turned, ends)
    wide = _computed(x, source, weight, eps)
    made, ends = Fp8Blocks.quantize_tokens(wide, offs, power_of_two)
    turned = made.values, made.scales.t().contiguous().t()
    if not both:
        return (*turned, ends)
    rows_made = Fp8Blocks.quantize(wide, (1, 128), power_of_two)
    return rows_made.values, kernels.scales_like(x, rows_made.scales.shape[1]).copy_(rows_made.scales), *turned, ends


def _weights(w: Tensor, power_of_two: bool) -> kernels.Quantized:
    if _on_kernels(w):
        return kernels.quantize_weights(w, power_of_two)
    made = Fp8Blocks.quantize(w.detach(), (128, 128), power_of_two)
    return made.values, made.scales.contiguous()


def _fake_turned(x: Tensor, offs: Tensor, source: str) -> tuple[Tensor, Tensor, Tensor]:
    return *kernels.room_for_tokens(x, offs, source), torch.empty_like(offs)


def _both(x: Tensor, offs: Tensor, *how: Any) -> tuple[Tensor, ...]:
    return _tokens(x, offs, *how, both=True)


def _turned(x: Tensor, offs: Tensor, power_of_two: bool) -> tuple[Tensor, ...]:
    return _tokens(x, offs, "plain", None, 0.0, power_of_two, both=False)


# What calls the operators, their arguments in the order of their schemas.
_call_rows = define("quantize_rows", _rows, fake=lambda x, source, *_: kernels.room_for_rows(x, source))
_call_both = define(
    "quantize_both",
    _both,
    "(Tensor x, Tensor offs, str source, Tensor? weight, float eps, bool power_of_two) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=lambda x, offs, source, *_: (*kernels.room_for_rows(x, source), *_fake_turned(x, offs, source)),
)
_call_turned = define(
    "quantize_tokens",
    _turned,
    "(Tensor x, Tensor offs, bool power_of_two) -> (Tensor, Tensor, Tensor)",
    fake=lambda x, offs, _: _fake_turned(x, offs, "plain"),
)
_call_per_row = define("quantize_per_row", _per_row, fake=kernels.room_for_one_scale)
_call_weights = define("quantize_weights", _weights, fake=lambda w, _: kernels.room_for_weights(w))


def _check(name: str, x: object, dims: int | None = None) -> None:
    check_input(name, x)
    assert isinstance(x, Tensor)
    if dims is None and x.dim() < 2:
        raise ValueError(f"{name}: expected at least 2 dimensions, got shape {list(x.shape)}")
    if dims is not None:
        check_dims(name, x, dims)


def _check_offs(offs: Tensor, x: Tensor) -> None:
    require_tensors({}, offs=offs)
    check_index("offs", offs, x, "x")
    if offs.shape[0] == 0:
        raise ValueError("offs: expected at least one group, got length 0")
    if not traced(x) and offs.device.type == "cpu":
        check_offs_values(sizes_from_offs(offs), x.shape[0])


def _quantized(
    x: Tensor, source: str, weight: Tensor | None, eps: float, power_of_two: bool, offs: Tensor | None
) -> Fp8Blocks | Both:
    _check("x", x, None if offs is None else 2)
    if source.startswith("swiglu") and x.shape[-1] % 2:
        raise ValueError(f"x: expected an even number of columns, gate and up, got shape {list(x.shape)}")
    if offs is None:
        return Fp8Blocks(*(_call_rows if traced(x) else _rows)(x, source, weight, eps, power_of_two))
    _check_offs(offs, x)
    both = _call_both if traced(x) else _both
    values, scales, turned, turned_scales, ends = both(x, offs, source, weight, eps, power_of_two)
    return Fp8Blocks(values, scales), Fp8Blocks(turned, turned_scales), ends


@overload
def quantize_activations(x: Tensor, *, offs: None = None, power_of_two: bool = False) -> Fp8Blocks: ...
@overload
def quantize_activations(x: Tensor, *, offs: Tensor, power_of_two: bool = False) -> Both: ...
def quantize_activations(x: Tensor, *, offs: Tensor | None = None, power_of_two: bool = False) -> Fp8Blocks | Both:
    """x in e4m3 with a scale for each 1×128: what `scaled_grouped_mm` takes as its rows.

    Args:
        x: [..., K], at least 2 dimensions; float32, bfloat16 or float16. K need be no multiple of 128.
        offs: [G] int32 on x's device, the END row of each group of x [T, K]: also make the transposed copy that the
            weight gradient sums over, from the same single read.
        power_of_two: scales rounded up to powers of two.

    Returns:
        `Fp8Blocks` of values [..., K] and scales [..., ceil(K / 128)]. The scales of a block of K lie side by side
        for all rows R, as products read them: strides of [T, K] are (1, 4 · ceil(T / 4)). With `offs` a tuple of it,
        of the transposed copy, values [K, P] and scales [K, P / 128] with strides (1, K), and of the groups' ends in
        there, [G] int32: what `Fp8Blocks.quantize_tokens` makes, P = 128 · floor((T + 127 G) / 128), each group begun
        on a multiple of 128 with zeros behind it. Rows past offs[-1] are in the first alone. Not differentiable;
        never waits for the GPU.

    A block with a NaN has the scale NaN and all values NaN; one with an infinity the scale infinity, zeros, and NaN
    where the infinity was. Both dequantise to NaN throughout the block.

    Raises ValueError naming the argument, what was expected and what came.
    """
    return _quantized(x, "plain", None, 0.0, power_of_two, offs)


def quantize_per_row(x: Tensor) -> Fp8Blocks:
    """x in e4m3 with one scale for each row: `Fp8Blocks.quantize(x, (1, K))` in one pass.

    x [..., K], at least 2 dimensions; float32, bfloat16 or float16. Returns `Fp8Blocks` of values [..., K] and scales
    [..., 1], of which `scaled_grouped_mm` takes `scales[:, 0]`. Products are then scaled once at their end, and not for
    each 128 of K; but elements below 2^-6 / 448 of their row's largest lose bits, where `quantize_activations` looks at
    128 of them. Rows of more than 32768 elements are computed in plain torch. Not differentiable; never waits for the
    GPU. NaN and infinities make their row's scale NaN or infinite.

    Raises ValueError naming the argument, what was expected and what came.
    """
    _check("x", x)
    values, scales = (_call_per_row if traced(x) else _per_row)(x)
    return Fp8Blocks(values, scales, (1, max(1, x.shape[-1])))


@overload
def quantize_swiglu(
    x: Tensor, *, interleaved: bool = False, offs: None = None, power_of_two: bool = False
) -> Fp8Blocks: ...
@overload
def quantize_swiglu(x: Tensor, *, interleaved: bool = False, offs: Tensor, power_of_two: bool = False) -> Both: ...
def quantize_swiglu(
    x: Tensor, *, interleaved: bool = False, offs: Tensor | None = None, power_of_two: bool = False
) -> Fp8Blocks | Both:
    """silu(gate) · up of a pre-activation, quantised as by `quantize_activations`: the rows of the down projection.

    x is [..., 2 I]: the halves [gate | up], or (g0, u0, g1, u1, …) if `interleaved`. silu(g) = g / (1 + exp(-g)), in
    float32. 5 bytes an element of the result move where separate calls on bfloat16 move 9. The other arguments, the
    result (of I columns) and the errors are those of `quantize_activations`.
    """
    return _quantized(x, "swiglu_interleaved" if interleaved else "swiglu", None, 0.0, power_of_two, offs)


@overload
def quantize_rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offs: None = None, power_of_two: bool = False
) -> Fp8Blocks: ...
@overload
def quantize_rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offs: Tensor, power_of_two: bool = False
) -> Both: ...
def quantize_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offs: Tensor | None = None,
    power_of_two: bool = False,
) -> Fp8Blocks | Both:
    """x · rstd · weight, rstd = 1 / sqrt(mean of squares of a row + eps), quantised as by `quantize_activations`.

    weight is [K] or None, of any of x's dtypes. A row of at most 32768 elements is read once, a longer one, and rows
    with `offs`, twice. The other arguments, the result and the errors are those of `quantize_activations`.
    """
    if weight is not None:
        check_input("weight", weight)
        if isinstance(x, Tensor) and x.dim() and (weight.shape != x.shape[-1:] or weight.device != x.device):
            raise ValueError(
                f"weight: expected shape {[x.shape[-1]]} on {x.device}, got {list(weight.shape)} on {weight.device}"
            )
        weight = weight.contiguous()
    check_number("eps", eps, 0)
    return _quantized(x, "rms_norm", weight, float(eps), power_of_two, offs)


def quantize_tokens(x: Tensor, offs: Tensor, *, power_of_two: bool = False) -> tuple[Fp8Blocks, Tensor]:
    """The transposed copy alone, and its offs: `Fp8Blocks.quantize_tokens` in one pass.

    x [T, K], offs [G] int32 on its device -> (values [K, P], scales [K, P / 128], ends [G]); see
    `quantize_activations` for shapes, for NaN and infinities, and for the errors.
    """
    _check("x", x, 2)
    _check_offs(offs, x)
    values, scales, ends = (_call_turned if traced(x) else _turned)(x, offs, power_of_two)
    return Fp8Blocks(values, scales), ends


def quantize_weights(w: Tensor, *, power_of_two: bool = False) -> Fp8Blocks:
    """w [..., N, K] in e4m3 with a scale for each 128×128: `Fp8Blocks.quantize(w, (128, 128))` in one pass.

    float32, bfloat16 or float16; the last blocks may be cut off by the edges. Values [..., N, K], scales
    [..., ceil(N / 128), ceil(K / 128)]. NaN and infinities as in `quantize_activations`, for the whole block.

    Raises ValueError naming the argument, what was expected and what came.
    """
    _check("w", w)
    values, scales = (_call_weights if traced(w) else _weights)(w, power_of_two)
    return Fp8Blocks(values, scales, (128, 128))
