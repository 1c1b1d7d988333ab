"""The backends of `scaled_grouped_mm`, one file each, in the order in which `auto` asks them on a GPU.

A new backend is one file that ends in `BACKEND = Backend(...)` and one line here.
"""

from functools import partial

from expertile.ops.backend import named
from expertile.ops.scaled_grouped_mm.backends import cuda_fp8, gluon_fp8, loop, torch_scaled, triton_fp8
from expertile.ops.scaled_grouped_mm.problem import Backend

BACKENDS: tuple[Backend, ...] = (
    cuda_fp8.BACKEND,
    gluon_fp8.BACKEND,
    triton_fp8.BACKEND,
    torch_scaled.BACKEND,
    loop.BACKEND,
)

by_name = partial(named, BACKENDS)  # the backend called so; ValueError lists those there are
