"""Every way to compute attention, in one tuple."""

from __future__ import annotations

from expertile.ops._select import named
from expertile.ops.attention import reference
from expertile.ops.attention.backend import Backend
from expertile.ops.attention.backends import gluon_hopper, sdpa, triton_portable

BACKENDS: tuple[Backend, ...] = (
    gluon_hopper.BACKEND,
    triton_portable.BACKEND,
    sdpa.CUDNN,
    sdpa.FA2,
    reference.BACKEND,
)


def by_name(name: str) -> Backend:
    """The backend of that name. ValueError lists those known."""
    return named(BACKENDS, name, also="auto or ")
