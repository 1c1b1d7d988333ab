"""The gated activations in Triton, float32: the formulas of `activation`, for epilogues and pointwise kernels."""

import triton
import triton.language as tl

# Right of what they multiply: Triton 3.9's interpreter makes a constexpr of `constexpr * tensor`.
# sqrt(2 / pi) * 2 and the cubic's coefficient of gelu_tanh; scale and clamp of gpt-oss: as in `activation`.
_GELU_SCALE = tl.constexpr(1.5957691216057308)
_GELU_CUBIC = tl.constexpr(0.044715)
_GPT_OSS_SCALE = tl.constexpr(1.702)
_GPT_OSS_LIMIT = tl.constexpr(7.0)


@triton.jit
def _clamp(x):
    """x between the limits of gpt-oss; NaN stays NaN, where tl.minimum would make a limit of it."""
    return tl.where(x > _GPT_OSS_LIMIT, _GPT_OSS_LIMIT, tl.where(x < -_GPT_OSS_LIMIT, -_GPT_OSS_LIMIT, x))


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """f(gate, up), any shape."""
    if ACTIVATION == "reglu":
        value = tl.where(gate < 0.0, 0.0, gate) * up
    elif ACTIVATION == "swiglu":
        value = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "geglu":
        value = gate * tl.sigmoid((gate + gate * _GELU_CUBIC * gate * gate) * _GELU_SCALE) * up
    else:
        tl.static_assert(ACTIVATION == "gpt_oss")
        gate = tl.where(gate > _GPT_OSS_LIMIT, _GPT_OSS_LIMIT, gate)
        value = gate * tl.sigmoid(gate * _GPT_OSS_SCALE) * (_clamp(up) + 1.0)
    return value


@triton.jit
def activate_backward(gate, up, grad, ACTIVATION: tl.constexpr):
    """(f(gate, up), gradient of gate, gradient of up) for the gradient `grad` of f."""
    if ACTIVATION == "reglu":
        glu = tl.where(gate < 0.0, 0.0, gate)
        value = glu * up
        d_gate = tl.where(gate > 0.0, grad * up, 0.0)
        d_up = grad * glu
    elif ACTIVATION == "swiglu":
        sigma = tl.sigmoid(gate)
        glu = gate * sigma
        value = glu * up
        d_gate = grad * up * (sigma + glu * (1.0 - sigma))
        d_up = grad * glu
    elif ACTIVATION == "geglu":
        square = gate * gate
        sigma = tl.sigmoid(gate * _GELU_SCALE * (1.0 + square * _GELU_CUBIC))
        glu = gate * sigma
        value = glu * up
        d_gate = grad * up * (sigma + glu * (1.0 - sigma) * ((1.0 + square * (3.0 * _GELU_CUBIC)) * _GELU_SCALE))
        d_up = grad * glu
    else:
        tl.static_assert(ACTIVATION == "gpt_oss")
        above = gate > _GPT_OSS_LIMIT
        inside = tl.abs(up) <= _GPT_OSS_LIMIT
        gate = tl.where(above, _GPT_OSS_LIMIT, gate)
        factor = _clamp(up) + 1.0
        sigma = tl.sigmoid(gate * _GPT_OSS_SCALE)
        glu = gate * sigma
        value = glu * factor
        d_gate = tl.where(above, 0.0, grad * factor * (sigma + glu * (1.0 - sigma) * _GPT_OSS_SCALE))
        d_up = tl.where(inside, grad * glu, 0.0)
    return value, d_gate, d_up


@triton.jit
def deinterleave(both):
    """(even columns, odd columns) of a block [rows, 2 * columns]."""
    return both.reshape(both.shape[0], both.shape[1] // 2, 2).split()
