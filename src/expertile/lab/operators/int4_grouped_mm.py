"""int4_grouped_mm in the lab: bfloat16 activations times weights in 4 bits, with a scale for `group_size` values of K.

dims: as `products`, group_size (0: one scale for a row) and zeros (whether there are zero points). Inputs: a [M, K],
packed uint8 [G, N, K/2], scales [G, K/group_size, N], zeros of that shape if any, offs [G]. Bytes count activations and
results once, packed weights, scales and zero points of groups that have rows once.

- "bf16": our own `grouped_mm` of the dequantised weights, 3.9 times the bytes.
- "tinygemm": torch's `_weight_int4pack_mm`, which torchao's int4 weights run on, one call for each group with rows.
- "gemlite": the same loop over gemlite's linear layers.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.formats.int4.packing import unpack
from expertile.formats.int4.weight import SYMMETRIC_ZERO, Int4Weight
from expertile.lab.operators import products
from expertile.lab.operators._supports import installed, on_gpu
from expertile.lab.operators.weight_only_mm import BF16, make_inputs, ours, reference, weight_of
from expertile.lab.race.operator import Call, Dims, Inputs, Operator, Rival, Workload
from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.weight_only_mm.backends import BACKENDS
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem


@lru_cache(maxsize=1024)
def _problem(w: Workload, kind: str) -> WeightOnlyProblem:
    m, n, k, dtype = products.rows(w), w["n"], w["k"], w.torch_dtype
    product = (Layout.RAGGED_M, w["groups"], m, n, k, dtype, dtype, (k, 1), (n * k // 2, k // 2, 1))
    return WeightOnlyProblem(*product, True, True, False, kind, None, False, w["group_size"] or k, w["zeros"])


def _in_turn(w: Workload, a: Tensor, experts: Mapping[int, Callable[[Tensor], Tensor]]) -> Call:
    """One call for each group with rows."""
    n, spans = w["n"], tuple(products.spans(w))

    def call() -> Inputs:
        out = torch.empty(a.shape[0], n, dtype=a.dtype, device=a.device)
        for g, start, end in spans:
            out[start:end] = experts[g](a[start:end])
        return (out,)

    return call


def _experts(w: Workload, inputs: Inputs) -> Iterator[tuple[int, Int4Weight]]:
    """Each group with rows, and its weight alone."""
    weight = weight_of(w, inputs)
    assert isinstance(weight, Int4Weight)
    return ((g, weight.part(g, g + 1)) for g, _, _ in products.spans(w))


def _tinygemm(w: Workload, inputs: Inputs) -> Call:
    """w = (q - 8) · scale + zero, in its terms."""
    experts = {}
    for g, one in _experts(w, inputs):
        q = unpack(one.packed[0], one.half)
        tiled = torch._convert_weight_to_int4pack((q[:, ::2] << 4 | q[:, 1::2]).contiguous(), 8)
        zero = SYMMETRIC_ZERO if one.zeros is None else one.zeros[0]
        both = torch.stack([one.scales[0], (SYMMETRIC_ZERO - zero) * one.scales[0]], -1).contiguous()
        how: Any = {"mat2": tiled, "qGroupSize": one.group_size, "qScaleAndZeros": both}
        experts[g] = partial(torch._weight_int4pack_mm, **how)
    return _in_turn(w, inputs[0], experts)


def _tinygemm_supports(w: Workload, device: Device) -> str | None:
    if not device.at_least(8):
        return "needs compute capability 8.0 or later"
    if w["group_size"] == 0:
        return "knows groups of 32 to 256, not one scale for a row"
    if w["n"] % 8 or w["k"] % 128:
        return f"N must be a multiple of 8 and K of 128, got {w['n']} and {w['k']}"
    return None


def _gemlite(w: Workload, inputs: Inputs) -> Call:
    from gemlite import DType, GemLiteLinear

    experts: dict[int, Callable[[Tensor], Tensor]] = {}
    for g, one in _experts(w, inputs):
        sizes = {"group_size": one.group_size, "in_features": w["k"], "out_features": w["n"]}
        dtypes = {"input_dtype": DType.BF16, "output_dtype": DType.BF16}
        layer = GemLiteLinear(4, **sizes, **dtypes, scaled_activations=False)
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
    even = {rows: products.dims(32, 32 * rows, 1, 4096, 7168) for rows in (1, 16, 32, 64, 128, 256, 512)}
    found += [_workload(f"rows-{rows}", shape) for rows, shape in even.items()]
    for rows in (16, 256):
        found += [_workload(f"rows-{rows}-group-{g or 'channel'}", even[rows], g) for g in (32, 64, 0)]
        found.append(_workload(f"rows-{rows}-zeros", even[rows], zeros=True))
    # What a CPU computes in a moment.
    found.append(_workload("int4-small", products.dims(4, 24, 2, 96, 256, "uniform"), 64, True))
    return tuple(found)


OPERATORS = (
    Operator(
        "int4_grouped_mm",
        make_inputs,
        reference,
        lambda w: _problem(w, "cuda").work(products.sizes(w)),
        (
            *products.own(ours, BACKENDS, _problem),
            BF16,
            Rival("tinygemm", _tinygemm, _tinygemm_supports),
            Rival("gemlite", _gemlite, installed("gemlite", on_gpu)),
        ),
        products.tolerance,
    ),
)
PRESETS = {"int4-models": models}
