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
_NAMES_OF = {
    "expertile.device": "Device",
    "expertile.formats.fp8": "Fp8Blocks",
    "expertile.formats.int4": "Int4Weight",
    "expertile.formats.mxfp4": "Mxfp4Weight",
    "expertile.formats.mxfp4_fp8": "Mxfp4Fp8Weight",
    "expertile.moe": "MoE moe_mlp route",
    "expertile.moe.parallel": "ExpertParallel ParallelConfig",
    "expertile.moe.parallel_layer": "ExpertParallelMoE",
    "expertile.ops.any_weight": "explain grouped_mm",
    "expertile.ops.attention": "attention explain_attention",
    "expertile.ops.pointwise.add_scalar": "add_scalar",
    "expertile.ops.pointwise.laplacian": "laplacian",
    "expertile.ops.quantize.api": "quantize_activations quantize_per_row quantize_rms_norm quantize_swiglu"
    " quantize_tokens quantize_weights",
    "expertile.ops.rows.layer_norm": "layer_norm",
    "expertile.ops.rows.rms_norm": "rms_norm",
    "expertile.ops.rows.softmax": "softmax",
    "expertile.ops.scaled_grouped_mm.api": "scaled_grouped_mm",
    "expertile.ops.weight_only_mm.api": "int4_grouped_mm weight_only_mm",
}
_LATER = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

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
