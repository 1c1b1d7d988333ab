"""The gated activations in plain torch: f(gate, up) and its gradient. `activation_kernel` has the same in Triton.

| name    | f(gate, up)                                           | as in                                          |
|---------|-------------------------------------------------------|------------------------------------------------|
| swiglu  | gate σ(gate) · up                                     | Shazeer 2020, arXiv:2002.05202                 |
| geglu   | gelu_tanh(gate) · up, and gelu_tanh(z) = z σ(2h(z))   | the same; h of Hendrycks, Gimpel 2016          |
| reglu   | max(gate, 0) · up                                     | Shazeer 2020                                   |
| gpt_oss | g σ(1.702 g) · (clamp(up, ±7) + 1), g = min(gate, 7)  | gpt-oss model card; gradients: see below       |

with h(z) = √(2/π) (z + 0.044715 z³). So all but reglu are z σ(s(z)) times something.

gpt_oss has gradients of 0 beyond a limit and the full ones at and within the limit, under every version of torch. Any
subgradient would do at the limit, and bfloat16 values lie there often. torch.clamp passed the gradient at its bounds
until torch 2.13, when gpt-oss was trained, and passes none from 2.14 on (pytorch/pytorch pull request 191142); NVIDIA's
Transformer Engine passes it in its clamped SwiGLU. Of gpt-oss itself only inference is published.
"""

import math

import torch
from torch import Tensor

GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
GPT_OSS_SCALE = 1.702
GPT_OSS_LIMIT = 7.0


def split(pre: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(gate, up), each [R, I], views of pre [R, 2I]: its even and odd columns, or its left and right half."""
    if interleaved:
        return pre[..., 0::2], pre[..., 1::2]
    half = pre.shape[-1] // 2
    return pre[..., :half], pre[..., half:]


def join(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `split`."""
    return torch.stack([gate, up], -1).flatten(-2) if interleaved else torch.cat([gate, up], -1)


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """f(gate, up), in their dtype."""
    glu, factor, *_ = _parts(gate, up, activation)
    return glu * factor


def activate_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(f(gate, up), gradient of gate, gradient of up) for the gradient `grad` of f, in their dtype."""
    glu, factor, slope, inside = _parts(gate, up, activation)
    return glu * factor, grad * factor * slope, grad * glu * inside


def _parts(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f = a(gate) · b(up): a, b, a', b'."""
    ones = torch.ones_like(up)
    if activation == "reglu":
        return torch.where(gate <= 0, 0.0, gate), up, (gate > 0).to(gate.dtype), ones
    if activation == "swiglu":
        s, ds = gate, torch.ones_like(gate)
    elif activation == "geglu":
        s = GELU_SCALE * (gate + GELU_CUBIC * gate**3)
        ds = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * gate**2)
    else:
        assert activation == "gpt_oss", activation
        below, inside = gate <= GPT_OSS_LIMIT, up.abs() <= GPT_OSS_LIMIT
        # Not clamp, whose own gradient at the limits is another in another torch.
        gate = torch.where(gate > GPT_OSS_LIMIT, GPT_OSS_LIMIT, gate)
        up = torch.where(inside | up.isnan(), up, GPT_OSS_LIMIT * up.sign())
        sigma = torch.sigmoid(GPT_OSS_SCALE * gate)
        slope = sigma + gate * sigma * (1.0 - sigma) * GPT_OSS_SCALE
        return gate * sigma, up + 1.0, slope * below, inside.to(up.dtype)
    sigma = torch.sigmoid(s)
    return gate * sigma, up, sigma + gate * sigma * (1.0 - sigma) * ds, ones
