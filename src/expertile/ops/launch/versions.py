"""What differs between the versions of Triton that expertile runs with; no other module knows.

Tested: Triton 3.6 (torch 2.11), 3.7 (2.12), 3.8 (2.14) and 3.9 (2.15). A newer one is warned of once and runs as far as
its names are those of 3.9; launches are left to Triton itself (`launcher` returns None).

In kernels:
- `tma_load(desc, coord, bar, dst, pred=True)`, `tma_store(desc, coord, src)`: TMA copies between global and shared
  memory. Gluon calls them `tma.async_copy_*` up to 3.8 and `tma.async_load`, `tma.async_store` from 3.8 on.
- `cp_async(smem, pointers, mask)`: Ampere's copies of single elements to shared memory, renamed likewise.
- `thread_barrier()`: `gl.thread_barrier` in 3.6, `gl.barrier` since.
- `reinterpret(smem, dtype, shape, layout)`: the same shared memory under another dtype and shape; `_reinterpret` before
  3.9.

At launches:
- `FP_FUSION`: every kernel here is written, tested and measured with fused multiply-adds. Triton's default is on up to
  3.9 and off from 3.10.
- `launcher`, `encode_descriptor`: the C functions behind Triton's own launch.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime import driver

OLDEST, NEWEST = (3, 6), (3, 9)
TRITON = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])

KNOWN_RANGE = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
# Whether this version's C launcher is known.
KNOWN = OLDEST <= TRITON <= NEWEST

if not KNOWN:
    warnings.warn(
        f"expertile is tested with Triton {KNOWN_RANGE}, this is {triton.__version__}: kernels may not compile, and "
        "calls may take longer on the host",
        stacklevel=2,
    )

FP_FUSION = {"enable_fp_fusion": True}

if hasattr(tma, "async_load"):
    tma_load, tma_store, cp_async = tma.async_load, tma.async_store, async_copy.async_load
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    cp_async = async_copy.async_copy_global_to_shared


@builtin
def tma_add(tensor_desc, coord, src, _semantic=None):
    """Add shared memory to global memory by TMA, element by element: a name that Gluon has in newer versions only."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


# Of the threads of a program, or of a partition of `warp_specialize`.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def reinterpret(smem, dtype, shape, layout, _semantic=None):
    method = smem.reinterpret if hasattr(smem, "reinterpret") else smem._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


Queue = Callable[[int, int, Sequence[Any]], None]

# CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: what lies outside reads as zeros.
_FILL_ZEROS = 0


def launcher(kernel: Any, cluster: int = 1) -> Queue | None:
    """Triton's C launcher of `kernel`, a `triton.compile` result, which is loaded on the current device: a function of
    the number of programs, the stream, and the arguments with descriptors encoded. None where Triton has to launch.

    `cluster` programs side by side form a thread block cluster. Triton knows clusters only as one program on several
    CTAs, but its launcher takes the number of CTAs beside the binary, multiplies the grid by it and sets the launch
    attribute: a kernel compiled as independent programs is launched with that number changed."""
    if not KNOWN:
        return None
    made = kernel.run  # loads the binary
    if made.global_scratch_size or made.profile_scratch_size or getattr(made, "gsan_enabled", False):
        return None
    warps, _, shared = metadata = kernel.packed_metadata
    if cluster > 1:
        metadata = (warps, cluster, shared)
    function, options = kernel.function, (made.launch_cooperative_grid, made.launch_pdl)
    described = bool(boxes(kernel))
    if TRITON == (3, 6):
        # The C function generated for this signature; with descriptors, a closure around it that encodes them.
        raw, cells = made.launch, getattr(made.launch, "__closure__", None)
        if (cells is None) == described:
            return None  # descriptors that this GPU is handed in another form
        if cells is not None:
            raw = cells[raw.__code__.co_freevars.index("launcher")].cell_contents

        def queue_3_6(programs: int, stream: int, arguments: Sequence[Any]) -> None:
            raw(programs, 1, 1, stream, function, *options, None, None, metadata, None, None, None, *arguments)

        return queue_3_6

    # One C function for all kernels, told how to read the arguments.
    common, signed, notes = driver.active.utils.launch, made.kernel_signature, made.arg_annotations
    if (made.launch is common) == described:
        return None

    def queue(programs: int, stream: int, given: Sequence[Any]) -> None:
        common(programs, 1, 1, stream, function, *options, metadata, None, None, None, None, None, notes, signed, given)

    return queue


def boxes(kernel: Any) -> tuple[Any, ...]:
    """What the compiled kernel takes of each of its descriptors: dicts of "swizzle", "elem_size", "elem_type",
    "block_size"."""
    return tuple(kernel.metadata.tensordesc_meta or ())


def encode_descriptor(box: dict[str, Any], address: int, shape: list[int], strides: list[int]) -> tuple[Any, ...]:
    """The launcher's arguments for one descriptor: the CUtensorMap, the shape, the strides (in elements)."""
    utils = driver.active.utils
    fill = utils.fill_tma_descriptor if TRITON == (3, 6) else utils.fill_tma_descriptor_tiled
    elem_type = TMA_DTYPE_DEVICE_TO_HOST[box["elem_type"]]
    encoded = fill(address, box["swizzle"], box["elem_size"], elem_type, box["block_size"], shape, strides, _FILL_ZEROS)
    return (encoded, *shape, *strides)
