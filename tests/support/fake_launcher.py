"""Compiled kernels as if their binary were loaded, with the launcher that this version of Triton makes for them.

From Triton 3.7 on that is Triton's own `CudaLauncher`; Triton 3.6 compiles a C function for each signature, of which
only the closure that encodes descriptors is real here. What would reach the driver is kept."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from expertile.ops.launch import versions

FUNCTION = 7


class Launched(NamedTuple):
    """One call of Triton's C function: grid, stream, options and hooks, then the kernel's arguments."""

    head: tuple[Any, ...]
    arguments: tuple[Any, ...]


def utils(fill: Callable[..., Any], seen: list[Launched]) -> types.SimpleNamespace:
    """A driver's `utils`: `fill` encodes descriptors, launches are appended to `seen`."""
    return types.SimpleNamespace(
        fill_tma_descriptor=fill,
        fill_tma_descriptor_tiled=fill,
        launch=lambda *args: seen.append(Launched(args[:-1], tuple(args[-1]))),
        build_signature_metadata=lambda signature: tuple(signature),
    )


def _record(seen: list[Launched], head: int, *args: Any) -> None:
    seen.append(Launched(args[:head], args[head:]))


def loaded(kernel: Any, seen: list[Launched], packed: tuple[int, int, int] = (4, 1, 1000)) -> Any:
    """`kernel`, a `triton.compile` result, as if loaded: `launch_by_triton(programs, *arguments)` queues it as
    `kernel[grid](...)` would. The active driver's `utils` are those above."""
    if versions.TRITON == (3, 6):
        head = 13  # arguments of the C function before the kernel's, which like any C function has no closure
        made: Any = types.SimpleNamespace(
            launch=nvidia.wrap_handle_tensordesc(
                partial(_record, seen, head), kernel.src.signature, kernel.metadata.tensordesc_meta
            ),
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=kernel.metadata.launch_pdl,
        )

        def launch_by_triton(programs: int, *arguments: Any) -> None:
            options = (made.launch_cooperative_grid, made.launch_pdl)
            made.launch(programs, 1, 1, 0, FUNCTION, *options, None, None, packed, None, None, None, *arguments)

    else:
        with mock.patch.multiple(nvidia, PyKernelArg=lambda nested_tuple, type: type):
            made = nvidia.CudaLauncher(kernel.src, kernel.metadata)

        def launch_by_triton(programs: int, *arguments: Any) -> None:
            made(programs, 1, 1, 0, FUNCTION, packed, None, None, None, *arguments)

    assert driver._active is not None
    return types.SimpleNamespace(
        run=made,
        function=FUNCTION,
        packed_metadata=packed,
        metadata=kernel.metadata,
        src=kernel.src,
        launch_by_triton=launch_by_triton,
    )
