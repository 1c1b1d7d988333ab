"""int4_grouped_mm in the lab: bfloat16 activations times weights in 4 bits, with a scale for `group_size` values of K.

dims: as `products`, group_size (0: one scale for a row) and zeros (whether there are zero points). Inputs: a [M, K],
packed uint8 [G, N, K/2], scales [G, K/group_size, N], zeros of that shape if any, offs [G]. Bytes count activations and
results once, packed weights, scales and zero points of groups that have rows once.

- "bf16": our own `grouped_mm` of the dequantised weights, 3.9 times the bytes.
- "tinygemm": torch's `_weight_int4pack_mm`, which torchao's int4 weights run on, one call for each group with rows.
- "gemlite": the same loop over gemlite's linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType

import torch
from torch import Tensor

from expertile.device import Device
from expertile.formats.int4.packing import unpack
from expertile.formats.int4.weight import SYMMETRIC_ZERO, Int4Weight
from expertile.lab.operators import products
from expertile.lab.operators._supports import installed, on_gpu
from expertile.lab.race.operator import Call, Dims, Operator, Rival, Workload
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.weight_only_mm.api import int4_grouped_mm
from expertile.ops.weight_only_mm.backends import BACKENDS
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem

Inputs = tuple[Tensor, ...]


def _group(w: Workload) -> int:
    return w["group_size"] or w["k"]


def _inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    """Weights from bfloat16 numbers, a group at a time, as `Int4Weight.quantize` rounds them."""
    make = products.random(device, seed)
    a = make(products.rows(w), w["k"])
    groups, n, k, group_size = w["groups"], w["n"], w["k"], _group(w)
    packed = torch.empty(groups, n, k // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(groups, k // group_size, n, dtype=torch.bfloat16, device=device)
    zeros = torch.empty_like(scales) if w["zeros"] else None
    for g in range(groups):
        made = Int4Weight.quantize(make(n, k), group_size, symmetric=zeros is None)
        packed[g], scales[g] = made.packed[0], made.scales[0]
        if zeros is not None and made.zeros is not None:
            zeros[g] = made.zeros[0]
    ends = products.offs(w, device)
    return (a, packed, scales, ends) if zeros is None else (a, packed, scales, zeros, ends)


def _weight(w: Workload, inputs: Inputs) -> Int4Weight:
    return Int4Weight(inputs[1], inputs[2], inputs[3] if w["zeros"] else None, _group(w))


def _expert(weight: Int4Weight, g: int) -> Int4Weight:
    zeros = None if weight.zeros is None else weight.zeros[g : g + 1]
    return Int4Weight(weight.packed[g : g + 1], weight.scales[g : g + 1], zeros, weight.group_size)


def _reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    weight = _weight(w, inputs)
    return products.product(
        w, lambda start, end: inputs[0][start:end], lambda g: _expert(weight, g).dequantize(torch.float32)[0]
    )


@lru_cache(maxsize=1024)
def _problem(w: Workload, kind: str) -> WeightOnlyProblem:
    m, n, k, dtype = products.rows(w), w["n"], w["k"], w.torch_dtype
    product = (Layout.RAGGED_M, w["groups"], m, n, k, dtype, dtype, (k, 1), (n * k // 2, k // 2, 1))
    return WeightOnlyProblem(*product, True, True, False, kind, None, False, _group(w), w["zeros"])


def _ours(w: Workload, inputs: Inputs, backend: str = "auto") -> Call:
    a, ends, weight = inputs[0], inputs[-1], _weight(w, inputs)
    return lambda: (int4_grouped_mm(a, weight, offs=ends, backend=backend),)


def _bf16(w: Workload, inputs: Inputs) -> Call:
    return products.bf16_call(inputs[0], _weight(w, inputs).dequantize(), inputs[-1])


def _bf16_reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    """Of the weights as that product has them, rounded to bfloat16."""
    weights = _weight(w, inputs).dequantize()
    return products.product(w, lambda start, end: inputs[0][start:end], lambda g: weights[g])


def _in_turn(w: Workload, a: Tensor, experts: Mapping[int, Callable[[Tensor], Tensor]]) -> Call:
    """One call for each group with rows."""
    n, spans = w["n"], tuple(products.spans(w))

    def call() -> tuple[Tensor, ...]:
        out = torch.empty(a.shape[0], n, dtype=a.dtype, device=a.device)
        for g, start, end in spans:
            out[start:end] = experts[g](a[start:end])
        return (out,)

    return call


def _tinygemm(w: Workload, inputs: Inputs) -> Call:
    """w = (q - 8) · scale + zero, in its terms."""
    weight, group_size = _weight(w, inputs), _group(w)
    experts = {}
    for g, _, _ in products.spans(w):
        one = _expert(weight, g)
        q = unpack(one.packed[0], one.half)
        tiled = torch._convert_weight_to_int4pack((q[:, ::2] << 4 | q[:, 1::2]).contiguous(), 8)
        zero = SYMMETRIC_ZERO if one.zeros is None else one.zeros[0]
        both = torch.stack([one.scales[0], (SYMMETRIC_ZERO - zero) * one.scales[0]], -1).contiguous()
        experts[g] = partial(_tinygemm_call, tiled, group_size, both)
    return _in_turn(w, inputs[0], experts)


def _tinygemm_call(tiled: Tensor, group_size: int, scales_and_zeros: Tensor, a: Tensor) -> Tensor:
    return torch._weight_int4pack_mm(a, tiled, group_size, scales_and_zeros)


def _tinygemm_supports(w: Workload, device: Device) -> str | None:
    if device.kind != "cuda" or device.capability is None or device.capability < (8, 0):
        return "needs compute capability 8.0 or later"
    if w["group_size"] == 0:
        return "knows groups of 32 to 256, not one scale for a row"
    if w["n"] % 8 or w["k"] % 128:
        return f"N must be a multiple of 8 and K of 128, got {w['n']} and {w['k']}"
    return None


def _gemlite(w: Workload, inputs: Inputs) -> Call:
    from gemlite import DType, GemLiteLinear

    weight = _weight(w, inputs)
    experts: dict[int, Callable[[Tensor], Tensor]] = {}
    for g, _, _ in products.spans(w):
        one = _expert(weight, g)
        layer = GemLiteLinear(
            4,
            group_size=_group(w),
            in_features=w["k"],
            out_features=w["n"],
            input_dtype=DType.BF16,
            output_dtype=DType.BF16,
            scaled_activations=False,
        )
        scales = one.scales[0].t().reshape(-1, 1)
        zeros = torch.full_like(scales, SYMMETRIC_ZERO) if one.zeros is None else one.zeros[0].t().reshape(-1, 1)
        layer.pack(unpack(one.packed[0], one.half), scales.contiguous(), zeros.contiguous(), None)
        experts[g] = layer
    return _in_turn(w, inputs[0], experts)


def _workload(name: str, shape: Dims, group_size: int = 128, zeros: bool = False, note: str = "") -> Workload:
    dims = (*shape, ("group_size", group_size), ("zeros", zeros))
    return Workload(name, "int4-models", "int4_grouped_mm", dims, "bf16", note)


def models() -> tuple[Workload, ...]:
    """Both projections of each model, decode to prefill, group 128; and the other group sizes on one of them."""
    found = [_workload(name, shape, note=note) for name, shape, note in products.model_products()]

    def even(rows: int) -> Dims:
        return products.dims(32, 32 * rows, 1, 4096, 7168)

    found += [_workload(f"rows-{rows}", even(rows)) for rows in (1, 16, 32, 64, 128, 256, 512)]
    for rows in (16, 256):
        found += [_workload(f"rows-{rows}-group-{g or 'channel'}", even(rows), g) for g in (32, 64, 0)]
        found.append(_workload(f"rows-{rows}-zeros", even(rows), zeros=True))
    # What a CPU computes in a moment.
    found.append(_workload("int4-small", products.dims(4, 24, 2, 96, 256, "uniform"), 64, True))
    return tuple(found)


OPERATORS = (
    Operator(
        "int4_grouped_mm",
        _inputs,
        _reference,
        lambda w: _problem(w, "cuda").work(products.sizes(w)),
        (
            *products.own(_ours, BACKENDS, _problem),
            products.bf16(_bf16, _bf16_reference),
            Rival("tinygemm", True, _tinygemm_supports, _tinygemm),
            Rival("gemlite", True, installed("gemlite", on_gpu), _gemlite),
        ),
        products.tolerance,
    ),
)
PRESETS: Mapping[str, Callable[[], tuple[Workload, ...]]] = MappingProxyType({"int4-models": models})
