"""CUDA C++ kernels for sm_90a on the host: asm statements become calls of cuda_machine.h, g++ compiles the rest.

    kernel = Kernel(source, "gathered_mm", types, threads, smem_bytes, 1, tmp_path)
    kernel.launch(programs, stream, arguments, pdl)()  # as nvrtc.Kernel: TensorMap values, addresses and integers
    on_host(monkeypatch, tmp_path)         # all kernels of nvrtc from here on

Clusters run one after another, the blocks of each side by side.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertile.device import Device
from expertile.ops.launch import nvrtc

Fault = Callable[[str], str]  # of a kernel's source

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")
_SHARED = "char memory[];"
_DECLARED = {"extern __shared__ ": "", "extern __shared__ __align__(1024) ": "machine::block->base = 1024; "}
_MACHINE = Path(__file__).with_name("cuda_machine.h")

# Of an asm statement's text: the call it becomes, its operands behind what stands here. None: nothing happens.
_CALLS: tuple[tuple[str, str | None], ...] = (
    (r"mapa.*mbarrier\.arrive\.shared::cluster", "mbarrier_arrive_at("),
    (r"mapa.*st\.async", "st_async("),
    (r"barrier\.cluster\.arrive", "cluster_sync("),
    (r"cluster_ctarank", "cluster_rank("),
    (r"elect\.sync", "elect("),
    (r"redux\.sync\.or", "redux_or("),
    (r"mbarrier\.init", "mbarrier_init("),
    (r"mbarrier\.try_wait", "mbarrier_wait("),
    (r"mbarrier\.test_wait", "mbarrier_test("),
    (r"cp\.async\.mbarrier\.arrive\.noinc", "cp_async_arrive("),
    (r"mbarrier\.arrive\.expect_tx", "mbarrier_expect("),
    (r"^mbarrier\.arrive\.shared::cta", "mbarrier_arrive("),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes \[", "tma_load("),
    (r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta", "tma_store("),
    (r"cp\.reduce\.async\.bulk\.tensor.*\.add", "tma_add("),
    (r"cp\.async\.bulk\.", None),
    (r"cp\.async\.c[ga]\.shared\.global \[%0\], \[%1\], 16", "cp_async_16("),
    (r"cp\.async\.c[ga]\.shared\.global \[%0\], \[%1\], %2", "cp_async("),
    (r"cp\.async\.commit_group", "cp_async_commit("),
    (r"cp\.async\.wait_group", "cp_async_wait("),
    (r"bar\.sync %0, 128", "bar_sync("),
    (r"ld\.shared\.f32", "ld_shared_f32("),
    (r"ld\.shared\.u16", "ld_shared_u16("),
    (r"ld\.shared\.v4", "ld_shared_v4("),
    (r"ld\.shared\.b32", "ld_shared_b32("),
    (r"st\.shared\.f32", "st_shared_f32("),
    (r"st\.shared\.v2\.f32", "st_shared_v2("),
    (r"st\.shared\.v4", "st_shared_v4("),
    (r"st\.shared\.b32", "st_shared_b32("),
    (r"ld\.global\.v4", "ld_global_v4("),
    (r"ld\.relaxed\.gpu", "ld_now("),
    (r"griddepcontrol\.wait", "grid_wait("),
    (r"@any st\.global\.v4", "st_global_v4_if("),
    (r"st\.global\.v4", "st_global_v4("),
    (r"rcp\.approx", "rcp("),
    (r"cvt\.rn\.bf16x2", "pack(false, "),
    (r"cvt\.rn\.f16x2", "pack(true, "),
    (r"cvt\.f32\.f16", "unpack_half("),
    (r"cvta\.to\.shared", "cvta("),
    (r"wgmma\.commit_group", "wgmma_commit("),
    (r"^(wgmma\.fence|fence|setmaxnreg|griddepcontrol|prefetch|$)", None),
)


def divided(text: str) -> str:
    """Functions of groups.cu for a compiler of the host alone: their reciprocal is a division."""
    return re.sub(r'asm\("rcp[^;]*;[^;]*;', "r = 1.0f / b;", text)


def _split(text: str, at: str) -> list[str]:
    """Parts between the top-level occurrences of the character."""
    parts, depth, quoted, begin = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        depth += (c in "([{") - (c in ")]}")
        beside = text[i - 1 : i] == ":" or text[i + 1 : i + 2] == ":"
        if c == at and depth == 0 and not (at == ":" and beside and text[i : i + 3] != '::"'):
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]]


def _literals(text: str) -> str:
    return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)).replace("\\n", "\n").strip()


def _operands(text: str) -> list[str]:
    found = [re.match(r'\s*"[^"]*"\s*\((.*)\)\s*$', part, re.S) for part in _split(text, ",") if part.strip()]
    return [m.group(1) for m in found if m]


def _call(statement: str) -> str:
    """The C++ of an asm statement: what stands between its parentheses."""
    # `"…" ::"r"(x)` has no outputs.
    template, *rest = _split(statement.replace('::"', ': :"'), ":")
    text, rest = _literals(template), [_operands(part) for part in rest[:2]]
    outputs, inputs = [*rest, [], []][:2]
    if m := re.search(r"stmatrix.*?(\.trans)?\.shared", text):
        return f"machine::stmatrix({'true' if m.group(1) else 'false'}, {', '.join(f'({x})' for x in inputs)});"
    if m := re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16).*, (\d), (\d);", text, re.S):
        n, dtype, *turned = m.groups()
        a, b = inputs[:2]
        return f"machine::wgmma({n}, {int(dtype == 'f16')}, {', '.join(turned)}, &({outputs[0]}), {a}, {b});"
    if m := re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.e4m3\.e4m3", text):
        a, b, to_a, to_b, more = inputs
        return f"machine::wgmma_fp8({m.group(1)}, {more}, &({outputs[0]}), {a} + {to_a}, {b} + {to_b});"
    if m := re.search(r"wgmma\.wait_group\.sync\.aligned (\d)", text):
        return f"machine::wgmma_wait({m.group(1)});"
    for pattern, begin in _CALLS:
        if re.search(pattern, text):
            if begin is None:
                return ";"
            inputs += ["128"] * (begin == "bar_sync(")
            return f"machine::{begin}{', '.join(f'({x})' for x in (*outputs, *inputs))});"
    raise ValueError(f"cuda_emulator: no meaning for asm {text!r}")


def translated(source: str) -> str:
    """The program with calls of the machine for asm statements."""
    made, begin = [], 0
    for m in re.finditer(r"\basm(?: volatile)?\s*\(", source):
        depth, quoted, i = 1, False, m.end()
        while depth:
            c = source[i]
            quoted ^= c == '"' and source[i - 1] != "\\"
            depth += 0 if quoted else (c == "(") - (c == ")")
            i += 1
        made += [source[begin : m.start()], _call(source[m.end() : i - 1])]
        begin = i + (source[i : i + 1] == ";")
    text = "".join((*made, source[begin:]))
    for declared, made_so in _DECLARED.items():
        text = text.replace(declared + _SHARED, made_so + "char* memory = machine::block->shared.data();")
    return text


def _entry(name: str, types: tuple[Any, ...]) -> str:
    """A C function that runs the kernel's blocks; what went wrong, or an empty text."""
    given = []
    for i, t in enumerate(types):
        kind = {ctypes.c_int32: "int", ctypes.c_int64: "long long"}.get(t)
        given.append(
            f"*(TensorMap*)v[{i}]" if t is nvrtc.TensorMap else f"*({kind}*)v[{i}]" if kind else f"(A)*(void**)v[{i}]"
        )
    return (
        "struct A { void* p; A(void* x) : p(x) {} template <typename T> operator T*() const { return (T*)p; } };\n"
        f'extern "C" const char* run(int programs, int cluster, int threads, long smem, unsigned seed, void** v) {{\n'
        "  static std::string failure;\n  failure.clear();\n  gridDim.x = programs;\n"
        "  for (int i = 0; i < programs && failure.empty(); i += cluster)\n"
        "    try { machine::run_cluster(i, cluster, threads, smem, seed + i, "
        f"[&] {{ {name}({', '.join(given)}); }}); }}\n"
        "    catch (const std::exception& e) { failure = e.what(); }\n  return failure.c_str();\n}\n"
    )


