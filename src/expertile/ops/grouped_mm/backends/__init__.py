"""The backends of `grouped_mm`, one file each, in the order in which they are shown: peers first, then our kernels.

A new backend is one file that ends in `BACKEND = Backend(...)` and its name here.
"""

from functools import partial

from expertile.ops.backend import named
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import (
    cublas_grouped,
    cuda_grouped,
    gluon_hopper,
    loop,
    padded_bmm,
    quack,
    torch_grouped,
    triton_pointer,
    triton_tma,
)

BACKENDS: tuple[Backend, ...] = tuple(
    module.BACKEND
    for module in (
        loop,
        padded_bmm,
        torch_grouped,
        cublas_grouped,
        quack,
        triton_pointer,
        triton_tma,
        cuda_grouped,
        gluon_hopper,
    )
)

# Those that run on a CPU in earnest, not in the Triton interpreter.
CPU_ORDER = tuple(b.name for b in BACKENDS if b.cpu_place is not None)

by_name = partial(named, BACKENDS)  # the backend called so; ValueError lists those there are
