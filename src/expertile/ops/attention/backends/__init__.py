"""Every way to compute attention, in one tuple."""

from functools import partial

from expertile.ops.attention import reference
from expertile.ops.attention.backend import Backend
from expertile.ops.attention.backends import gluon_hopper, sdpa, triton_portable
from expertile.ops.backend import named

BACKENDS: tuple[Backend, ...] = (gluon_hopper.BACKEND, triton_portable.BACKEND, sdpa.CUDNN, sdpa.FA2, reference.BACKEND)

by_name = partial(named, BACKENDS, also="auto or ")  # the backend called so; ValueError lists those there are
