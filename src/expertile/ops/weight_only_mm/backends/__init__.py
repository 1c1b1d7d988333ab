"""The backends of `weight_only_mm`, one file each, in the order in which `auto` asks them on a GPU.

A new backend is one file that ends in `BACKEND = Backend(...)` and its name here.
"""

from functools import partial

from expertile.ops.backend import named
from expertile.ops.weight_only_mm.backends import dequant, gluon_int4, gluon_w4a8, loop, triton_int4
from expertile.ops.weight_only_mm.problem import Backend

BACKENDS: tuple[Backend, ...] = tuple(module.BACKEND for module in (gluon_int4, triton_int4, gluon_w4a8, dequant, loop))

by_name = partial(named, BACKENDS)  # the backend called so; ValueError lists those there are