class Map(ctypes.Structure):
    """`machine::Map`, in the place of a CUtensorMap."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("pitches", ctypes.c_uint64 * 4),
        ("shape", ctypes.c_uint32 * 5),
        ("box", ctypes.c_uint32 * 5),
        *((name, ctypes.c_int) for name in ("rank", "itemsize", "swizzled")),
    )


def tensor_map(
    address: int,
    shape: tuple[int, ...],
    pitches: tuple[int, ...],
    box: tuple[int, ...],
    itemsize: int = 1,
    swizzled: bool = True,
) -> nvrtc.TensorMap:
    """In the place of `nvrtc.tensor_map`."""
    assert len(shape) == len(box) == len(pitches) + 1 and max(box) <= 256
    assert address % 16 == 0 and all(p % 16 == 0 and 0 < p < 2**40 for p in pitches)
    assert not swizzled or box[-1] * itemsize == 128
    made = Map(address, rank=len(shape), itemsize=itemsize, swizzled=swizzled)
    made.pitches[: len(pitches)] = tuple(reversed(pitches))
    made.shape[: len(shape)] = tuple(reversed(shape))
    made.box[: len(box)] = tuple(reversed(box))
    there = nvrtc.TensorMap()
    ctypes.memmove(ctypes.byref(there), ctypes.byref(made), ctypes.sizeof(made))
    return there


def _compile(made: Path, text: str, *options: str) -> None:
    """Have g++ make a file, which other processes see when it is whole."""
    with tempfile.TemporaryDirectory(dir=made.parent) as place:
        source, output = Path(place) / ("source.h" if made.suffix == ".gch" else "source.cpp"), Path(place) / "output"
        source.write_text(text)
        where = ["-I", str(made.parent), "-I", str(_MACHINE.parent)]
        flags = ["-std=c++20", "-O1", "-w", "-Wno-psabi", "-fPIC", *where]
        subprocess.run([str(COMPILER), *flags, "-o", output, source, *options], check=True)
        output.replace(made)


def _machine(folder: Path) -> Path:
    """The machine's library. It and its header, most of the work for a kernel, are compiled once."""
    header, library = folder / f"{_MACHINE.name}.gch", folder / "machine.so"
    if not header.exists():
        _compile(header, _MACHINE.read_text())
    if not library.exists():
        _compile(library, _MACHINE.with_suffix(".cpp").read_text(), "-shared")
    return library


