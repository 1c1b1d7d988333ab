"""expertile: the matrix products of Mixture-of-Experts models, the operators around them, and a lab that measures them
honestly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from expertile.device import Device
from expertile.ops.grouped_mm.api import explain, grouped_mm

if TYPE_CHECKING:
    from expertile.ops.attention import attention, explain_attention
    from expertile.ops.elementwise import add_scalar
    from expertile.ops.layer_norm import layer_norm
    from expertile.ops.rms_norm import rms_norm
    from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
    from expertile.ops.softmax import softmax
    from expertile.ops.stencil import laplacian
    from expertile.quant import Fp8Blocks

__version__ = "0.1.0"

# Imported when first asked for: their kernels need Triton, which not every platform has.
_LATER = {
    "Fp8Blocks": "expertile.quant",
    "add_scalar": "expertile.ops.elementwise",
    "attention": "expertile.ops.attention",
    "explain_attention": "expertile.ops.attention",
    "laplacian": "expertile.ops.stencil",
    "layer_norm": "expertile.ops.layer_norm",
    "rms_norm": "expertile.ops.rms_norm",
    "scaled_grouped_mm": "expertile.ops.scaled_grouped_mm.api",
    "softmax": "expertile.ops.softmax",
}

__all__ = [
    "Device",
    "Fp8Blocks",
    "__version__",
    "add_scalar",
    "attention",
    "explain",
    "explain_attention",
    "grouped_mm",
    "laplacian",
    "layer_norm",
    "rms_norm",
    "scaled_grouped_mm",
    "softmax",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
