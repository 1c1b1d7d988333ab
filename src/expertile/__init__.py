"""expertile: grouped matrix products of Mixture-of-Experts models, and a lab that measures them honestly."""

from expertile.device import Device
from expertile.ops.grouped_mm.api import explain, grouped_mm

__version__ = "0.1.0"

__all__ = ["Device", "__version__", "explain", "grouped_mm"]
