"""CUDA C++ compiled at run time (NVRTC) and launched through the driver, for kernels that Triton cannot write.

Both libraries are those that torch brings; ctypes calls them, so that nothing else need be installed. A kernel's
parameters are `TensorMap` values, addresses and integers.
"""

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

ADDRESS, INT, LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64  # a kernel's parameters, beside `TensorMap`
_KEPT = "kernel.cubin"
_TYPES = "typedef unsigned int u32;\ntypedef unsigned long long u64;\ntemplate <int N> struct Columns {};\n"
_PARTS, GROUPS, TILES, RING = (Path(__file__).with_name(f"{n}.cu") for n in ("parts", "groups", "tiles", "ring"))
HIGH_WORD = hex(1 << 30 | 1024 >> 4)  # of a matrix descriptor: the 128-byte swizzle, 1024 bytes for 8 rows
_SWIZZLE_128, _PROMOTE_128, _PROMOTE_256 = 3, 2, 3  # CU_TENSOR_MAP_SWIZZLE_128B, _L2_PROMOTION_L2_128B, _256B
_TMA_TYPES = {1: 0, 2: 1, 4: 7}  # CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT16, _FLOAT32, by size in bytes
_CLUSTER, _PDL = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION
_RELAXED, _NON_BLOCKING = 2, 1  # CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_NON_BLOCKING
_MAX_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class TensorMap(ctypes.Structure):
    """A CUtensorMap, which TMA reads; the driver wants it at a multiple of 64."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


_Room = ctypes.c_char * (ctypes.sizeof(TensorMap) + 64)
_U64, _U32 = (tuple(of * rank for rank in range(6)) for of in (ctypes.c_uint64, ctypes.c_uint32))
_ONES = tuple(of(*(1,) * rank) for rank, of in enumerate(_U32))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _nvrtc() -> ctypes.CDLL | None:
    """NVRTC of the CUDA that torch was built with, or None."""
    # Without CUDA in torch kernels still compile, for a GPU that is elsewhere.
    name = f"libnvrtc.so.{(torch.version.cuda or '13').split('.')[0]}"
    # Wheels keep it beside torch, where the loader does not look unless torch has loaded it.
    beside = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))
    for place in (name, *map(str, beside)):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def missing() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    return None if _nvrtc() is not None else "needs NVRTC, the run-time compiler of CUDA C++, beside torch"


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def program(macros: Mapping[str, int], products: str, *sources: Path) -> str:
    """A kernel's program: the macros, `products` (the definitions of its wgmma instructions), parts.cu, `sources`."""
    defined = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    return defined + _TYPES + products + "".join(path.read_text() for path in (_PARTS, *sources))


