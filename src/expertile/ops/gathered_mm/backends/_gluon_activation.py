"""Device code of `gluon_gather`: the gated activations (formulas: `gathered_mm.activation`), in float32 registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# sqrt(2 / pi) * 2 and the cubic's coefficient of gelu_tanh; scale and clamp of gpt-oss: as in `activation`.
_GELU_SCALE: gl.constexpr = gl.constexpr(1.5957691216057308)
_GELU_CUBIC: gl.constexpr = gl.constexpr(0.044715)
_GPT_OSS_SCALE: gl.constexpr = gl.constexpr(1.702)
_GPT_OSS_LIMIT: gl.constexpr = gl.constexpr(7.0)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _clamp(x):
    """x between the limits of gpt-oss; not a number stays none."""
    return gl.where(x > _GPT_OSS_LIMIT, _GPT_OSS_LIMIT, gl.where(x < -_GPT_OSS_LIMIT, -_GPT_OSS_LIMIT, x))


@gluon.jit
def activate(gate, up, ACTIVATION: gl.constexpr):
    """f(gate, up), any shape."""
    if ACTIVATION == "reglu":
        return gl.where(gate < 0.0, 0.0, gate) * up
    elif ACTIVATION == "swiglu":
        return gate * _sigmoid(gate) * up
    elif ACTIVATION == "geglu":
        return gate * _sigmoid(_GELU_SCALE * gate * (1.0 + _GELU_CUBIC * gate * gate)) * up
    else:
        gate = gl.where(gate > _GPT_OSS_LIMIT, _GPT_OSS_LIMIT, gate)
        return gate * _sigmoid(_GPT_OSS_SCALE * gate) * (_clamp(up) + 1.0)
