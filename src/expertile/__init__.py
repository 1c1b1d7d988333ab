"""expertile: grouped matrix products of Mixture-of-Experts models, and a lab that measures them honestly."""

from importlib.metadata import PackageNotFoundError, version

from expertile.device import Device
from expertile.ops.grouped_mm.api import explain, grouped_mm

try:
    __version__ = version("expertile")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["Device", "__version__", "explain", "grouped_mm"]
