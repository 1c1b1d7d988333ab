"""scaled_grouped_mm in the lab: e4m3 operands, float32 scales 1×128 for activations and 128×128 for weights, bf16 out.

Inputs: a [M, K], scale_a [M, ceil(K/128)] (rows side by side, as `quantize_activations` leaves it), weights [G, N, K],
scale_b [G, ceil(N/128), ceil(K/128)], offs [G]. Bytes count operands, scales and result once, weights of groups that
have rows. Rivals that take other scales are held against the product of what they were given:

- "torch": `torch.nn.functional.scaled_grouped_mm`, one scale for each row; requantised before timing.
- "bf16": our own `grouped_mm` of the dequantised operands, with twice the bytes and half the peak.
- "dense": `torch._scaled_mm` of the same rows against the first group's weights, one scale for each tensor.
- "deepgemm", "deepgemm-masked": `_deep_gemm.py`.
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.formats.fp8 import E4M3_MAX, dequantize
from expertile.lab.operators import _deep_gemm, products
from expertile.lab.operators._supports import installed
from expertile.lab.race.operator import Call, Inputs, Operator, Rival, Workload
from expertile.lab.race.record import DENSE
from expertile.ops.grouped_mm.problem import described
from expertile.ops.quantize.api import quantize_activations, quantize_weights
from expertile.ops.quantize.launch import scales_like
from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
from expertile.ops.scaled_grouped_mm.backends import BACKENDS
from expertile.ops.scaled_grouped_mm.problem import ScaledProblem
from expertile.roofline import Work

OP = "scaled_grouped_mm"


def make_inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    """Quantised from bfloat16 numbers, the weights a group at a time."""
    make = products.random(device, seed)
    a = quantize_activations(make(products.rows(w), w["k"]))
    groups, n, k = w["groups"], w["n"], w["k"]
    weights = torch.empty(groups, n, k, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(groups, -(-n // 128), -(-k // 128), device=device)
    for g in range(groups):
        made = quantize_weights(make(n, k))
        weights[g], scales[g] = made.values, made.scales
    return a.values, a.scales, weights, scales, products.offs(w, device)


def _left(inputs: Inputs, start: int, end: int) -> Tensor:
    return dequantize(inputs[0][start:end], inputs[1][start:end], (1, 128))


def _right(inputs: Inputs, group: int) -> Tensor:
    return dequantize(inputs[2][group], inputs[3][group], (128, 128))


def reference(w: Workload, inputs: Inputs) -> Inputs:
    return products.product(w, partial(_left, inputs), partial(_right, inputs))


@lru_cache(maxsize=1024)
def problem(w: Workload, kind: str) -> ScaledProblem:
    """Without tensors: what a call on `make_inputs`' operands describes."""
    m, n, k, groups = products.rows(w), w["n"], w["k"], w["groups"]
    meta, device, kb = partial(torch.empty, device="meta"), torch.device(kind), -(-k // 128)
    a, b = (meta(shape, dtype=torch.float8_e4m3fn) for shape in ((m, k), (groups, n, k)))
    scale_a, scale_b, offs = scales_like(a, kb), meta(groups, -(-n // 128), kb), meta(groups, dtype=torch.int32)

    def told(x: Tensor) -> tuple[Any, ...]:
        return (*described(x)[:3], device, True)  # type: ignore[index]

    operands = told(a), told(b.transpose(1, 2)), told(scale_a), told(scale_b)
    return ScaledProblem.of_descriptions(*operands, told(offs), None, torch.bfloat16)


def work(w: Workload) -> Work:
    return problem(w, "cuda").work(products.sizes(w))


def ours(w: Workload, inputs: Inputs, backend: str = "auto") -> Call:
    a, scale_a, weights, scale_b, offs = inputs
    b = weights.transpose(-2, -1)
    return lambda: (scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, backend=backend),)


def rowwise(inputs: Inputs) -> Inputs:
    """The operands requantised with one scale for each row: a, scale_a [M], weights, scale_b [G, N], offs."""
    a, scale_a = _by_row(_left(inputs, 0, inputs[0].shape[0]))
    weights, scale_b = torch.empty_like(inputs[2]), inputs[3].new_empty(inputs[2].shape[:2])
    for g in range(weights.shape[0]):
        weights[g], scale_b[g] = _by_row(_right(inputs, g))
    return a, scale_a, weights, scale_b, inputs[4]


def _by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1) / E4M3_MAX).clamp(min=2.0**-126)
    return (x / scale[:, None]).to(torch.float8_e4m3fn), scale


def rowwise_call(w: Workload, inputs: Inputs, backend: str = "auto") -> Call:
    return ours(w, rowwise(inputs), backend)


def rowwise_reference(w: Workload, inputs: Inputs) -> Inputs:
    a, scale_a, weights, scale_b, _ = rowwise(inputs)
    return products.product(
        w, lambda i, j: a[i:j].float() * scale_a[i:j, None], lambda g: weights[g].float() * scale_b[g, :, None]
    )


def _torch_supports(w: Workload, device: Device) -> str | None:
    if device.kind != "cuda" or device.capability != (9, 0):
        return "PyTorch's kernel for row-wise scales needs compute capability 9.0"
    if w["k"] % 16 or w["n"] % 16:
        return f"K and N must be multiples of 16, got {w['k']} and {w['n']}"
    return None


def _bf16(w: Workload, inputs: Inputs) -> Call:
    a = _left(inputs, 0, inputs[0].shape[0]).bfloat16()
    weights = torch.empty(inputs[2].shape, dtype=torch.bfloat16, device=a.device)
    for g in range(weights.shape[0]):
        weights[g] = _right(inputs, g)
    return products.bf16_call(a, weights, inputs[4])