class Kernel:
    """In the place of `nvrtc.Kernel`. `seed` picks the order in which threads and loads come."""

    def __init__(
        self, source: str, name: str, types: Any, threads: int, smem_bytes: int, cluster: int, folder: Path
    ) -> None:
        text = f'#include "{_MACHINE.name}"\n' + translated(source) + _entry(name, tuple(types))
        library = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            _compile(library, text, "-shared", str(_machine(folder)))
        self._run = ctypes.CDLL(str(library)).run
        self._run.restype = ctypes.c_char_p
        self._types, self._threads, self._smem, self.cluster, self.seed = types, threads, smem_bytes, cluster, 0

    def launch(self, programs: int, stream: int, arguments: Any, pdl: bool) -> Callable[[], None]:
        return lambda: self._launch(programs, arguments)

    def _launch(self, programs: int, arguments: Any) -> None:
        values = [t(a) if t is not nvrtc.TensorMap else a for t, a in zip(self._types, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        failure = self._run(programs, self.cluster, self._threads, ctypes.c_long(self._smem), self.seed, pointers)
        if failure:
            raise RuntimeError(failure.decode())


def on_host(patch: pytest.MonkeyPatch, folder: Path, programs: int = 2, seed: int = 0, fault: Fault = str) -> None:
    """Have kernels that `nvrtc` would compile run here, as that many blocks, with a fault planted in their source."""

    def kernel(source: str, name: str, types: Any, threads: int, smem_bytes: int, cluster: int = 1) -> Kernel:
        made = Kernel(fault(source), name, types, threads, smem_bytes, cluster, folder)
        made.seed = seed
        return made

    patch.setattr(nvrtc, "kernel", kernel)
    patch.setattr(nvrtc, "compiled", lambda source, *options: source)
    patch.setattr(nvrtc, "tensor_map", tensor_map)
    patch.setattr(nvrtc, "missing", lambda: None)
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(nvrtc, "current_stream", lambda device: 0)
    patch.setattr(Device, "current", lambda device: replace(Device.by_name("h100 sxm"), sm_count=programs))


def grouped_on_host(
    patch: pytest.MonkeyPatch, module: Any, folder: Path, programs: int, seed: int = 0, fault: Fault = str
) -> torch.Tensor:
    """`on_host` for a backend that keeps launches by address; returns the counter, which each run leaves at zero."""
    on_host(patch, folder, programs=programs, seed=seed, fault=fault)
    for kept in ("_launch", "_kernel"):
        made = getattr(module, kept)
        patch.setattr(module, kept, getattr(made, "__wrapped__", made))
    counter = torch.zeros(1, dtype=torch.int32)
    patch.setattr(module, "tile_counter", lambda dynamic, like: counter)
    return counter


def shows(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[pytest.MonkeyPatch, int], Any], run: Callable[[], None]
) -> None:
    """That one of four runs goes wrong, each after `prepare(patch, seed)`."""
    for seed in range(4):
        with monkeypatch.context() as patch:
            prepare(patch, seed)
            try:
                run()
            except (AssertionError, RuntimeError):
                return
    pytest.fail("four runs were right")


def without(function: str, what: str, nth: int = 0) -> Fault:
    """The fault of leaving out a statement: of those of that function that begin with `what`, a function that is called
    or the instruction of an asm statement, number `nth`."""

    def fault(source: str) -> str:
        begin = source.index(f" {function}(")
        body = source.index(") {", begin)
        end = source.index("\n}", body)
        pattern = rf'asm volatile\("{re.escape(what)}' if "." in what else rf"\b{what}\("
        found = [m.start() for m in re.finditer(pattern, source[body:end])]
        at = body + found[nth]
        return source[:at] + source[source.index(";\n" if "." not in what else ");", at) + (1 if "." in what else 0) :]

    return fault


def constant(name: str, value: int) -> Fault:
    """The fault of another value of a constant."""

    def fault(source: str) -> str:
        changed, count = re.subn(rf"\b{name} = [^,;]+", f"{name} = {value}", source)
        assert count == 1
        return changed

    return fault