def multiply(n: int, half: bool, turned: tuple[int, int]) -> str:
    """The definition of `multiply(Columns<n>(), sum, a, b)`: sum += a · b for 64 rows of a, n columns of b and 16
    summands, by the low words of their descriptors. half: float16, else bfloat16. turned: for a and b 1 where K is not
    contiguous."""
    names = ", ".join(f"%{i}" for i in range(n // 2))
    registers = ", ".join(f'"+f"(sum[{i}])' for i in range(n // 2))
    a, b, dtype = f"%{n // 2}", f"%{n // 2 + 1}", "f16" if half else "bf16"
    return (
        f"__device__ __forceinline__ void multiply(Columns<{n}>, float* sum, u32 a, u32 b) {{\n"
        '  asm volatile("{ .reg .pred more; .reg .b64 p, q; setp.eq.b32 more, 0, 0; "\n'
        f'    "mov.b64 p, {{{a}, {HIGH_WORD}}}; mov.b64 q, {{{b}, {HIGH_WORD}}}; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{names}}}, p, q, more, 1, 1, "\n'
        f'    "{turned[0]}, {turned[1]}; }}"\n'
        f'    : {registers} : "r"(a), "r"(b));\n}}\n'
    )


def compiled(source: str, *more: str) -> bytes:
    """The binary (cubin) for sm_90a of a CUDA C++ program; `more`: further options of the compiler. It is kept where
    Triton keeps what it compiles (`TRITON_CACHE_DIR`). RuntimeError with the compiler's messages where the program does
    not compile."""
    options = ("--gpu-architecture=sm_90a", "--std=c++17", *more)
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise RuntimeError(missing())
    version = (ctypes.c_int * 2)()
    nvrtc.nvrtcVersion(ctypes.byref(version), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    kept = get_cache_manager(hashlib.sha256("\n".join((*map(str, version), *options, source)).encode()).hexdigest())
    if (path := kept.get_file(_KEPT)) is not None:
        return Path(path).read_bytes()
    binary = _compiled(nvrtc, source, options)
    kept.put(binary, _KEPT, binary=True)
    return binary


def _compiled(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"expertile.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {log.value.decode(errors='replace')}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    shape: tuple[int, ...],
    pitches: tuple[int, ...],
    box: tuple[int, ...],
    itemsize: int = 1,
    swizzled: bool = True,
) -> TensorMap:
    """A tensor as TMA sees it, elements of 1, 2 or 4 bytes, the contiguous dimension last: `pitches` in bytes, of all
    others. Boxes lie in shared memory `swizzled` by 128 bytes or row by row; what is outside of the tensor reads as
    zeros and is not written. L2 is asked for 256 bytes at a time where rows begin at multiples of them, else for 128:
    products of rows of 1000 elements are 1.17 times as fast (H200, 2026-11-28)."""
    rank, room = len(shape), _Room()
    encoded = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(encoded),
        _TMA_TYPES[itemsize],
        rank,
        ctypes.c_void_p(address),
        _U64[rank](*shape[::-1]),
        _U64[rank - 1](*pitches[::-1]),
        _U32[rank](*box[::-1]),
        _ONES[rank],
        0,
        _SWIZZLE_128 if swizzled else 0,
        _PROMOTE_128 if any(p % 256 for p in pitches) else _PROMOTE_256,
        0,
    )
    _check(status, "cuTensorMapEncodeTiled")
    return encoded


def ragged(inner: int, pitch: int, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, pitches) of rows of `inner` elements, `pitch` bytes apart, as `tma_ragged` of parts.cu wants them: the
    window of rows moves by coordinates alone (see `launch.blocks.ragged`)."""
    return (0x7FFF0000, 0x7FFF0000, 0x40000000, inner), (2**34 * itemsize - pitch, pitch, pitch)


def current_stream(device: int) -> int:
    """Of GPU number `device`."""
    return int(driver.active.get_current_stream(device))


class _Memory:
    """int32 zeros on the current GPU, which are never given back."""

    def __init__(self, count: int) -> None:
        torch.cuda.mem_get_info()  # makes a context for a thread that has none
        driver, address, stream, mode = _driver(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
        # While another thread captures a graph, only this mode allows to ask for memory and to wait for an own stream.
        _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
        try:
            _check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 * count)), "cuMemAlloc")
            _check(driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "cuStreamCreate")
            _check(driver.cuMemsetD32Async(address, 0, ctypes.c_size_t(count), stream), "cuMemsetD32Async")
            _check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
            _check(driver.cuStreamDestroy_v2(stream), "cuStreamDestroy")
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        data = address.value, False
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<i4", "data": data, "version": 3}


def zeros(count: int) -> torch.Tensor:
    """So many int32 zeros on the current GPU, outside of torch's allocator. Waits for no other stream. RuntimeError
    where there is no memory."""
    return torch.as_tensor(_Memory(count), device=torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel loaded on one GPU, which `kernel` makes."""

    module: ctypes.c_void_p
    function: ctypes.c_void_p
    types: tuple[Any, ...]
    threads: int
    smem_bytes: int
    cluster: int = 1

    def launch(self, programs: int, stream: int, arguments: Sequence[Any], pdl: bool) -> Callable[[], None]:
        """What queues `programs` blocks (a multiple of `cluster`) on the stream, as often as it is called; `pdl`: as
        a programmatic dependent of what was queued before. A caller whose arguments come again keeps it: to make it
        takes ten times the host's time of a call."""
        values = [t(a) if t is not TensorMap else a for t, a in zip(self.types, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[0].value[0] = _PDL, pdl
        attributes[1].id, attributes[1].value[:3] = _CLUSTER, (self.cluster, 1, 1)
        # A cluster of one would part the two multiprocessors of a TPC, which neighbours are to have (`wants_pdl`).
        count = 1 + (self.cluster > 1)
        config = _Config((programs, 1, 1), (self.threads, 1, 1), self.smem_bytes, stream, attributes, count)
        queue, told = _driver().cuLaunchKernelEx, ctypes.byref(config)

        def launch(_alive: Any = (values, attributes)) -> None:
            _check(queue(told, self.function, pointers, None), "cuLaunchKernelEx")

        return launch


def kernel(cubin: bytes, name: str, types: Sequence[Any], threads: int, smem_bytes: int, cluster: int = 1) -> Kernel:
    """Load `name` of a binary on the current GPU; `types` are ctypes of its parameters."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    _check(_driver().cuFuncSetAttribute(function, _MAX_SMEM, smem_bytes), "cuFuncSetAttribute")
    return Kernel(module, function, tuple(types), threads, smem_bytes, cluster)
