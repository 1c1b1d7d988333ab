"""Every way to compute attention, in one tuple."""

from __future__ import annotations

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
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise ValueError(f"backend: expected auto or one of {', '.join(b.name for b in BACKENDS)}, got {name!r}")
