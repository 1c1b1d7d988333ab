"""gpt-oss's MoE layer with its experts in MXFP4: router, top-k, both products with biases, the clamped activation.

    pre = gate_up[e] @ x[t] + b1[e], rows of gate and up in turn;  g = min(gate, 7),  u = clamp(up, ±7)
    out[t] = Σ_j w[t, j] · (down[e] @ (g σ(1.702 g) · (u + 1)) + b2[e]),   e = ids[t, j]

dims: as those of "moe". Inputs: x [T, H], router [E, H], gate_up's packed and scales ([E, 2I, H] in values), its bias
[E, 2I], down's packed and scales ([E, H, I]) and bias [E, H]. FLOPs are those of the products, 6 T k H I; bytes
count x, router, out, and the values, scales and biases of experts that have tokens once.

- "expertile-w4a8": x and the activation rounded to FP8 on every call, and held against what comes of that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.weight_only import rearranged
from expertile.lab.operators import _marlin, _triton_kernels, moe
from expertile.lab.operators._supports import installed, with_library
from expertile.lab.race.gate import full_precision
from expertile.lab.race.operator import Call, Inputs, Operator, Rival, Workload
from expertile.moe.experts import moe_mlp
from expertile.moe.logits import router_logits
from expertile.moe.router import RouterConfig, route
from expertile.ops.gathered_mm.activation import activate, split
from expertile.ops.quantize.api import quantize_per_row
from expertile.roofline import Work

_BIAS = 0.1
_BITS = 4.25  # of a value, its share of a scale included


def _inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    """x and router as "moe" has them; weights of variance 1 / inputs, rounded an expert at a time."""
    _, h, i, e, _ = moe.size(w)
    generator = torch.Generator(device).manual_seed(seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16)

    def weights(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        made = [Mxfp4Weight.quantize(normal(n, k).mul_(k**-0.5)) for _ in range(e)]
        packed, scales = torch.cat([one.packed for one in made]), torch.cat([one.scales for one in made])
        return packed, scales, normal(e, n).mul_(_BIAS)

    return (*moe.tokens_and_router(w, device, seed), *weights(2 * i, h), *weights(h, i))


def _weights(w: Workload, inputs: Inputs) -> tuple[Mxfp4Weight, Tensor, Mxfp4Weight, Tensor]:
    _, _, up, up_scales, up_bias, down, down_scales, down_bias = inputs
    gate_up = Mxfp4Weight(up, up_scales, w["hidden"])
    return gate_up, up_bias, Mxfp4Weight(down, down_scales, w["intermediate"]), down_bias


def _rounded(rows: Tensor) -> Tensor:
    """Rows as FP8 has them, a scale for each, float32."""
    return quantize_per_row(rows).dequantize(torch.float32)


def _reference(w: Workload, inputs: Inputs, operand: Callable[[Tensor], Tensor] = Tensor.float) -> tuple[Tensor, ...]:
    """Expert after expert, in float32; `operand`: what becomes of x and the activation."""
    x, router = inputs[:2]
    gate_up, up_bias, down, down_bias = _weights(w, inputs)

    def expert(e: int, rows: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        wide_up, wide_down = (one.part(e, e + 1).dequantize(torch.float32)[0] for one in (gate_up, down))
        act = activate(*split(operand(rows) @ wide_up.t() + b1, True), "gpt_oss")
        return operand(act) @ wide_down.t() + b2

    with full_precision():
        return moe.by_expert(expert, x, *moe.routed(x, router, w["top_k"]), (up_bias, down_bias))


def _work(w: Workload) -> Work:
    t, h, i, e, k = moe.size(w)
    experts = moe.used(w) * (3 * h * i * _BITS / 8 + 2 * (2 * i + h))
    return Work(6.0 * t * k * h * i, 2.0 * (2 * t * h + e * h) + experts)


def _ours(w: Workload, inputs: Inputs, format: str = "mxfp4") -> Call:
    x, router = inputs[:2]
    gate_up, up_bias, down, down_bias = _weights(w, inputs)
    gate_up, down = (rearranged(weight, format) for weight in (gate_up, down))
    config = RouterConfig(w["experts"], w["top_k"])

    def call() -> tuple[Tensor, ...]:
        found = route(router_logits(x, router), config, want_scores=False)
        chosen = found.topk_ids, found.topk_weights
        gate: dict[str, Any] = {"activation": "gpt_oss", "interleaved": True}
        return (moe_mlp(x, gate_up, down, *chosen, **gate, gate_up_bias=up_bias, down_bias=down_bias),)

    return call


def _marlins(w: Workload, inputs: Inputs) -> Call:
    gate_up, up_bias, down, down_bias = _weights(w, inputs)
    up, low = _marlin.Prepared(gate_up, up_bias), _marlin.Prepared(down, down_bias)
    return _marlin.layer(w, inputs[0], inputs[1], up, low)


def _workload(name: str, tokens: int, h: int, i: int, e: int, k: int) -> Workload:
    sizes = (("tokens", tokens), ("hidden", h), ("intermediate", i), ("experts", e), ("top_k", k))
    return Workload(name, "gpt-oss", "moe_mxfp4", (*sizes, ("routing", "uniform")), "bf16")


def layers() -> tuple[Workload, ...]:
    """gpt-oss-120b, decode to prefill, and a layer that a CPU computes in a moment."""
    found = [_workload(f"gpt-oss-120b-tokens{t}", t, 2880, 2880, 128, 4) for t in (1, 8, 64, 2048)]
    return (*found, _workload("small-mxfp4", 6, 64, 128, 4, 2))


OPERATORS = (
    Operator(
        "moe_mxfp4",
        _inputs,
        _reference,
        _work,
        (
            Rival("expertile", _ours, peer=False),
            Rival(
                "expertile-w4a8",
                partial(_ours, format="mxfp4_fp8"),
                peer=False,
                reference=partial(_reference, operand=_rounded),
                # A pre-activation in bfloat16 may round to the next e4m3 value, 2^-3 of itself away.
                tolerance=lambda w: (2.0**-5, 2.0**-4),
            ),
            Rival(
                "triton_kernels",
                lambda w, x: _triton_kernels.layer(w, x[0], x[1], _weights(w, x)),
                installed("triton_kernels", _triton_kernels.supports),
            ),
            Rival("marlin", _marlins, with_library(_marlin.FILES, _marlin.supports("hidden", "intermediate"))),
        ),
        moe.tolerance,
    ),
)
PRESETS = {"gpt-oss": layers}
