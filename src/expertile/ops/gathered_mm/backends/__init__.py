"""The backends of the gathered products, one file each.

A new backend is one file that ends in `BACKEND = Backend(...)` and its name here.
"""

from functools import partial

from expertile.ops.backend import named
from expertile.ops.gathered_mm import reference
from expertile.ops.gathered_mm.backend import Backend
from expertile.ops.gathered_mm.backends import (
    composed,
    cuda_gated,
    cuda_gather,
    cuda_wgrad,
    gluon_gather,
    triton_gather,
)

BACKENDS: tuple[Backend, ...] = tuple(
    module.BACKEND for module in (reference, cuda_wgrad, cuda_gather, cuda_gated, composed, triton_gather, gluon_gather)
)

by_name = partial(named, BACKENDS)  # the backend called so; ValueError lists those there are
