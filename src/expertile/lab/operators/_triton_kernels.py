"""triton_kernels, as gpt-oss and vLLM use it: products with MXFP4 weights, and the layer that gathers, activates and
scatters in its two products. Weights and scales take its Hopper layouts before timing, for 4 warps or 8, whichever is
faster; so does what it must know of a product's groups. A layer's routing is part of the call."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.device import Device
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.lab.operators import products
from expertile.lab.operators._plain import Weight, fastest, packed, scales
from expertile.lab.race.operator import Call, Workload
from expertile.ops.gathered_mm.activation import GPT_OSS_LIMIT, GPT_OSS_SCALE

_WARPS = (4, 8)
_EXPERTS_AT_ONCE = 16  # its conversion takes some 16 bytes for each byte of weights


def supports(w: Workload, device: Device) -> str | None:
    if device.kind != "cuda" or device.capability != (9, 0):
        return "its layouts of MXFP4 are made for compute capability 9.0 here"
    return "knows MXFP4, not INT4" if dict(w.dims).get("format") == "int4" else None


class Prepared:
    """A weight [G, N, K] in its layouts: w [G, K, N], and what goes with it."""

    def __init__(self, weight: Mxfp4Weight, warps: int, bias: Tensor | None = None) -> None:
        from triton_kernels.matmul_ogs import PrecisionConfig
        from triton_kernels.matmul_ogs_details import opt_flags
        from triton_kernels.tensor import FP4
        from triton_kernels.tensor_details import layout

        # As vLLM calls it on Hopper.
        opt_flags.update_opt_flags_constraints({"split_k": 1})
        of_values = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        of_scales = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=warps)
        self.w = _converted(packed(weight), FP4, *of_values)
        self.bias = None if bias is None else bias.float()
        self.precision = PrecisionConfig(weight_scale=_converted(scales(weight), torch.uint8, *of_scales))


def _converted(x: Tensor, dtype: Any, layout: Any, options: dict[str, Any]) -> Any:
    """[G, N, columns] as a tensor of triton_kernels over [G, K, N], some experts at a time."""
    from triton_kernels.tensor import Storage, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor import Tensor as Wrapped

    parts = [
        convert_layout(wrap_torch_tensor(part.transpose(-2, -1), dtype=dtype), layout, **options)
        for part in x.split(_EXPERTS_AT_ONCE)
    ]
    # Each part is the transpose of contiguous data.
    data = torch.cat([part.storage.data.transpose(-2, -1) for part in parts]).transpose(-2, -1)
    whole = layout((x.shape[0], *parts[0].storage.layout.initial_shape[1:]), **options)
    return Wrapped(Storage(data, whole), dtype=dtype, shape=[x.shape[0], *parts[0].shape[1:]])


def _of_groups(w: Workload, device: torch.device) -> Any:
    """What its kernels know of rows that lie group by group."""
    from triton_kernels.routing import RoutingData, compute_expt_data

    sizes = torch.tensor(products.sizes(w), dtype=torch.int32, device=device)
    return RoutingData(None, sizes, len(sizes), 1, compute_expt_data(sizes, len(sizes), products.rows(w)))


def bind(w: Workload, a: Tensor, weight: Mxfp4Weight) -> Call:
    """a [M, K], its rows group by group."""
    from triton_kernels.matmul_ogs import matmul_ogs

    routing = _of_groups(w, a.device)

    def of_warps(warps: int) -> Call:
        prepared = Prepared(weight, warps)
        return lambda: (matmul_ogs(a, prepared.w, None, routing, precision_config=prepared.precision),)

    return fastest(("triton_kernels", w), _WARPS, 8, of_warps)


def bind_bf16(w: Workload, a: Tensor, weight: Weight) -> Call:
    """The same product of the weights' values in bfloat16."""
    from triton_kernels.matmul_ogs import matmul_ogs

    b, routing = weight.dequantize(torch.bfloat16).transpose(-2, -1), _of_groups(w, a.device)
    return lambda: (matmul_ogs(a, b, None, routing),)


def layer(w: Workload, x: Tensor, router: Tensor, weights: tuple[Mxfp4Weight, Tensor, Mxfp4Weight, Tensor]) -> Call:
    """gpt-oss's layer. weights: gate_up with interleaved rows, its bias, down, its bias."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
    from triton_kernels.routing import routing
    from triton_kernels.swiglu import swiglu_fn

    gate_up, gate_up_bias, down, down_bias = weights
    specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"))
    activation, top_k = FusedActivation(specs, (GPT_OSS_SCALE, GPT_OSS_LIMIT), 2), w["top_k"]

    def of_warps(warps: int) -> Call:
        up, low = Prepared(gate_up, warps, gate_up_bias), Prepared(down, warps, down_bias)

        def call() -> tuple[Tensor, ...]:
            data, gather, scatter = routing(F.linear(x, router), top_k)
            act = matmul_ogs(
                x, up.w, up.bias, data, gather_indx=gather, precision_config=up.precision, fused_activation=activation
            )
            how: Any = dict(scatter_indx=scatter, precision_config=low.precision, gammas=data.gate_scal)
            return (matmul_ogs(act, low.w, low.bias, data, **how),)

        return call

    return fastest(("triton_kernels", w), _WARPS, 8, of_warps)
