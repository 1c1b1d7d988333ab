"""The backends of `weight_only_mm`, one file each, in the order in which `auto` asks them on a GPU.

A new backend is one file that ends in `BACKEND = Backend(...)` and one line here.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from expertile.ops.backend import named
from expertile.ops.weight_only_mm.backends import dequant, loop
from expertile.ops.weight_only_mm.problem import Backend

_OURS: tuple[Backend, ...] = ()
# Triton has no wheels outside Linux; the package works without it.
if find_spec("triton") is not None:
    from expertile.ops.weight_only_mm.backends import gluon_int4, gluon_w4a8, triton_int4

    _OURS = (gluon_int4.BACKEND, triton_int4.BACKEND, gluon_w4a8.BACKEND)

BACKENDS: tuple[Backend, ...] = (*_OURS, dequant.BACKEND, loop.BACKEND)

by_name = partial(named, BACKENDS)  # the backend called so; ValueError lists those there are
