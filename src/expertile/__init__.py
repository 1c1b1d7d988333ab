"""expertile: the matrix products of Mixture-of-Experts models, the operators around them, and a lab that measures them
honestly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from expertile.version import __version__

if TYPE_CHECKING:
    from expertile.device import Device
    from expertile.formats.fp8 import Fp8Blocks
    from expertile.formats.int4 import Int4Weight
    from expertile.formats.mxfp4 import Mxfp4Weight
    from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
    from expertile.moe import MoE, moe_mlp, route
    from expertile.moe.parallel import ExpertParallel, ParallelConfig
    from expertile.moe.parallel_layer import ExpertParallelMoE
    from expertile.ops.any_weight import explain, grouped_mm
    from expertile.ops.attention import attention, explain_attention
    from expertile.ops.pointwise.add_scalar import add_scalar
    from expertile.ops.pointwise.laplacian import laplacian
    from expertile.ops.quantize.api import (
        quantize_activations,
        quantize_per_row,
        quantize_rms_norm,
        quantize_swiglu,
        quantize_tokens,
        quantize_weights,
    )
    from expertile.ops.rows.layer_norm import layer_norm
    from expertile.ops.rows.rms_norm import rms_norm
    from expertile.ops.rows.softmax import softmax
    from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
    from expertile.ops.weight_only_mm.api import int4_grouped_mm, weight_only_mm

# Imported when first asked for: torch takes a second, and kernels need Triton, which not every platform has.
_LATER = {
    "Device": "expertile.device",
    "ExpertParallel": "expertile.moe.parallel",
    "ExpertParallelMoE": "expertile.moe.parallel_layer",
    "Fp8Blocks": "expertile.formats.fp8",
    "Int4Weight": "expertile.formats.int4",
    "MoE": "expertile.moe",
    "Mxfp4Fp8Weight": "expertile.formats.mxfp4_fp8",
    "Mxfp4Weight": "expertile.formats.mxfp4",
    "ParallelConfig": "expertile.moe.parallel",
    "add_scalar": "expertile.ops.pointwise.add_scalar",
    "attention": "expertile.ops.attention",
    "explain": "expertile.ops.any_weight",
    "explain_attention": "expertile.ops.attention",
    "grouped_mm": "expertile.ops.any_weight",
    "int4_grouped_mm": "expertile.ops.weight_only_mm.api",
    "laplacian": "expertile.ops.pointwise.laplacian",
    "layer_norm": "expertile.ops.rows.layer_norm",
    "moe_mlp": "expertile.moe",
    "quantize_activations": "expertile.ops.quantize.api",
    "quantize_per_row": "expertile.ops.quantize.api",
    "quantize_rms_norm": "expertile.ops.quantize.api",
    "quantize_swiglu": "expertile.ops.quantize.api",
    "quantize_tokens": "expertile.ops.quantize.api",
    "quantize_weights": "expertile.ops.quantize.api",
    "rms_norm": "expertile.ops.rows.rms_norm",
    "route": "expertile.moe",
    "scaled_grouped_mm": "expertile.ops.scaled_grouped_mm.api",
    "softmax": "expertile.ops.rows.softmax",
    "weight_only_mm": "expertile.ops.weight_only_mm.api",
}

__all__ = [
    "Device",
    "ExpertParallel",
    "ExpertParallelMoE",
    "Fp8Blocks",
    "Int4Weight",
    "MoE",
    "Mxfp4Fp8Weight",
    "Mxfp4Weight",
    "ParallelConfig",
    "__version__",
    "add_scalar",
    "attention",
    "explain",
    "explain_attention",
    "grouped_mm",
    "int4_grouped_mm",
    "laplacian",
    "layer_norm",
    "moe_mlp",
    "quantize_activations",
    "quantize_per_row",
    "quantize_rms_norm",
    "quantize_swiglu",
    "quantize_tokens",
    "quantize_weights",
    "rms_norm",
    "route",
    "scaled_grouped_mm",
    "softmax",
    "weight_only_mm",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
