"""The backends of the gathered products, one file each.

A new backend is one file that ends in `BACKEND = Backend(...)` and one line here.
"""

from functools import partial

from expertile.ops.backend import named
from expertile.ops.gathered_mm import reference
from expertile.ops.gathered_mm.backend import Backend
from expertile.ops.gathered_mm.backends import composed, cuda_gather, cuda_wgrad, gluon_gather, triton_gather

BACKENDS: tuple[Backend, ...] = (
    reference.BACKEND,
    cuda_wgrad.BACKEND,
    cuda_gather.BACKEND,
    composed.BACKEND,
    triton_gather.BACKEND,
    gluon_gather.BACKEND,
)

by_name = partial(named, BACKENDS)  # the backend called so; ValueError lists those there are
