"""weight_only_mm in the lab: bfloat16 activations times weights in 4 bits of either format, beside their specialists.

dims: as `products`, format ("int4", symmetric, or "mxfp4") and group_size. Inputs: a [M, K], packed uint8 and scales as
Int4Weight and Mxfp4Weight hold them, offs [G]. Bytes count activations and results once, and values and scales of
groups that have rows. "bf16" is our own `grouped_mm` of the dequantised weights, "triton_kernels-bf16" theirs.

"weight_only_mm_fp8" is the same product where activations may be rounded to e4m3: by "expertile" (1×128),
"expertile-per-row" and "humming" (each row), which do so on every call, within its time. Names in "-rounded" find them
rounded; the others keep 16 bits. Each is held against the product of the activations as it rounds them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertile.device import Device
from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4.weight import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.weight_only import rearranged
from expertile.lab.operators import _humming, _marlin, _triton_kernels, products
from expertile.lab.operators._plain import Weight
from expertile.lab.operators._supports import installed, on_gpu, with_library
from expertile.lab.race.operator import Call, Inputs, Operator, Reference, Rival, Workload
from expertile.ops.quantize.api import quantize_activations, quantize_per_row
from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
from expertile.ops.weight_only_mm.api import weight_only_mm
from expertile.roofline import Work

Bind = Callable[..., Call]

_MODELS = {  # as names of workloads call them
    "qwen3-30b": "qwen3-30b-a3b",
    "gpt-oss-120b": "gpt-oss-120b",
    "deepseek-v3": "deepseek-v3",
    "mixtral": "mixtral-8x7b",
}
_ROWS = (1, 8, 32, 256, 2048)  # of each group


def weight_of(w: Workload, inputs: Inputs) -> Weight:
    packed, scales, *zeros = inputs[1:-1]
    if dict(w.dims).get("format") == "mxfp4":
        return Mxfp4Weight(packed, scales, w["k"])
    return Int4Weight(packed, scales, zeros[0] if zeros else None, w["group_size"] or w["k"])


def make_inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    """Weights from bfloat16 numbers, an expert at a time, as the formats round them."""
    make, n, k = products.random(device, seed), w["n"], w["k"]
    dims: dict[str, Any] = dict(w.dims)
    a, names = make(products.rows(w), k), ("packed", "scales", *(("zeros",) if dims.get("zeros") else ()))

    def one() -> Weight:
        made = make(n, k)
        if dims.get("format") == "mxfp4":
            return Mxfp4Weight.quantize(made)
        return Int4Weight.quantize(made, dims["group_size"] or k, symmetric="zeros" not in names)

    weights = [one() for _ in range(w["groups"])]
    return a, *(torch.cat([getattr(x, name) for x in weights]) for name in names), products.offs(w, device)


def reference(
    w: Workload, inputs: Inputs, dtype: torch.dtype = torch.float32, fp8: int | None = None
) -> tuple[Tensor, ...]:
    """Of the weights rounded to `dtype`, and of activations rounded to e4m3 with a scale for each 1×`fp8`."""
    weight = weight_of(w, inputs)

    def left(start: int, end: int) -> Tensor:
        rows = inputs[0][start:end]
        return rows if fp8 is None else Fp8Blocks.quantize(rows, (1, fp8)).dequantize()

    return products.product(w, left, lambda g: weight.part(g, g + 1).dequantize(dtype)[0])


_fp8_reference = partial(reference, fp8=128)


def _per_row_reference(w: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    return reference(w, inputs, fp8=w["k"])


def _work(w: Workload, activation: float = 2.0) -> Work:
    """`activation`: bytes of one."""
    m, n, k = products.rows(w), w["n"], w["k"]
    scale = 1 if w["format"] == "mxfp4" else 2
    weight = n * k / 2 + scale * n * k / w["group_size"]
    return Work(2.0 * m * n * k, m * (activation * k + 2.0 * n) + products.used(w) * weight)


def ours(w: Workload, inputs: Inputs, backend: str = "auto") -> Call:
    a, ends, weight = inputs[0], inputs[-1], weight_of(w, inputs)
    return lambda: (weight_only_mm(a, weight, offs=ends, backend=backend),)


def _fp8(w: Workload, inputs: Inputs, rounded: bool = False, per_row: bool = False) -> Call:
    """`rounded`: activations come in FP8, with scales for each 1×128 or `per_row`."""
    a, ends, b = inputs[0], inputs[-1], rearranged(weight_of(w, inputs), "mxfp4_fp8")
    quantize = quantize_per_row if per_row else quantize_activations
    given = quantize(a) if rounded else None

    def call() -> tuple[Tensor, ...]:
        a8 = quantize(a) if given is None else given
        scales = a8.scales[:, 0] if per_row else a8.scales
        return (scaled_grouped_mm(a8.values, b, scales, offs=ends),)

    return call


def _fp8_supports(w: Workload, device: Device) -> str | None:
    odd = w["format"] == "int4" and w["group_size"] != 128
    return f"takes INT4 in groups of 128, not of {w['group_size']}" if odd else None


def _bf16(w: Workload, inputs: Inputs) -> Call:
    return products.bf16_call(inputs[0], weight_of(w, inputs).dequantize(torch.bfloat16), inputs[-1])


BF16 = products.bf16(_bf16, partial(reference, dtype=torch.bfloat16))  # as that product has the weights


def _theirs(bind: Bind) -> Callable[[Workload, Inputs], Call]:
    return lambda w, inputs: bind(w, inputs[0], weight_of(w, inputs))


def _workload(
    name: str, preset: str, shape: tuple[int, int, int], rows: int, form: str, op: str = "weight_only_mm"
) -> Workload:
    """`rows` of each group."""
    groups, n, k = shape
    group_size = 32 if form == "mxfp4" else 128 if k % 128 == 0 else 64
    dims = products.dims(groups, groups * rows, 1, n, k)
    return Workload(name, preset, op, (*dims, ("format", form), ("group_size", group_size)), "bf16")


def _products(
    preset: str, projection: str, op: str = "weight_only_mm", all_rows: tuple[int, ...] = _ROWS
) -> tuple[Workload, ...]:
    found, last = [], "-fp8" if op == "weight_only_mm_fp8" else ""
    for form in ("mxfp4", "int4"):
        for model, real in _MODELS.items():
            groups, hidden, inner, _ = products.REAL_MODELS[real]
            shape = (groups, 2 * inner, hidden) if projection == "gate-up" else (groups, hidden, inner)
            found += [
                _workload(f"{model}-{projection}-{form}-rows{rows}{last}", preset, shape, rows, form, op)
                for rows in all_rows
            ]
        # What a CPU computes in a moment.
        found.append(_workload(f"small-{projection}-{form}{last}", preset, (3, 128, 128), 5, form, op))
    return tuple(found)


def _ours_fp8(name: str, per_row: bool, reference: Reference, nbytes: float) -> tuple[Rival, Rival]:
    """With activations that each call rounds, and that come rounded, of `nbytes` an element."""
    own = Rival(name, partial(_fp8, per_row=per_row), _fp8_supports, peer=False, reference=reference)
    rounded, work = partial(_fp8, rounded=True, per_row=per_row), partial(_work, activation=nbytes)
    return own, replace(own, name=f"{name}-rounded", bind=rounded, work=work)


_HUMMING = Rival("humming", _theirs(_humming.bind), installed("humming", _humming.supports))
_PEERS = (
    Rival("marlin", _theirs(_marlin.bind), with_library(_marlin.FILES, _marlin.supports("k"))),
    Rival("triton_kernels", _theirs(_triton_kernels.bind), installed("triton_kernels", _triton_kernels.supports)),
)

OPERATORS = (
    Operator(
        "weight_only_mm",
        make_inputs,
        reference,
        _work,
        (
            Rival("expertile", ours, peer=False),
            *_PEERS,
            _HUMMING,
            BF16,
            replace(
                BF16,
                bind=_theirs(_triton_kernels.bind_bf16),
                name="triton_kernels-bf16",
                supports=installed("triton_kernels", on_gpu),
            ),
        ),
        products.tolerance,
    ),
    Operator(
        "weight_only_mm_fp8",
        make_inputs,
        reference,
        _work,
        (
            *_ours_fp8("expertile", False, _fp8_reference, 1 + 4 / 128),
            *_ours_fp8("expertile-per-row", True, _per_row_reference, 1.0),
            Rival("expertile-16bits", ours, peer=False),
            replace(
                _HUMMING,
                bind=_theirs(partial(_humming.bind, eight_bits=True)),
                reference=_per_row_reference,
                # Sums of all of K in the tensor cores' 14 bits, and activations that lie between two e4m3 values.
                tolerance=lambda w: (2.0**-6, 2.0**-5),
            ),
            *_PEERS,
            replace(_HUMMING, name="humming-16bits"),
        ),
        products.tolerance,
        dtype_key=lambda w: "fp8",
    ),
)


def _beside_fp8(preset: str, projection: str) -> tuple[Workload, ...]:
    """All products, and those of long groups where activations may be rounded."""
    return _products(preset, projection) + _products(preset, projection, "weight_only_mm_fp8", _ROWS[-2:])


PRESETS = {
    "weight-only": partial(_beside_fp8, "weight-only", "gate-up"),
    "weight-only-down": partial(_beside_fp8, "weight-only-down", "down"),
    "w4a8": partial(_products, "w4a8", "gate-up", "weight_only_mm_fp8"),
}