def _dense(w: Workload, inputs: Inputs) -> Call:
    a, weight = inputs[0], inputs[2][0].t()
    one = torch.ones((), device=a.device)

    def call() -> Inputs:
        return (torch._scaled_mm(a, weight, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),)

    return call


def _dense_reference(w: Workload, inputs: Inputs) -> Inputs:
    with products.full_precision():
        return (inputs[0].float() @ inputs[2][0].float().t(),)


def _dense_supports(w: Workload, device: Device) -> str | None:
    if not device.at_least(8, 9):
        return "torch._scaled_mm needs compute capability 8.9 or later"
    m, n, k = products.rows(w), w["n"], w["k"]
    return None if m and n % 16 == 0 and k % 16 == 0 else f"N and K must be multiples of 16, got {n} and {k}"


def _dense_work(w: Workload) -> Work:
    m, n, k = products.rows(w), w["n"], w["k"]
    return Work(2.0 * m * n * k, float(m * k + n * k + 2 * m * n))


def _deep_gemm_rival(name: str, masked: bool) -> Rival:
    supports = installed("deep_gemm", partial(_deep_gemm.supports, masked=masked))
    of_layout = partial(_deep_gemm.bind, masked=masked)
    return Rival(name, of_layout, supports, reference=lambda w, x: _deep_gemm.reference(w, reference(w, x)[0]))


def _even(preset: str, shapes: Iterable[tuple[int, int, int, int]]) -> tuple[Workload, ...]:
    """Groups, rows of each, N and K."""
    return tuple(
        Workload(f"fp8-e{e}-m{m}-n{n}-k{k}", preset, OP, products.dims(e, e * m, 1, n, k), "fp8")
        for e, m, n, k in shapes
    )


def models() -> tuple[Workload, ...]:
    """The products of `int4_grouped_mm`'s models, in FP8."""
    return tuple(Workload(name, "int4-models", OP, dims, "fp8", note) for name, dims, note in products.model_products())


def sweep() -> tuple[Workload, ...]:
    """Report 002's 81 shapes."""
    sides = (2048, 4096, 7168)
    return _even("fp8-sweep", product((1, 4, 8), (64, 128, 512), sides, sides))


def drawn() -> tuple[Workload, ...]:
    """20 products that no choice was fitted to: sizes drawn evenly by their logarithms, rows of a group as a router of
    equal chances gives them in every second one, else alike."""
    draw = Random(0)
    found: list[Workload] = []

    def size(low: int, high: int, grain: int) -> int:
        return grain * round(low * (high / low) ** draw.random() / grain)

    while len(found) < 20:
        groups, rows, n, k = size(1, 64, 1), size(16, 2048, 8), size(1024, 8192, 128), size(1024, 8192, 128)
        if groups * rows <= 65536 and groups * n * k <= 2**31:
            routing = ("balanced", "uniform")[len(found) % 2]
            dims = products.dims(groups, groups * rows, 1, n, k, routing)
            found.append(Workload(f"fp8-e{groups}-m{rows}-n{n}-k{k}-{routing}", "fp8-random", OP, dims, "fp8"))
    return tuple(found)


def large() -> tuple[Workload, ...]:
    """Training and prefill sizes, decode, uneven rows, a square product as a yardstick for compute, and one that a CPU
    computes in a moment."""
    shapes = (
        (4, 8192, 4096, 7168),
        (8, 4096, 7168, 2048),
        (8, 2048, 4096, 4096),
        (32, 16, 4096, 7168),
        (32, 128, 4096, 7168),
        (128, 8, 1536, 2048),
        (1, 8192, 8192, 8192),
    )
    routed = {
        f"deepseek-v3-gate-up-{phase}": products.dims(256, tokens, 8, 4096, 7168, routing)
        for phase, tokens, routing in (
            ("decode", 128, "uniform"),
            ("prefill", 8192, "uniform"),
            ("prefill-zipf", 8192, "zipf(1)"),
        )
    }
    return (
        *_even("fp8-large", shapes),
        *(Workload(name, "fp8-large", OP, dims, "fp8", "published configuration") for name, dims in routed.items()),
        Workload("fp8-small", "fp8-large", OP, products.dims(4, 48, 2, 160, 256, "uniform"), "fp8"),
    )


OPERATORS = (
    Operator(
        OP,
        make_inputs,
        reference,
        work,
        (
            *products.own(ours, BACKENDS, problem),
            Rival("torch", partial(rowwise_call, backend="torch_scaled"), _torch_supports, reference=rowwise_reference),
            _deep_gemm_rival("deepgemm", masked=False),
            _deep_gemm_rival("deepgemm-masked", masked=True),
            # Held against the product of the operands as it has them, rounded to bfloat16.
            products.bf16(
                _bf16,
                lambda w, x: products.product(
                    w, lambda i, j: _left(x, i, j).bfloat16(), lambda g: _right(x, g).bfloat16()
                ),
            ),
        ),
        products.tolerance,
        (
            # Fast accumulation keeps 14 bits of a sum over all of K; the operator's tolerance is for 128 summands.
            Rival(
                DENSE,
                _dense,
                _dense_supports,
                reference=_dense_reference,
                work=_dense_work,
                tolerance=lambda w: (2.0**-8, 2.0**-6),
            ),
        ),
    ),
)
PRESETS = {"fp8-sweep": sweep, "fp8-large": large, "fp8-random": drawn, "int4-models": models}
