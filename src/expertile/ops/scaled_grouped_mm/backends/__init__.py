"""The backends of `scaled_grouped_mm`, one file each, in the order in which `auto` asks them on a GPU.

A new backend is one file that ends in `BACKEND = Backend(...)` and one line here.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from expertile.ops.backend import named
from expertile.ops.scaled_grouped_mm.backends import cuda_fp8, loop, torch_scaled
from expertile.ops.scaled_grouped_mm.problem import Backend

_OURS: tuple[Backend, ...] = ()
# Triton has no wheels outside Linux; the package works without it.
if find_spec("triton") is not None:
    from expertile.ops.scaled_grouped_mm.backends import gluon_fp8, triton_fp8

    _OURS = (gluon_fp8.BACKEND, triton_fp8.BACKEND)

BACKENDS: tuple[Backend, ...] = (cuda_fp8.BACKEND, *_OURS, torch_scaled.BACKEND, loop.BACKEND)

by_name = partial(named, BACKENDS)  # the backend called so; ValueError lists those there are
