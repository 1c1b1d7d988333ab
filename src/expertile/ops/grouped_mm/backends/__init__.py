"""The backends of `grouped_mm`, one file each, in the order in which they are shown: peers first, then our kernels.

A new backend is one file that ends in `BACKEND = Backend(...)` and one line here.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from expertile.ops.backend import named
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.backends import cublas_grouped, loop, padded_bmm, quack, torch_grouped

BACKENDS: tuple[Backend, ...] = (
    loop.BACKEND,
    padded_bmm.BACKEND,
    torch_grouped.BACKEND,
    cublas_grouped.BACKEND,
    quack.BACKEND,
)

# Triton has no wheels outside Linux; the package works without it.
if find_spec("triton") is not None:
    from expertile.ops.grouped_mm.backends import gluon_hopper, triton_pointer, triton_tma

    BACKENDS += (triton_pointer.BACKEND, triton_tma.BACKEND, gluon_hopper.BACKEND)

# Those that run on a CPU in earnest, not in the Triton interpreter.
CPU_ORDER = tuple(b.name for b in BACKENDS if b.cpu_place is not None)

by_name = partial(named, BACKENDS)  # the backend called so; ValueError lists those there are
