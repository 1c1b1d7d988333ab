"""Humming as a rival of products with 4-bit weights: activations in 16 bits (W4A16) or rounded to e4m3 on every call,
with a scale for each row (W4A8). It compiles a kernel for each workload, configured by its own heuristics. N and K are
filled up to multiples of 128."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.device import Device
from expertile.formats.int4.weight import Int4Weight
from expertile.lab.operators import products
from expertile.lab.operators._plain import Weight, packed, scales
from expertile.lab.race.operator import Call, Workload

_MULTIPLE = 128
_GROUPED = '{"gemm_type": "grouped_contiguous"}'


def supports(w: Workload, device: Device) -> str | None:
    if device.kind != "cuda" or device.capability != (9, 0):
        return "raced on compute capability 9.0 alone"
    return None


def tensors(weight: Weight) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """How it is to read the weights, and the tensors."""
    if isinstance(weight, Int4Weight):
        config = {"quant_method": "humming", "dtype": "uint4", "group_size": weight.group_size}
        return config, {"weight": packed(weight).view(torch.int32), "weight_scale": scales(weight)}
    return {"quant_method": "gpt_oss_mxfp4"}, {"weight": packed(weight), "weight_scale": scales(weight)}


def bind(w: Workload, a: Tensor, weight: Weight, eight_bits: bool = False) -> Call:
    """a [M, K], its rows group by group."""
    from humming.layer import HummingLayer

    groups, n, k = weight.shape
    config, of_weight = tensors(weight)
    with torch.device(a.device):
        layer = HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config=config,
            input_config={"quant_method": "humming", "dtype": "float8e4m3"} if eight_bits else None,
            pad_n_to_multiple=_MULTIPLE if n % _MULTIPLE else 1,
            pad_k_to_multiple=_MULTIPLE if k % _MULTIPLE else 1,
            num_experts=groups,
            torch_dtype=a.dtype,
        )
    layer.load_from_tensors(of_weight)
    layer.transform()
    ends = F.pad(products.offs(w, a.device).long(), (1, 0))
    return lambda: (layer(a, expert_layout=ends, compute_config=_GROUPED),)
